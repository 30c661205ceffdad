"""The process of a command: its hosts, memory, streams and imports."""
