"""Kinds of kernels, a file each."""
