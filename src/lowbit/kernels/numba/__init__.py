"""Kernels in Numba, for one core: steps to a fast exact product of 4-bit integers, each one idea
further than one below it. They are for reading; `lowbit.matmul` is for use."""
