"""What every way to train a recipe asks first: its device, its precision, its text.

A worker that starts again waits for what is imported here, so it is little.
"""

import os
from dataclasses import replace

import torch

from isthmus import gpu
from isthmus.config import Recipe
from isthmus.data.corpus import Corpus, open_corpus, pinned
from isthmus.data.tokens import Batches, few_held_out, validation_batches
from isthmus.errors import ConfigError
from isthmus.planner.rate import usable_cores


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda", "mps") or not (number.isdigit() or not number):
        raise ConfigError(f'device is "{name}"; it is one of auto, cpu, cuda, cuda:N, mps')
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
    """What "auto" means on this device; `capability` as in `gpu.computes_in_bf16`."""
    if recipe.inner.precision == "fp64" and device.type in gpu.NO_DOUBLE:
        raise ConfigError(
            f'inner.precision is "fp64", which {device.type} does not have; set fp32, or use --device cpu'
        )
    if recipe.inner.precision != "auto":
        return recipe.inner.precision
    return "bf16" if gpu.computes_in_bf16(device, capability) else "fp32"


def precision_note(recipe: Recipe, device: torch.device, capability: tuple[int, int] | None = None) -> str:
    """A line where "auto" is not what people expect of a GPU; else nothing."""
    if recipe.inner.precision != "auto" or device.type != "cuda":
        return ""
    if pick_precision(recipe, device, capability) == "bf16":
        return ""
    return (
        "this GPU has no bf16 arithmetic of its own (it is older than Ampere), and torch's stand-in is slow: "
        'inner.precision = "auto" is fp32 here'
    )


def as_picked(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe with the precision that it has on this device, to count its memory."""
    return replace(recipe, inner=replace(recipe.inner, precision=pick_precision(recipe, device)))


def pick_threads(asked: int = 0) -> int:
    """CPU threads of this process, which takes them: those that were asked for, by an option or by
    OMP_NUM_THREADS; else one for each core that it may use.

    How busy the cores are has no say: a sum's last bits may depend on the number of threads.
    """
    threads = asked or torch.get_num_threads()
    if not asked and not os.environ.get("OMP_NUM_THREADS"):
        threads = min(threads, usable_cores())  # torch knows nothing of a container's quota
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    return threads


def checked_corpus(recipe: Recipe, elsewhere: str = "") -> Corpus:
    """The corpus, its vocabulary and length checked against the model and the batch. `elsewhere`: where it
    is on this machine, if not where the recipe says."""
    corpus = open_corpus(elsewhere or recipe.data.corpus)
    if corpus.vocab_size > recipe.model.vocab:
        raise ConfigError(
            f"the tokenizer of {recipe.data.corpus} has {corpus.vocab_size} tokens, the model "
            f"{recipe.model.vocab}; set model.vocab={corpus.vocab_size}, or "
            f"prepare the corpus with --vocab {recipe.model.vocab}"
        )
    # Too little text is an error here, before a run directory exists.
    Batches.of(recipe, corpus.train)
    validation_batches(corpus, recipe.inner.batch, recipe.model.context, 1)
    return corpus


def with_pin(recipe: Recipe, corpus: Corpus) -> Recipe:
    """The recipe of a run that begins: a corpus at a URL is this one from here on."""
    return replace(recipe, data=replace(recipe.data, corpus=pinned(recipe.data.corpus, corpus)))


def held_out_note(recipe: Recipe, corpus: Corpus) -> str | None:
    """One line where the corpus holds out less than the recipe scores."""
    return few_held_out(corpus, recipe.inner.batch, recipe.model.context, recipe.data.eval_batches)
