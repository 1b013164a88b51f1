"""Held-out losses of a trained model: as a plain LLaMA, and as the run trained it."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isthmus.export.source import Trained
from isthmus.model.llama import forward, token_losses
from isthmus.replica.evaluate import Scorer

WORSE = 0.02  # a plain model may be this share worse than what the run trained


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
        """By which share the plain model is worse than the one that the run trained."""
        return self.plain / self.mixed - 1


def scorer(trained: Trained, num_batches: int | None = None) -> Scorer:
    """Scores as the run's own rows do. `num_batches` instead of the recipe's; 0: all of the held-out part."""
    recipe = trained.recipe
    if num_batches is not None:
        count = num_batches or len(trained.corpus.validation)  # validation_batches takes what there is
        recipe = replace(recipe, data=replace(recipe.data, eval_batches=count))
    return Scorer(recipe, trained.corpus, trained.bases, trained.bases.device, trained.bases.dtype)


def rounded(params: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """The weights as a folder of this dtype holds them, in the type they had."""
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    return {name: t.to(stored).to(t.dtype) for name, t in params.items()}


def measure(trained: Trained, dtype: str = "fp32", num_batches: int | None = None) -> Losses:
    score = scorer(trained, num_batches)
    as_trained = score.score(trained.params, trained.table)
    plain = as_trained["loss_full"]
    if dtype != "fp32":
        plain = _plain(score, rounded(trained.params, dtype))
    return Losses(
        plain=plain,
        full=as_trained["loss_full"],
        pipelined=as_trained["loss_pipelined"],
        mixed=as_trained["loss_mixed"],
        num_tokens=num_tokens(score),
    )


def num_tokens(score: Scorer) -> int:
    return sum(batch[:, 1:].numel() for batch in score.held_out)


@torch.no_grad()
def _plain(score: Scorer, params: dict[str, Tensor]) -> float:
    total, rows = 0.0, 0
    for batch in score.held_out:
        logits = forward(params, batch[:, :-1], score.recipe.model, score.rope)
        total += token_losses(logits, batch[:, 1:]).item() * len(batch)
        rows += len(batch)
    return total / rows


def perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    return loss / math.log(2) / bytes_per_token
