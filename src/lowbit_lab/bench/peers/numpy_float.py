"""NumPy's float32 product: OpenBLAS, in the packages that NumPy's project builds."""

from __future__ import annotations

from functools import partial

import numpy as np

from lowbit_lab.bench.core.case import Implementation, Ready, implementation
from lowbit_lab.bench.suites.matmul.problem import MatmulCase, MatmulProblem


@implementation("matmul")
class NumpyFloat(Implementation):
    """The product of the float version of the data."""

    name = "numpy fp32"
    pool = "BLAS of numpy"
    remark = "float32 data and result"
    needs = ("threadpoolctl",)  # without it its threads cannot be set

    def library(self) -> tuple[str, str]:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return str(blas["name"]), f"{blas['version']} in numpy {np.__version__}"

    def runs_on(self, case: MatmulCase) -> str | None:
        from threadpoolctl import threadpool_info

        names = [pool.get("architecture") for pool in threadpool_info()]
        return next((name for name in names if name), None)

    def prepare(self, problem: MatmulProblem, threads: int) -> Ready:
        weight = problem.b_float.copy()
        return Ready(partial(np.matmul, problem.a_float, weight), problem.from_real)
