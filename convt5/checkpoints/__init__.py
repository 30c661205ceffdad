"""Checkpoints on disk: their format, and reading them."""
