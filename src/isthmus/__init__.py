"""Isthmus: pre-train one language model on machines that share no fast network."""

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.api.opened import Run, open_run
    from isthmus.api.runs import plan, resume, simulate, train
    from isthmus.config import Recipe, load_recipe
    from isthmus.errors import ConfigError, RunError
    from isthmus.loop.local import SparseLoCo
    from isthmus.loop.outer_sync import OuterSync
    from isthmus.runlog.results import Results
    from isthmus.runlog.row import Row

__version__ = "0.2.0"

__all__ = [
    "ConfigError",
    "OuterSync",
    "Recipe",
    "Results",
    "Row",
    "Run",
    "RunError",
    "SparseLoCo",
    "__version__",
    "load_recipe",
    "open_run",
    "plan",
    "resume",
    "simulate",
    "train",
]

# OpenMP reads these when torch is loaded: idle threads sleep (docs/operate.md, Threads). By default they spin
# for some milliseconds and take busy cores from the threads that they wait for.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# On a Mac, the CPU runs the operations that torch lacks on the GPU.
os.environ.setdefault("PYTORCH_ENABLE_MPS_FALLBACK", "1")


def __getattr__(name: str) -> Any:
    """Load these names on first use: `import isthmus` loads nothing else, torch only for your own loop."""
    match name:
        case "Run" | "open_run":
            from isthmus.api import opened as home
        case "plan" | "resume" | "simulate" | "train":
            from isthmus.api import runs as home
        case "Recipe" | "load_recipe":
            from isthmus import config as home
        case "ConfigError" | "RunError":
            from isthmus import errors as home
        case "OuterSync":
            from isthmus.loop import outer_sync as home
        case "SparseLoCo":
            from isthmus.loop import local as home
        case "Results":
            from isthmus.runlog import results as home
        case "Row":
            from isthmus.runlog import row as home
        case _:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(home, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
