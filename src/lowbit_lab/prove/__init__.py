"""Bounds of kernels, proved for all programs at once by Z3."""
