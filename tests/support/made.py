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
SECRET = "the-secret-outside"


def small(*overrides: str) -> Recipe:
    return parse_recipe(RECIPE, overrides)


def simulated(path: Path, *overrides: str) -> RunDir:
    simulate(small(*overrides), path, quiet=True)
    return RunDir.open(path)


def hostile(path: Path) -> Path:
    """A run directory by somebody who means harm: markup, endless numbers, torn lines, ways out."""
    outside = path.parent / "outside"
    outside.mkdir(parents=True)
    (outside / "secret.txt").write_text(SECRET)
    path.mkdir()
    (path / "recipe.toml").write_text(dump_recipe(small()))
    about = {
        "status": MARKUP,
        "device": MARKUP,
        "mode": "<script>alert(2)</script>",
        "started": ["\u202e", {"deep": MARKUP}],
        "parameters": 10**400,
        "error": "\x00\x1b[31m" + MARKUP * 1000,
        MARKUP: MARKUP,
    }
    (path / "about.json").write_text(json.dumps(about))
    row = {
        "round": 1,
        "tokens": 1000,
        "inner_steps": 3,
        "loss_full": 1e308,
        "loss_mixed": float("nan"),
        "loss_pipelined": "5",
        "loss_train": -1e308,
        "train_by_kind": {MARKUP: 1.0, "rack": 2.0, "edge": [1]},
        "loss_by_kind": "no",
        "bytes": {"activations": 10**300, "payload_up": -5, MARKUP: 1},
        "measured": {"edge": {"replicas": 0, "forth_bytes": [1e308, "x"], "bytes": [1], "seconds": 1e-300}},
        "bias": {"edge": {"outside": [5e9, "a", None], "drift": -1}},
        "seconds": 1e308,
        "contributors": [MARKUP, "rack-0", 5, None],
        "refused": {"edge": f"{MARKUP} \x00 bad", "</script>": MARKUP},
    }
    lines = [
        json.dumps(row),
        '{"round": 2, "tokens": 2000, "loss_full": 4.5, "loss_mixed": 4.6, "contributors": []}',
        "not json",
        '{"round": "3"}',
        "[" * 100_000,
        '{"round": 3, "loss_full": ' + "9" * 5000 + "}",
        json.dumps({"round": 10**30}),
        json.dumps([1, 2]),
        '{"round": 4, "pad": "' + "x" * (2 << 20) + '"}',
        '{"round": 5, "tokens": 3000, "loss_full": 4.25, "loss_mixed": 4.3}',
        '{"round": 6, "tok',
    ]
    (path / "metrics.jsonl").write_text("\n".join(lines))
    work = path / "work" / "rack-0"
    work.mkdir(parents=True)
    (work / "alive-0").symlink_to(outside / "secret.txt")
    (path / "bucket").symlink_to(outside)
    (outside / "run.json").write_text(json.dumps({"format": 1, "recipe": SECRET}))
    return path
