"""What comes out of a run: folders that other programs load, text, and scores on held-out text.

May import config, layout, runlog, data, model, subspace, outer, replica, store and protocol.
"""
