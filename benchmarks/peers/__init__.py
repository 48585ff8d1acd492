"""What a user would pick instead of a part of ours, started beside it."""
