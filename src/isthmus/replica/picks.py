"""The choices common to all ways of training a recipe: device, precision, text.

A worker that restarts waits for these imports, so there are few.
"""

import os
from dataclasses import replace

import torch

from isthmus import gpu
from isthmus.config import Recipe
from isthmus.data.corpus import Corpus, open_corpus, pinned
from isthmus.data.tokens import Batches, few_held_out, validation_batches
from isthmus.errors import ConfigError
from isthmus.planner.devices import device_kind
from isthmus.planner.rate import usable_cores


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, number = device_kind(name), name.partition(":")[2]
    if kind == "mps" and (number.strip("0") or not torch.backends.mps.is_available()):
        raise ConfigError(
            f'device is "{name}", but torch finds no Apple GPU of that name here (macOS 14 on Apple silicon '
            "has one: mps); use --device cpu"
        )
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        there = (
            f"there {'is' if count == 1 else 'are'} {count} CUDA device{'s' * (count != 1)}"
            if count
            else "there is no CUDA device"
        )
        raise ConfigError(
            f'device is "{name}", but {there} here; use --device {"cuda:0" if count else "cpu"}'
        )
    return torch.device(name)


def pick_precision(recipe: Recipe, device: torch.device, capability: tuple[int, int] | None = None) -> str:
    """The precision on this device; `capability` as in `gpu.computes_in_bf16`."""
    if recipe.inner.precision == "fp64" and device.type in gpu.NO_DOUBLE:
        raise ConfigError(
            f'inner.precision is "fp64", which {device.type} does not have; set fp32, or use --device cpu'
        )
    if recipe.inner.precision != "auto":
        return recipe.inner.precision
    return "bf16" if gpu.computes_in_bf16(device, capability) else "fp32"


def precision_note(recipe: Recipe, device: torch.device, capability: tuple[int, int] | None = None) -> str:
    """A line if "auto" gives an unexpected precision on a GPU; else ""."""
    if recipe.inner.precision != "auto" or device.type != "cuda":
        return ""
    if pick_precision(recipe, device, capability) == "bf16":
        return ""
    return (
        "this GPU has no bf16 arithmetic of its own (it is older than Ampere), and torch's stand-in is slow: "
        'inner.precision = "auto" is fp32 here'
    )


def as_picked(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe with this device's precision, to compute its memory."""
    return replace(recipe, inner=replace(recipe.inner, precision=pick_precision(recipe, device)))


def pick_threads(asked: int = 0) -> int:
    """Set and return this process's CPU threads: the number given by an option or by OMP_NUM_THREADS; else
    one per core that it may use.

    The thread count does not depend on load: a sum's last bits may depend on the number of threads.
    """
    threads = asked or torch.get_num_threads()
    if not asked and not os.environ.get("OMP_NUM_THREADS"):
        threads = min(threads, usable_cores())  # torch ignores a container's quota
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return threads


def checked_corpus(recipe: Recipe, elsewhere: str = "") -> Corpus:
    """The corpus, after checking its vocabulary and length against the model and the batch. `elsewhere`: its
    place on this machine, if not the recipe's."""
    corpus = open_corpus(elsewhere or recipe.data.corpus)
    if corpus.vocab_size > recipe.model.vocab:
        raise ConfigError(
            f"the tokenizer of {recipe.data.corpus} has {corpus.vocab_size} tokens, the model "
            f"{recipe.model.vocab}; set model.vocab={corpus.vocab_size}, or "
            f"prepare the corpus with --vocab {recipe.model.vocab}"
        )
    # Detects too little text here, before a run directory exists.
    Batches.of(recipe, corpus.train)
    validation_batches(corpus, recipe.inner.batch, recipe.model.context, 1)
    return corpus


def with_pin(recipe: Recipe, corpus: Corpus) -> Recipe:
    """The recipe of a new run, which pins a corpus at a URL to this version."""
    return replace(recipe, data=replace(recipe.data, corpus=pinned(recipe.data.corpus, corpus)))


def held_out_note(recipe: Recipe, corpus: Corpus) -> str | None:
    """One line if the corpus holds out less than the recipe scores."""
    return few_held_out(corpus, recipe.inner.batch, recipe.model.context, recipe.data.eval_batches)
