"""What the project claims of its speed, measured: `python -m benchmarks.NAME [--quick] [--json]`."""
