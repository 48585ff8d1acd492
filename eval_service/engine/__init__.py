"""Engines: a replica's runner, the supervisor that owns the server's processes, and the grades of server."""
