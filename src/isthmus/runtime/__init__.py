"""The real fleet: a supervisor, its workers, the trainer in each, the recorder of rounds.

May import config, layout, planner, runlog, data, model, subspace, sparse, outer, replica, store, protocol,
page and simulator.
"""
