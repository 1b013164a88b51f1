"""What a program calls: `isthmus.simulate`, `train`, `resume`, `plan`, `open_run` (docs/api.md).

May import config, data, planner, runlog, model, store, protocol, simulator, runtime and export.
"""
