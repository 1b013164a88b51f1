"""Run directories without training: rows that have the shape, and roughly the sizes, of real ones."""

import math
from pathlib import Path
from typing import Any

from isthmus.config import Recipe, parse_recipe
from isthmus.runlog import Row, RunDir

FULL = '[[replicas]]\nname = "rack"\nkind = "full"\ncount = 2\n'
PIPELINED = (
    '[[replicas]]\nname = "edge"\nkind = "pipelined"\ncount = 2\nstages = 2\ncompression = "1/8"\n'
    "link = { mbps = 100, latency_ms = 20 }\n"
)
BASE = """
name = "demo"
[model]
preset = "nano"
[inner]
batch = 8
micro_batches = 4
[outer]
inner_steps = 15
rounds = 20
"""


def recipe(fleet: str = FULL + PIPELINED, *overrides: str) -> Recipe:
    return parse_recipe(BASE + fleet, overrides)


def rows(recipe: Recipe, num_rounds: int, eval_every: int = 1, wobble: float = 0.02) -> list[Row]:
    pipelined = [replica for replica in recipe.replicas if replica.kind == "pipelined"]
    kinds = {replica.name: 0.02 if replica.kind == "full" else 0.12 for replica in recipe.replicas}
    parameter_bytes = 4 * recipe.model.num_parameters
    step_tokens = recipe.round_tokens // recipe.num_replicas
    peers = recipe.num_replicas - 1
    crossing = sum(r.count * (r.stages - 1) * r.subspace_dim(recipe.model.width) * 2 for r in pipelined)
    dense = sum(r.count * (r.stages - 1) * recipe.model.width * 2 for r in pipelined)
    share = {"sparseloco": 1 / 180, "diloco": 1, "adamw": recipe.outer.inner_steps}[recipe.outer.method]
    up = int(parameter_bytes * share * recipe.num_replicas) if peers else 0
    result = []
    for number in range(num_rounds + 1):
        loss = 4.2 + 2.75 * math.exp(-number / (0.3 * recipe.outer.rounds)) + wobble * math.sin(number * 2.1)
        trained, evaluated = number > 0, number % eval_every == 0
        by_kind = {name: loss + gap for name, gap in kinds.items()}
        traffic = {
            "activations": step_tokens * crossing,
            "gradients": step_tokens * crossing,
            "tokens": step_tokens * 2 * sum(r.count for r in pipelined),
            "payload_up": up,
            "payload_down": up * peers,
            "control": 900 * recipe.num_replicas if peers else 0,
        }
        result.append(
            Row(
                round=number,
                inner_steps=number * recipe.outer.inner_steps,
                tokens=number * recipe.round_tokens,
                lr=0.003,
                loss_train=loss + 0.1 if trained else None,
                train_by_kind={name: value + 0.1 for name, value in by_kind.items()} if trained else {},
                loss_full=loss if evaluated else None,
                loss_pipelined=loss + 0.12 if evaluated and pipelined else None,
                loss_mixed=loss + (0.06 if pipelined else 0) if evaluated else None,
                loss_by_kind=by_kind if evaluated else {},
                grad_norm=0.9 + 0.2 * math.cos(number * 1.7) if trained else None,
                seconds=2.9 + 0.4 * math.sin(number) if trained else 0.4,
                tokens_per_second=recipe.round_tokens / (2.9 + 0.4 * math.sin(number)) if trained else None,
                fleet_seconds=12.5 if trained else None,
                bytes={key: value if trained else 0 for key, value in traffic.items()},
                dense_bytes={
                    "stages": (2 * step_tokens * dense + traffic["tokens"]) if trained else 0,
                    "replicas": 2 * peers * parameter_bytes * recipe.outer.inner_steps if trained else 0,
                },
            )
        )
    return result


def make_run(path: Path, recipe: Recipe, num_rounds: int, *, eval_every: int = 1, **about: Any) -> RunDir:
    facts = {
        "isthmus": "0.1.0",
        "torch": "2.13.0",
        "device": "cpu",
        "mode": "stacked",
        "parameters": recipe.model.num_parameters,
        "corpus": "builtin:sample",
        "tokenizer_sha256": "5f" * 32,
        "started": "2026-01-15T10:20:30+00:00",
        "status": "finished",
        "predicted_memory_bytes": 412_000_000,
    }
    run = RunDir.create(path, recipe, facts | about)
    for row in rows(recipe, num_rounds, eval_every):
        run.append(row)
    return run
