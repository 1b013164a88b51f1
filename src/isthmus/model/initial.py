"""Create theta^(0): from the recipe's seed, or from the Hugging Face folder in `model.start`."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from isthmus.config import Recipe
from isthmus.data.corpus import Corpus
from isthmus.data.manifest import TOKENIZER
from isthmus.data.tokenizer import load, tokenizer_bytes
from isthmus.errors import ConfigError
from isthmus.model.digest import shard_digest
from isthmus.model.hf import check_same, read_config, read_params
from isthmus.model.llama import init_params


def first_params(recipe: Recipe, expected: str | None = None) -> dict[str, Tensor]:
    """Return theta^(0); `expected` is its digest when the run began."""
    if not recipe.model.start:
        return init_params(recipe.model, recipe.seed)
    folder = start_folder(recipe)
    check_same(folder, read_config(folder), recipe.model)
    params = read_params(folder, recipe.model.plain)
    tables = recipe.model.shapes().keys() - params.keys()
    params |= init_params(recipe.model, recipe.seed, tables)
    if expected and start_digest(params) != expected:
        raise ConfigError(f"the weights in {folder} are not those that the run began with; put them back")
    return params


def checked_first(recipe: Recipe, corpus: Corpus | None) -> dict[str, Tensor] | None:
    """Return theta^(0) of a run that starts from a folder; None if the seed draws it. A given corpus must
    have the folder's tokenizer."""
    if not recipe.model.start:
        return None
    if corpus:
        check_start_tokenizer(recipe, corpus)
    return first_params(recipe)


def start_folder(recipe: Recipe) -> Path:
    folder = Path(recipe.model.start).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"model.start is {recipe.model.start}, and there is no such folder; give a Hugging Face "
            'folder, or "" for random weights'
        )
    return folder


def start_digest(params: Mapping[str, Tensor]) -> str:
    return shard_digest(params, sorted(params))


def check_start_tokenizer(recipe: Recipe, corpus: Corpus) -> None:
    """Check that the folder's tokenizer made the corpus."""
    path = start_folder(recipe) / TOKENIZER
    if not path.is_file():
        return  # some folders have no tokenizer; then only the vocabulary sizes can be compared
    data = tokenizer_bytes(path)
    if hashlib.sha256(data).hexdigest() == corpus.tokenizer_sha256:
        return
    ours = load(tokenizer_bytes(corpus.tokenizer_path), str(corpus.tokenizer_path)).get_vocab()
    theirs = load(data, str(path)).get_vocab()
    if ours != theirs:
        odd = sum(theirs.get(token) != number for token, number in ours.items())
        raise ConfigError(
            f"the tokenizer of {recipe.data.corpus} is not that of {path.parent} ({odd:,} of {len(ours):,} "
            f"tokens differ); prepare the corpus with --tokenizer {path}"
        )
