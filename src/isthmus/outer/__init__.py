"""The outer optimiser: error feedback, aggregation and the outer round (eq. 2 of arXiv 2601.02360).

May import config, layout, runlog and sparse.
"""

from isthmus.outer.aggregate import aggregate, aggregate_many
from isthmus.outer.codec import PlainCodec, codec_for
from isthmus.outer.feedback import feed_back
from isthmus.outer.methods import outer_method

__all__ = [
    "PlainCodec",
    "aggregate",
    "aggregate_many",
    "codec_for",
    "feed_back",
    "outer_method",
]
