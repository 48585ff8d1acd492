"""A real model that learns from nothing on two cores, and the run that shows every checkpoint evaluated beside it.

Nothing of the service imports this package: only the `demo` command does, and lazily, since it needs transformers.
"""
