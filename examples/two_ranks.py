"""Two ranks as one replica with FSDP2: torchrun --nproc-per-node 2 examples/two_ranks.py FOLDER"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import isthmus

WIDTH = 64


def make_model() -> nn.Module:
    torch.manual_seed(0)  # all ranks begin with the same weights
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in "abc"]
    return nn.Sequential(*layers)


def main(folder: Path, how: str = "fsdp") -> None:
    dist.init_process_group("gloo")
    model = make_model()
    key = folder / "keys" / "a.isthmus.toml"
    if dist.get_rank() == 0:
        settings = {"inner_steps": 5, "rounds": 3, "replicas": ["a"], "keys": folder / "keys"}
        isthmus.OuterSync.create(model, folder / "bucket", **settings)
    dist.barrier()
    if how == "fsdp":
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())  # each rank reads its own part of the batch
    with isthmus.OuterSync(model, key=key) as sync:
        while not sync.done:
            x = torch.randn(16, WIDTH)
            loss = (model(x) - x.flip(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if sync.step(loss, tokens=len(x)):
                digest = sync.digest  # all ranks ask together
                print(f"rank {dist.get_rank()}: round {sync.round}, weights {digest[:12]}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
