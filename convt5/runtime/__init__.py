"""The process that a command runs in: its hosts, its memory, its imports."""
