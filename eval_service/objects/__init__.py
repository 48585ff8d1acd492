"""Snapshots in an object store, reached by fsspec: their names, a node's cache of them, upload and deletion."""
