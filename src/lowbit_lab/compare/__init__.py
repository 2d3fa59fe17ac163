"""Comparing variants of one kernel: each checked, timed, explained, and set against its neighbour.

A file holds the variants; `lowbit compare FILE` and `compare` read it. See docs/compare.md.
"""

from lowbit_lab.compare.peers import byte_product
from lowbit_lab.compare.problem import CudaC, Variant, cuda_c, variant

__all__ = ["CudaC", "Variant", "byte_product", "cuda_c", "variant"]
