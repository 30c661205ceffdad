"""Proofs that a model reads nothing that it must not, and that meshes change no update."""
