"""What a trainer and the service agree on: wire types, the snapshot format, the client.

Invariant: this package imports pydantic, httpx, xxhash, safetensors and the standard library, nothing else.
"""
