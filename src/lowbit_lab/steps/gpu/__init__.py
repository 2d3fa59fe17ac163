"""Products of float32 matrices on a GPU, from a thread for each output to tensor cores."""

from __future__ import annotations

from lowbit.spec.operations.products import product_of_floats
from lowbit_lab.steps.registry import Layout

PLAIN = Layout("row by row", product_of_floats, lambda a, b: (a, b))
"""How the steps take their operands: float32 a [M, K] and b [K, N] on the GPU, row by row."""
