"""Held-out losses of a trained model: as a plain LLaMA, and as the run trained it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isthmus.config import ModelConfig
from isthmus.export.source import Trained
from isthmus.model.llama import BoundaryFunctions, forward, rope_table, token_losses
from isthmus.replica.evaluate import Scorer

STORED = {"fp32": torch.float32, "bf16": torch.bfloat16}  # --dtype -> the type of the written weights
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


def measure(trained: Trained, dtype: str = "fp32", num_batches: int | None = None) -> Losses:
    """Score as the run's own rows do. `num_batches` replaces the recipe's; 0: the whole held-out part."""
    recipe = trained.recipe
    if num_batches is not None:
        count = num_batches or len(trained.corpus.validation)  # more than there are: all of them
        recipe = replace(recipe, data=replace(recipe.data, eval_batches=count))
    scorer = Scorer(recipe, trained.corpus, trained.bases, trained.bases.device, trained.bases.dtype)
    scores = scorer.score(trained.params, trained.table)
    full, mixed = scores["loss_full"], scores["loss_mixed"]
    assert full is not None
    assert mixed is not None
    plain = full
    if dtype != "fp32":
        rounded = {name: t.to(STORED[dtype]).to(t.dtype) for name, t in trained.params.items()}
        plain = mean_loss(rounded, scorer.held_out, recipe.model)
    num_tokens = sum(batch[:, 1:].numel() for batch in scorer.held_out)
    return Losses(plain, full, scores["loss_pipelined"], mixed, num_tokens)


@torch.no_grad()
def mean_loss(
    params: Mapping[str, Tensor],
    batches: Sequence[Tensor],  # (B, L + 1) each
    model: ModelConfig,
    boundary_fns: BoundaryFunctions | None = None,
) -> float:
    weight = params["tok_embeddings.weight"]
    rope = rope_table(model, model.context, weight.dtype, weight.device)
    total = 0.0
    for batch in batches:
        logits = forward(params, batch[:, :-1], model, rope, boundary_fns)
        total += token_losses(logits, batch[:, 1:]).item() * len(batch)
    return total / sum(map(len, batches))


def perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    return loss / math.log(2) / bytes_per_token
