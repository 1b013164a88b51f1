"""Your own model and training loop: `isthmus.OuterSync`, and `isthmus.SparseLoCo` without a bucket.

May import config, runlog, store, model, outer, replica, protocol and runtime.
"""
