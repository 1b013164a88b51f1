"""The page of a run, live or as report.html, from the run directory or the bucket alone.

May import config, layout, planner, runlog, store and protocol.
"""
