"""The object store: whole objects under keys, in a folder or a bucket; promises, retries, URLs.

May import nothing else.
"""

from isthmus.store.objects import Info, Store, open_store
from isthmus.store.retry import StoreError, StoreRefused
from isthmus.store.url import parse_url

__all__ = ["Info", "Store", "StoreError", "StoreRefused", "open_store", "parse_url"]
