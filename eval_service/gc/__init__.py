"""Deleting snapshots that nobody needs: `plan` says which (pure), `collect` does it (careful)."""
