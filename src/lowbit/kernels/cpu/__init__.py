"""Kernels for CPUs, over the code generator in lowbit.jit."""
