"""`evalfleet chaos`: the real application on fake engines, through a seeded list of faults, and what it then promises.

Nothing of the service imports this package: only the `chaos` command does, and lazily.
"""
