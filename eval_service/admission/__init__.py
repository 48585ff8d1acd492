"""The checks that a snapshot passes before an engine is touched.

Invariants: nothing here imports a framework, unpickles anything, follows a link out of bounds, or holds more of a file
than one chunk; the bytes are read once, for hashes and finite values together.
"""
