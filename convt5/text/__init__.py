"""Text and token ids: sentinels, saved vocabularies, and input formats of tasks."""
