"""The object store: whole objects under keys, in a folder or a bucket; promises, retries, addresses.

May import nothing else.
"""
