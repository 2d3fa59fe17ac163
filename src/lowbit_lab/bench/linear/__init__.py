"""Quantized linear layers on a GPU: their data, and the tuner of their kernels."""
