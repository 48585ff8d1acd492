"""Evals of others, in processes of their own: never the controller's, and ended with whatever they started."""
