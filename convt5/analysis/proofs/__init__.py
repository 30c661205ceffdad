"""Proofs that a model reads only what it may, and that meshes do not change updates."""
