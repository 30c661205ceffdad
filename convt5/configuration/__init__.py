"""How gin files become settings: read, resolved, checked, written; see `gin_config`."""
