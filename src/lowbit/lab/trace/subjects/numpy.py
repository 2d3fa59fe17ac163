"""NumPy's functions, of arrays of given shapes."""

from __future__ import annotations

import numpy as np

from lowbit.lab.trace.subject import Asked, Opened, engines, matrix_product


@engines.register("numpy")
def numpy_function(asked: Asked) -> Opened:
    """`matmul MxK:KxN` or any other function of `numpy`; `dtype=`."""
    found = getattr(np, asked.name, None)
    if not callable(found):
        raise ValueError(f"numpy has no function {asked.name!r}")
    if not asked.shapes:
        raise ValueError(f"numpy:{asked.name} needs the shapes of its arrays: 64x64, or 2x3:3x4")
    try:
        dtype = np.dtype(asked.take("dtype", "float32"))
    except TypeError as error:
        raise ValueError(f"dtype=: {error}; write float32, int8, ...") from None
    random = np.random.default_rng(0)
    arrays = [random.uniform(-100, 100, shape).astype(dtype) for shape in asked.shapes]
    options = asked.options

    def run() -> object:
        return found(*arrays, **options)

    shapes = ":".join("x".join(map(str, shape)) for shape in asked.shapes)
    products = matrix_product(asked.shapes) if asked.name in ("matmul", "dot") else None
    return Opened(run, f"numpy {asked.name} {shapes} {dtype}", dtype.name, products)
