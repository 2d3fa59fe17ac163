"""Implementations of `lowbit bench` as peers of a file of variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lowbit.spec import Array


def byte_product(name: str, idea: str) -> Callable[[Array, Array], tuple[Any, Any]]:
    """An implementation of `lowbit bench matmul` as a peer: exact products of 8-bit a [M, K] and
    int8 b [K, N] on one thread. idea: a line about it.

    ValueError, with the names that there are, for an unknown one; the peer raises RuntimeError
    where it cannot run.
    """
    from lowbit_lab.bench.core.case import find
    from lowbit_lab.bench.suites.matmul.problem import MatmulProblem, product

    one = find("matmul", name)

    def prepare(a: Array, b: Array) -> tuple[Any, Any]:
        (m, k), n = a.shape, b.shape[1]
        case = product(f"{m}x{k}:{k}x{n}", f"{'u' if a.dtype.kind == 'u' else 's'}8:s8:s32")
        if reason := one.available(case):
            raise RuntimeError(reason)
        ready = one.prepare(MatmulProblem(case, {"a": a, "b": b}), 1)
        return ready.call, ready.read

    prepare.__name__, prepare.__doc__ = name, idea
    return prepare
