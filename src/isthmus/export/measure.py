"""Measure held-out losses of a trained model: as a plain model, and as the run trained it."""

import math
from dataclasses import dataclass, replace

import torch

from isthmus.export.source import Trained
from isthmus.layout.stages import EMBEDDING
from isthmus.replica.ahead import announce_scoring
from isthmus.replica.evaluate import Scorer

STORED = {"fp32": torch.float32, "bf16": torch.bfloat16}  # --dtype -> the type of the written weights
WORSE = 0.02  # a plain model may be worse than the trained one by this share


@dataclass(frozen=True, slots=True)
class Losses:
    """Nats per held-out token. `plain` is the model as written, `full` before its weights were rounded."""

    plain: float
    full: float
    pipelined: float | None
    mixed: float
    num_tokens: int

    @property
    def worse(self) -> float:
        """How much worse the plain model is than the trained one, as a share of its loss."""
        return self.plain / self.mixed - 1


def measure(trained: Trained, dtype: str = "fp32", num_batches: int | None = None) -> Losses:
    """Score like the run's own rows. `num_batches` overrides the recipe's; 0: the whole held-out part."""
    recipe = trained.recipe
    if num_batches is not None:
        count = num_batches or len(trained.corpus.validation)  # more than exist: use all
        recipe = replace(recipe, data=replace(recipe.data, eval_batches=count))
    scorer = Scorer(recipe, trained.corpus, trained.bases, trained.bases.device, trained.bases.dtype)
    num_tokens = sum(batch[:, 1:].numel() for batch in scorer.held_out)
    announce_scoring(recipe, num_tokens, trained.bases.device)
    scores = scorer.score(trained.params, trained.table)
    full, mixed = scores["loss_full"], scores["loss_mixed"]
    assert full is not None
    assert mixed is not None
    plain = full
    if dtype != "fp32":
        rounded = {name: t.to(STORED[dtype]).to(t.dtype) for name, t in trained.params.items()}
        plain = scorer.loss(rounded, rounded[EMBEDDING])
    return Losses(plain, full, scores["loss_pipelined"], mixed, num_tokens)


def perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    return loss / math.log(2) / bytes_per_token
