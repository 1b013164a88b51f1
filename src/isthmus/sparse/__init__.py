"""TOP-kappa and Q of eq. 2 of arXiv 2601.02360: chunks, quantised values, and their bytes; kernels for a GPU.

May import layout.
"""

from isthmus.layout.chunks import chunk_shape, kept, packed_bytes, packed_many_bytes
from isthmus.sparse.bundle import Bundle, SparseChunks
from isthmus.sparse.topk import TopK, from_chunks, to_chunks
from isthmus.sparse.wire import pack, pack_all, pack_many, unpack, unpack_all, unpack_many

__all__ = [
    "Bundle",
    "SparseChunks",
    "TopK",
    "chunk_shape",
    "from_chunks",
    "kept",
    "pack",
    "pack_all",
    "pack_many",
    "packed_bytes",
    "packed_many_bytes",
    "to_chunks",
    "unpack",
    "unpack_all",
    "unpack_many",
]
