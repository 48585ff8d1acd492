"""One command for one node: GPUs are laid out, the service and the trainer started, and ended in order."""
