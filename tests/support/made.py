"""Runs for the page: a real one, simulated in seconds, and folders that nobody should trust."""

import json
from pathlib import Path

from small_recipes import pipelined, recipe_text, replicas

from isthmus import simulate
from isthmus.config import Recipe, dump_recipe, parse_recipe
from isthmus.runlog import RunDir

EDGE = pipelined("edge", stages=2, compression="1/4", link={"mbps": 20, "latency_ms": 20})
RECIPE = recipe_text(
    replicas("rack", count=2) + EDGE,
    model={"layers": 2},
    inner={"batch": 2},
    outer={"inner_steps": 3, "rounds": 4, "keep": 8, "values": "2bit"},
    bucket={"heartbeat_seconds": 1, "deadline_seconds": 3},
)
MARKUP = "<img src=x onerror=alert(1)>"


def small(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides)


def simulated(path: Path, *overrides: str) -> RunDir:
    simulate(small(*overrides), path, quiet=True)
    return RunDir.open(path)


def hostile(path: Path) -> Path:
    """A run directory whose texts are markup, with lines that are no rows."""
    path.mkdir()
    (path / "recipe.toml").write_text(dump_recipe(small()))
    about = {
        "status": MARKUP,
        "device": MARKUP,
        "mode": "<script>alert(2)</script>",
        "started": "\u202e",
        "parameters": 10**12,
        "error": "\x00\x1b[31m" + MARKUP * 1000,
        MARKUP: MARKUP,
    }
    (path / "about.json").write_text(json.dumps(about))
    row = {
        "round": 1,
        "tokens": 1000,
        "inner_steps": 3,
        "loss_mixed": float("nan"),
        "train_by_kind": {MARKUP: 1.0, "rack": 2.0},
        "bytes": {"payload_up": 5, MARKUP: 1},
        "contributors": [MARKUP, "rack-0"],
        "refused": {"edge": f"{MARKUP} \x00 bad", "</script>": MARKUP},
    }
    lines = [
        json.dumps(row),
        '{"round": 2, "tokens": 2000, "loss_full": 4.5, "loss_mixed": 4.6, "contributors": []}',
        "not json",
        '{"round": "three"}',
        json.dumps([1, 2]),
        '{"round": 5, "tokens": 3000, "loss_full": 4.25, "loss_mixed": 4.3}',
        '{"round": 6, "tok',
    ]
    (path / "metrics.jsonl").write_text("\n".join(lines))
    return path
