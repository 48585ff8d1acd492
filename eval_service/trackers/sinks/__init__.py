"""What a worker writes to: one module a library, which is imported there and nowhere else."""
