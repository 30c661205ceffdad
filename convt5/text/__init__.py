"""Text and ids: sentinels, vocabularies beside a model, and how a task writes an input."""
