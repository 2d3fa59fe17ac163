"""Products in words, for the lines of jit.verbose: what is asked for, which kernel serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from lowbit import isa as instruction_sets
from lowbit.jit import verbose
from lowbit.kernels.cpu.rows.digits import Digits
from lowbit.kernels.cpu.rows.input_format import Bytes
from lowbit.kernels.cpu.rows.windows import Windows
from lowbit.kernels.cpu.shared.serving import Candidate
from lowbit.numerics import int_format
from lowbit.product.dispatch import Plan
from lowbit.product.product import Convolution, FloatProduct, Product


def operation(product: Product) -> str:
    """The public function that asks for such products, whoever does."""
    if product.output == "max8":
        return "search"
    if isinstance(product.a, Windows) or product.residual_stride:
        return "convolution"
    if isinstance(product.a, Bytes):
        return "matmul" if product.output == "s32" else "matmul_scaled"
    return "linear_weight_only" if isinstance(product.a, Digits) else "linear_dynamic"


def _short(dtype: str) -> str:
    form = int_format(dtype)
    return f"{'s' if form.signed else 'u'}{form.bits}"


def of_product(product: Product, plan: Plan) -> str:
    """An integer product; of weights with groups, the dtype says their size: s4g32."""
    a, b = product.a.element, product.b
    groups = f"g{b.group_size}" if b.group_size else ""
    out = "f32" if product.output == "max8" else product.output
    return verbose.line(
        operation(product), f"{a.kind}{a.bits}:{_short(b.dtype)}{groups}:{out}",
        _shape(product.m, product.k, product.n), plan.micro.name, plan.isa.name, plan.threads,
        "+".join(product.post_ops),
    )  # fmt: skip


def _shape(m: int, k: int, n: int) -> str:
    return f"{m}x{k}:{k}x{n}"


def of_convolution(c: Convolution, kernel: str, threads: int) -> str:
    """A convolution by a kernel of its own; the shape: of the images, and of the windows."""
    x = "x".join(map(str, (c.batch, *c.geometry.size, c.channels)))
    windows = "x".join(map(str, (*c.geometry.kernel, c.outputs)))
    return verbose.line(
        "convolution", f"{'s8' if c.signed else 'u8'}:{_short(c.b.dtype)}:{c.output}",
        f"{x}:{windows}", kernel, c.isa, threads, "+".join(c.post_ops),
    )  # fmt: skip


def of_floats(product: FloatProduct, kernel: str, isa: str) -> str:
    """A product of floats."""
    added = "" if product.c is None else "beta"
    kinds = f"{product.a.kind}:{product.b.kind}:{product.out.kind}"
    shape = _shape(product.m, product.k, product.n)
    return verbose.line("gemm", kinds, shape, kernel, isa, product.threads, added)


def tell_plan(told: str, looked_at: Callable[[], Iterable[Candidate[Any]]] = tuple) -> None:
    """Log which kernel serves, and of those that were looked at which do not, and why; the first
    time, what the machine has."""
    if verbose.logs():
        _tell_machine()
        verbose.info("plan,%s", told)
        for one in looked_at():
            if one.why and one.micro is not None:
                tell_miss(told, f"{one.micro.name} on {one.isa.name}", one.why)


@cache
def _tell_machine() -> None:
    found = instruction_sets.report()
    verbose.info("info,cpu,%s", found["model"])
    for one in found["instruction_sets"]:
        state = "used" if one["used"] else "available" if one["available"] else one["why"]
        verbose.info("info,%s,%s", one["name"], state)


def tell_miss(told: str, kernel: str, why: str) -> None:
    """Log why a kernel did not serve that comes before the one that does."""
    verbose.info("miss,%s,%s: %s", told, kernel, why)
