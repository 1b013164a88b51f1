"""Write a trained model as a Hugging Face folder: a plain model, or one with its boundaries."""

import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.config import Member
from isthmus.data.corpus import Corpus
from isthmus.data.tokenizer import library_faults, load, tokenizer_bytes
from isthmus.disk import explain_disk_full
from isthmus.errors import ConfigError
from isthmus.export.measure import STORED
from isthmus.export.source import Trained
from isthmus.files import replace_file, sync_folder
from isthmus.layout.stages import EMBEDDING, boundaries, table_name
from isthmus.layout.wire import VERSION
from isthmus.model.checkpoint import save_tensors
from isthmus.model.hf import CONFIG, PIPELINED, WEIGHTS, family, hf_config, hf_name

MODELING = Path(__file__).with_name("modeling_isthmus.py")
WHAT = "the exported folder"


def check_target(folder: Path) -> None:
    """Check that the folder does not exist and its parent is writable: nothing is overwritten."""
    if os.path.lexists(folder):
        raise ConfigError(f"{folder} exists; give --to hf another folder")
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise ConfigError(f"there is no folder {parent}; create it, or give --to hf another one")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write into {parent}; give --to hf another folder")


def folder_bytes(trained: Trained, dtype: str, member: Member | None) -> int:
    """Return the folder's size on the disk, without a few small files."""
    shapes = trained.recipe.model.plain.shapes().values()
    weights = STORED[dtype].itemsize * sum(math.prod(shape) for shape in shapes)
    extra = boundary_parts(trained, member)[1] if member else {}
    tokenizer = trained.corpus.tokenizer_path.stat().st_size
    return weights + sum(tensor.nbytes for tensor in extra.values()) + tokenizer


def write_folder(trained: Trained, folder: Path, card: str, dtype: str, member: Member | None) -> None:
    """Write the whole folder or nothing. `member`: keep this replica's boundaries."""
    check_target(folder)
    model, corpus = trained.recipe.model, trained.corpus
    config = hf_config(model, corpus.end_id, dtype)
    plain = {name: trained.params[name] for name in model.plain.shapes()}
    tensors = {hf_name(name): stored(t, STORED[dtype]) for name, t in plain.items()}
    if member:
        keys, extra = boundary_parts(trained, member)
        config |= keys
        tensors |= extra
    with new_folder(folder, tensors, WHAT) as fresh:
        save_tensors(fresh / WEIGHTS, tensors, {"format": "pt"})
        for name, text in _texts(trained, config, card, member).items():
            replace_file(fresh / name, text)


@contextmanager
def new_folder(folder: Path, tensors: Mapping[str, Tensor], what: str) -> Iterator[Path]:
    """Yield a folder to fill under a temporary name, then rename it."""
    fresh = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    needed = sum(tensor.nbytes for tensor in tensors.values())
    try:
        with explain_disk_full(folder.absolute().parent, needed, what):
            fresh.mkdir()
            yield fresh
            os.rename(fresh, folder)
            sync_folder(folder.absolute().parent)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}; give another folder") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _texts(trained: Trained, config: dict[str, Any], card: str, member: Member | None) -> dict[str, str]:
    corpus = trained.corpus
    texts = {
        CONFIG: as_json(config),
        "generation_config.json": as_json(
            dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), corpus.end_id)
        ),
        "tokenizer.json": tokenizer_text(corpus),
        "tokenizer_config.json": as_json(tokenizer_config(corpus, trained.recipe.model.context)),
        "README.md": card,
    }
    if member:
        texts[MODELING.name] = MODELING.read_text(encoding="utf-8")
    return texts


def stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", dtype).contiguous()


def as_json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def boundary_parts(trained: Trained, member: Member) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what boundaries add to config.json and the weights. U stays in fp32: it is small."""
    recipe, bases = trained.recipe, trained.bases
    numbers: dict[str, int] = {}
    tensors: dict[str, Tensor] = {}
    entries = []
    for boundary, layer in enumerate(boundaries(recipe.model, member.config.stages)):
        number = None
        if member.config.compressed:
            key = bases.key(member, boundary)
            number = numbers.setdefault(key, len(numbers))
            tensors[f"boundary.basis_{number}"] = stored(bases.get(member, boundary), torch.float32)
        entries.append({"layer": layer, "basis": number})
        if recipe.model.boundary_tables:
            learned = trained.params[table_name(boundary)]
            tensors[f"boundary.learned_{boundary}"] = stored(learned, torch.float32)
    frozen = member.config.compressed and trained.table is not trained.params[EMBEDDING]
    if frozen:
        tensors["boundary.table"] = stored(trained.table, torch.float32)
    keys = {
        "architectures": ["IsthmusForCausalLM"],
        "model_type": PIPELINED,
        "family": family(recipe.model),
        "attention_bias": False,  # transformers would add one to every matrix of LLaMA's
        "auto_map": {
            "AutoConfig": "modeling_isthmus.IsthmusConfig",
            "AutoModelForCausalLM": "modeling_isthmus.IsthmusForCausalLM",
        },
        "boundaries": entries,
        "subspace_dims": [tensors[f"boundary.basis_{i}"].shape[1] for i in range(len(numbers))],
        "frozen_table": frozen,
        "learned_tables": bool(recipe.model.boundary_tables),
        "wire": member.config.wire,
        "wire_version": VERSION,
        "open_share": bases.share.item() if bases.opening else None,
    }
    return keys, tensors


def tokenizer_text(corpus: Corpus) -> str:
    """Return the corpus's tokenizer.json as training used it, without special tokens around every text: the
    model never saw them there."""
    data = tokenizer_bytes(corpus.tokenizer_path)
    tokenizer = load(data, str(corpus.tokenizer_path))
    with library_faults():
        plain = tokenizer.encode("a").ids == tokenizer.encode("a", add_special_tokens=False).ids
    if plain:
        return data.decode("utf-8")
    return json.dumps(json.loads(data) | {"post_processor": None}, ensure_ascii=False)


def tokenizer_config(corpus: Corpus, context: int) -> dict[str, Any]:
    end = corpus.manifest.end_token
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end,
        "eos_token": end,
        "pad_token": end,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
