"""Suites: what is asked of a snapshot, how an answer is scored, and what the scores amount to."""
