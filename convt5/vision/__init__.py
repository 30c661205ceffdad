"""Vision Transformers whose stem is a patchify layer or early convolutions (arXiv 2106.14881)."""
