"""Makes docs/reference/ of what the code itself says; a unit test sees that the pages are current."""
