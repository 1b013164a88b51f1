"""What a machine can do before it joins: its devices, disk and clock, its bucket and its links.

May import everything below it that trains or stores: config, layout, planner, data, model, replica, store.
"""
