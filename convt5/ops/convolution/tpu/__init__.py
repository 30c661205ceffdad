"""Convolutions as Pallas kernels for TPU."""
