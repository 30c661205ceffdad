"""Checkpoints on disk: what lies in their folders, and how they are read."""
