"""The controller: scheduler, lanes, admission, results and clean-up; exactly one acts, the holder of the lock."""
