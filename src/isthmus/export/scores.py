"""`isthmus eval`: loss, perplexity and bits per byte of each forward, and the harness's scores."""

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.config import ModelConfig
from isthmus.data.corpus import open_corpus
from isthmus.data.tokens import validation_batches
from isthmus.errors import ConfigError
from isthmus.export.card import model_card
from isthmus.export.exported import ExportedFolder
from isthmus.export.harness import require_harness, run_harness
from isthmus.export.hf import write_folder
from isthmus.export.measure import WORSE, bits_per_byte, measure, perplexity
from isthmus.export.source import is_run_or_bucket, open_trained, pipelined_member
from isthmus.export.text_generator import folder_boundaries
from isthmus.layout.stages import EMBEDDING
from isthmus.model.hf import CONFIG, read_params
from isthmus.model.llama import BoundaryFunctions, forward, rope_table, token_losses
from isthmus.replica.picks import pick_device


def evaluate(
    spec: str,
    *,
    corpus: str | None = None,
    num_batches: int | None = None,
    device: str = "auto",
    tasks: list[str] | None = None,
    include: str | None = None,
) -> dict[str, Any]:
    """Score a run, a bucket or an exported folder; a forward that the run lacks is None."""
    if tasks:
        require_harness()
    where = pick_device(device)
    if not is_run_or_bucket(spec) and (Path(spec) / CONFIG).is_file():
        return _of_folder(Path(spec), corpus, num_batches, where, tasks, include)
    trained = open_trained(spec, corpus).on(where)
    losses = measure(trained, num_batches=num_batches)
    bytes_per_token = trained.corpus.bytes_per_token
    by_forward = {"full": losses.full, "pipelined": losses.pipelined, "mixed": losses.mixed}
    facts: dict[str, Any] = {
        "source": spec,
        "round": trained.round,
        "tokens": trained.tokens,
        "held_out_tokens": losses.num_tokens,
        "bytes_per_token": bytes_per_token,
        "forwards": _scores(by_forward, bytes_per_token),
    }
    if tasks:
        member = None if losses.worse <= WORSE else pipelined_member(trained.recipe)
        card = model_card(trained, losses, "model", "fp32", member)
        with tempfile.TemporaryDirectory(prefix="isthmus-eval-") as temporary:
            folder = Path(temporary) / "model"
            write_folder(trained, folder, card, "fp32", member)
            facts["harness_on"] = "pipelined" if member else "plain"
            facts["harness"] = run_harness(folder, tasks, include, str(where))
    return facts


def _scores(losses: Mapping[str, float | None], bytes_per_token: float) -> dict[str, dict[str, float] | None]:
    return {
        name: None
        if loss is None
        else {
            "loss": loss,
            "perplexity": perplexity(loss) if math.isfinite(loss) else loss,
            "bits_per_byte": bits_per_byte(loss, bytes_per_token),
        }
        for name, loss in losses.items()
    }


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


def _of_folder(
    folder: Path,
    corpus: str | None,
    num_batches: int | None,
    device: torch.device,
    tasks: list[str] | None,
    include: str | None,
) -> dict[str, Any]:
    """Score an exported folder. It contains no held-out text: `corpus` names it, or only the harness runs."""
    if corpus is None and not tasks:
        raise ConfigError(f"{folder} is an exported folder without text; give --corpus, or --harness TASKS")
    facts: dict[str, Any] = {"source": str(folder)}
    if corpus is not None:
        found, text = ExportedFolder.open(folder), open_corpus(corpus)
        model = found.model
        if text.vocab_size > model.vocab:
            raise ConfigError(
                f"the tokenizer of {corpus} has {text.vocab_size} tokens, the model {model.vocab}; give the "
                "corpus that it was trained on"
            )
        params = {name: t.to(device) for name, t in read_params(folder, model).items()}
        batches = validation_batches(text, 8, model.context, num_batches or len(text.validation))
        batches = [batch.to(device).long() for batch in batches]
        losses = {"full": mean_loss(params, batches, model)}
        if found.pipelined:  # every batch has the same number of rows
            boundary_fns = folder_boundaries(found, params[EMBEDDING], len(batches[0]))
            losses["pipelined"] = mean_loss(params, batches, model, boundary_fns)
        num_tokens = sum(batch[:, 1:].numel() for batch in batches)
        facts |= {"held_out_tokens": num_tokens, "bytes_per_token": text.bytes_per_token}
        facts["forwards"] = _scores(losses, text.bytes_per_token)
    if tasks:
        facts["harness"] = run_harness(folder, tasks, include, str(device))
    return facts
