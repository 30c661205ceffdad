"""Turns gin files into settings: reads, resolves, checks and writes them; see `gin_config`."""
