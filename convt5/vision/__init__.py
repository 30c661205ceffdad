"""Vision Transformers with a patchify stem or an early-convolution stem (arXiv 2106.14881)."""
