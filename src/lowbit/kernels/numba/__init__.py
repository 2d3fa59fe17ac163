"""Kernels in Numba, for one core: the ladder of exact products of 4-bit integers. Each rung differs
from one below it by one idea. They are for reading; `lowbit.matmul` is for use."""
