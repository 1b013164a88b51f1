"""The run directory: its rows, its files, and the words that tell them.

May import config and layout; standard library only, so that looking at a run loads no torch.
"""

from isthmus.runlog.run_dir import (
    REPLICA_PURPOSES,
    STAGE_PURPOSES,
    TIMING_FIELDS,
    Row,
    RunDir,
    finite,
    next_run_dir,
    summary,
    totals,
)

__all__ = [
    "REPLICA_PURPOSES",
    "STAGE_PURPOSES",
    "TIMING_FIELDS",
    "Row",
    "RunDir",
    "finite",
    "next_run_dir",
    "summary",
    "totals",
]
