"""From text to batches: `prepare` writes token shards, `open_corpus` maps them, `Batches` deals them out.

May import config, layout, runlog and store.
"""
