"""TOP-kappa of eq. 2 of arXiv 2601.02360: chunks, quantised values, and their bytes.

May import config and layout.

Names load on first use: reading a packed size pulls in no torch.

"""

from importlib import import_module

_HOME = {
    "SparseChunks": "sparse.topk",
    "TopK": "sparse.topk",
    "chunk_shape": "layout.chunks",
    "from_chunks": "sparse.topk",
    "kept": "layout.chunks",
    "pack": "sparse.wire",
    "pack_all": "sparse.wire",
    "pack_many": "sparse.wire",
    "packed_bytes": "layout.chunks",
    "packed_many_bytes": "layout.chunks",
    "to_chunks": "sparse.topk",
    "unpack": "sparse.wire",
    "unpack_all": "sparse.wire",
    "unpack_many": "sparse.wire",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"isthmus.{_HOME[name]}"), name)
