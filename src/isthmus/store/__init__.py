"""The object store: whole objects under keys, in a folder or a bucket; promises, retries, URLs.

May import nothing else.
"""

from typing import TYPE_CHECKING, Any

from isthmus.store.retry import StoreError, StoreRefused, Unreadable
from isthmus.store.url import parse_url

if TYPE_CHECKING:
    from isthmus.store.objects import Info, Store, open_store

__all__ = ["Info", "Store", "StoreError", "StoreRefused", "Unreadable", "open_store", "parse_url"]


def __getattr__(name: str) -> Any:
    # obstore loads only when a store is opened: a machine without it simulates and draws reports.
    if name in ("Info", "Store", "open_store"):
        from isthmus.store import objects

        return getattr(objects, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
