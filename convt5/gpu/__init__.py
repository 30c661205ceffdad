"""What the compiler of GPUs makes of programs, where no GPU is."""
