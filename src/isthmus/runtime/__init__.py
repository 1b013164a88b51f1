"""The real fleet: launchers and workers, the trainer in each, their supervisor, the recorder of rounds.

May import config, layout, planner, runlog, data, model, subspace, sparse, outer, replica, store, protocol,
page and simulator.
"""
