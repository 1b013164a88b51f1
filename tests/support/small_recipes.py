"""Recipes that train in seconds: a test states its fleet and what matters to it, the rest is small."""

from typing import Any

from isthmus.config.toml import toml_line

SMALL: dict[str, Any] = {
    "name": "small",
    "model": {"preset": "nano", "width": 32, "ffn": 64, "heads": 2, "context": 16},  # 4 layers
    "data": {"eval_batches": 1},
    "inner": {"batch": 4, "micro_batches": 2, "lr": 3e-3, "warmup_steps": 2},
    "outer": {"inner_steps": 2, "rounds": 2},
}


def replicas(name: str, **keys: Any) -> str:
    """One [[replicas]] table as TOML: `replicas("rack", count=2)`."""
    stated = {"name": name} | keys
    return "\n".join(["[[replicas]]", *(toml_line(key, value) for key, value in stated.items()), ""])


def pipelined(name: str, **keys: Any) -> str:
    return replicas(name, kind="pipelined", **keys)


RACK = replicas("rack")
EDGE = pipelined("edge", stages=2, compression="1/4")


def recipe_text(fleet: str = "", **settings: Any) -> str:
    """SMALL with `settings` on top, and then `fleet`, as TOML: `recipe_text(RACK, outer={"rounds": 12})`."""
    stated = dict(SMALL)
    for key, value in settings.items():
        stated[key] = stated.get(key, {}) | value if isinstance(value, dict) else value
    return "\n".join([*(toml_line(key, value) for key, value in stated.items()), fleet])
