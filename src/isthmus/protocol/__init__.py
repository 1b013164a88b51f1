"""A run in a bucket: ledger, signatures, closing of rounds, exchange, replay.

May import config, layout, runlog, model, sparse, outer, replica and store.
"""
