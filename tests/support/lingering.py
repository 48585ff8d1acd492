"""A process apart that says nothing, and does nothing that it is asked for: it ends with its parent alone."""

from __future__ import annotations

import sys
import time

from eval_service.apart.child import Parent

if __name__ == "__main__":
    parent = Parent(int(sys.argv[1]))
    time.sleep(600)
