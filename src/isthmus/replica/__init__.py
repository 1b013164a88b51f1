"""One replica: full, pipelined or stacked; its stages, the links between them, its process groups.

May import config, layout, planner, runlog, data, model, subspace and outer.
"""
