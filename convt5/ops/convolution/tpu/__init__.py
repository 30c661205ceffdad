"""The convolutions as Pallas kernels for TPUs."""
