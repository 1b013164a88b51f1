"""What a machine can do before it joins: its devices, disk and clock, its bucket and its links.

May import config, layout, planner, runlog, data, replica, store, protocol and runtime.
"""
