"""Decoding: searching for output sequences, and scoring given ones."""
