"""Kernels over whole tensors: what networks need besides products and convolutions."""
