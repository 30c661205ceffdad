"""Kernels written in Pallas: formulations that a compiler does not find by itself."""
