"""Output sequences: searching for them, and scoring them."""
