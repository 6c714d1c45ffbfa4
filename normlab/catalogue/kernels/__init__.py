"""Kernels of GPUs, in Triton. Each file is imported by the file that has the same operation for other devices."""
