"""How much text to hold out: as much as a recipe scores, or else a warning line."""

from isthmus.config.model import PRESETS
from isthmus.config.tree import DataConfig, InnerConfig
from isthmus.data.documents import START, DocumentOrder

SHARE = 0.01
# Tried in order if 1 % of the documents is too little to score; more would cost training too much.
SHARES = (SHARE, 0.02, 0.03, 0.05, 0.07, 0.1)
# Only if all of the above hold out nothing: a handful of documents.
LARGE_SHARES = (0.2, 0.3, 0.5)
BYTES_PER_TOKEN = 6  # common vocabularies have 3 to 5, so enough bytes mean enough tokens


def wanted_tokens(vocab: int) -> int:
    """Tokens that a default recipe scores, for the smallest model with such a vocabulary."""
    largest = max(model.vocab for model in PRESETS.values())
    context = next(model.context for model in PRESETS.values() if model.vocab >= min(vocab, largest))
    return DataConfig().eval_batches * InnerConfig().batch * context


def is_surely_enough(order: DocumentOrder, wanted: int) -> bool:
    """Decide by file sizes alone. Streams report no size, and are not read to find out."""
    total = sum(source.size for source in order.inputs)
    if order.limit_bytes is not None:
        total = min(total, order.limit_bytes)
    return not total or total * SHARE > 2 * wanted * BYTES_PER_TOKEN


def enough_share(order: DocumentOrder, wanted: int) -> float:
    """Return the smallest share whose documents hold `wanted` tokens, or else the largest sensible share.

    It reads every document, so it is for small inputs.
    """
    num_documents, held = 0, {share: [0, 0] for share in (*SHARES, *LARGE_SHARES)}
    for document in order.after(START):
        num_documents += 1
        drawn = order.draw(document.text.encode())
        for share, counts in held.items():
            if drawn < share * 2**64:
                counts[0] += 1
                counts[1] += document.size
    for share in SHARES:
        if held[share][1] >= wanted * BYTES_PER_TOKEN:
            return share
    possible = [share for share, (documents, _) in held.items() if 0 < documents < num_documents]
    sensible = [share for share in possible if share <= SHARES[-1]]
    return max(sensible, default=min(possible, default=SHARE))
