"""TOP-kappa of eq. 2 of arXiv 2601.02360: chunks, quantised values, and their bytes.

Names load on first use: `isthmus.sparse.size` is arithmetic and must not pull in torch.
"""

from importlib import import_module

_HOME = {
    "SparseChunks": "topk",
    "TopK": "topk",
    "chunk_shape": "size",
    "from_chunks": "topk",
    "kept": "size",
    "pack": "wire",
    "pack_all": "wire",
    "pack_many": "wire",
    "packed_bytes": "size",
    "packed_many_bytes": "size",
    "to_chunks": "topk",
    "unpack": "wire",
    "unpack_all": "wire",
    "unpack_many": "wire",
}
__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
