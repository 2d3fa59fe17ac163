"""Quantized matrices, how they are packed for kernels, and the files that hold them."""
