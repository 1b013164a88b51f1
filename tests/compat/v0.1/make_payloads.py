"""Write payloads/: tensors, and for every kind of values their bytes and what these decode to."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from isthmus.sparse import TopK, pack_many, unpack_many

SHAPES = {"blocks.weight": (64, 32), "uneven.weight": (20, 35), "prime.weight": (13, 37)}
SHAPES |= {"norm": (100,), "zero": (64,)}

if __name__ == "__main__":
    folder = Path("payloads")
    folder.mkdir()
    generator = torch.Generator().manual_seed(12)
    source = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()
    }
    source["zero"].zero_()
    save_file(source, folder / "source.safetensors")
    for kind in ("fp32", "bf16", "2bit", "fp64", "dense"):
        codec = TopK(
            side=32, keep=1024 if kind == "dense" else 32, values="fp32" if kind == "dense" else kind
        )
        dtype = torch.float64 if kind == "fp64" else torch.float32
        data = pack_many({name: codec.encode(tensor.to(dtype)) for name, tensor in source.items()})
        (folder / f"{kind}.bin").write_bytes(data)
        decoded = {name: codec.decode(payload) for name, payload in unpack_many(data).items()}
        save_file(decoded, folder / f"{kind}.safetensors")
