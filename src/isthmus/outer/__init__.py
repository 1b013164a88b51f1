"""The outer optimiser: error feedback, aggregation and the outer round (eq. 2 of arXiv 2601.02360).

May import config, layout and sparse.
"""

# Not lazy: a first import of the module of the same name would leave the module here instead of the function.
from isthmus.outer.aggregate import aggregate, aggregate_many
from isthmus.outer.feedback import feed_back, feed_back_many

__all__ = ["aggregate", "aggregate_many", "feed_back", "feed_back_many"]
