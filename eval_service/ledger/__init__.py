"""The durable record of runs, snapshots, points, attempts and drains.

Gateways insert intent and read; only the holder of the lock moves points, and each of its writes compares the epoch.
"""
