"""`evalfleet watch`: a directory that any trainer fills, each checkpoint in it a point of the curve.

Invariants: no checkpoint is written to or deleted; each is taken once it is complete, and never twice with the same
content, whatever is restarted.
"""
