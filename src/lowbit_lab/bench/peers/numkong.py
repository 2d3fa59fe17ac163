"""NumKong's packed product of signed bytes, from the package `numkong`."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import numpy as np

from lowbit_lab.bench.core.case import Ready, implementation
from lowbit_lab.bench.peers.torch_products import BYTES, SumsOnly
from lowbit_lab.bench.suites.matmul.problem import Array, MatmulCase, MatmulProblem

_FLIP = 128


@implementation("matmul")
class NumKong(SumsOnly):
    """`numkong.dots_packed`. It multiplies bytes of one sign, so a left operand of u8 is given to
    it with 128 taken away; what that adds to the sums is added when the result is read."""

    name = "NumKong i8"
    isolated = True
    pool = "OpenMP of numkong"
    needs = ("numkong",)
    takes = BYTES
    package = "NumKong", "numkong"

    def note(self, case: MatmulCase) -> str:
        shifted = "left bytes made signed beforehand" if case.dtypes.startswith("u8") else ""
        return "; ".join(filter(None, (super().note(case), shifted)))

    def prepare(self, problem: MatmulProblem, threads: int) -> Ready:
        numkong: Any = importlib.import_module("numkong")
        packed = numkong.dots_pack(np.ascontiguousarray(problem.b.T))
        unsigned = problem.a.dtype == np.uint8
        left = (problem.a ^ np.uint8(_FLIP)).view(np.int8) if unsigned else problem.a
        # Asked for one thread it would still enter a parallel region.
        options = {"threads": threads} if threads > 1 else {}

        def read(result: Any) -> Array:
            sums = np.asarray(result).astype(np.int64)
            if unsigned:
                sums += _FLIP * problem.b.sum(axis=0, dtype=np.int64)
            return problem.from_sums(sums)

        return Ready(partial(numkong.dots_packed, left, packed, **options), read)
