"""The run directory: its rows, its files, and the run in words.

May import config, layout and planner; looking at a run loads no torch.
"""

from isthmus.layout.traffic import REPLICA_PURPOSES, STAGE_PURPOSES
from isthmus.runlog.row import TIMING_FIELDS, Row
from isthmus.runlog.run_dir import REAL, About, RunDir, Totals, finite, next_run_dir, totals
from isthmus.runlog.words import summary

__all__ = [
    "REAL",
    "REPLICA_PURPOSES",
    "STAGE_PURPOSES",
    "TIMING_FIELDS",
    "About",
    "Row",
    "RunDir",
    "Totals",
    "finite",
    "next_run_dir",
    "summary",
    "totals",
]
