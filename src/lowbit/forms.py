"""What the arguments of a product decide before any number is looked at, found once and kept.

Everything about a call but its numbers (shapes, strides, types, steps, threads) is a key. Behind it
stands a form: checked, planned, with its machine code. A packed matrix keeps the forms of the
products that it took part in, so a second call of the same kind costs a look-up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from ml_dtypes import bfloat16

from lowbit import dispatch
from lowbit import isa as instruction_sets
from lowbit.dispatch import Plan, Request
from lowbit.finish import Finish
from lowbit.isa import host
from lowbit.jit import threads as thread_runtime
from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.integer.micro_kernel import UNPROVEN
from lowbit.kernels.cpu.rows.activation import Source
from lowbit.kernels.cpu.shared.epilogue import Epilogue
from lowbit.kernels.cpu.shared.groups import Grouping
from lowbit.kernels.cpu.shared.layout import GROUP, LINE, NIBBLE_FLIP, PANEL, blocks, padded_k
from lowbit.numerics import longest_sum
from lowbit.weights.panels import PackedMatrix

Array = npt.NDArray[Any]

_KINDS = {
    np.dtype(np.int8): "s8",
    np.dtype(np.uint8): "u8",
    np.dtype(np.float32): "f32",
    np.dtype(bfloat16): "bf16",
}
_MOST_GROUP = longest_sum("int8", "uint4")  # k of a group whose sums int32 surely holds
_MOST_FORMS = 256  # of one packed matrix


class Form(NamedTuple):
    """How products of one kind run. `plan` is None where there is nothing to compute.

    `streaming` is the plan for outputs that lie on cache lines and are too large for the caches.
    `brings` makes of the left operand what the plan takes, where that is not the operand itself;
    `right` is the packed operand whose addresses the plan is given.
    """

    plan: Plan | None
    streaming: Plan | None
    finish: Finish
    shape: tuple[int, int]
    strides: tuple[int, int]
    right: PackedMatrix
    brings: Callable[[Array], Array] | None

    def run(
        self,
        left: Array,
        out: Array,
        scale: Array | None = None,
        zero: Array | None = None,
        bias: Array | None = None,
        residual: Array | None = None,
    ) -> None:
        """Compute into `out`, of the form's shape and type, with any strides."""
        if self.plan is None:
            return
        if self.brings is not None:
            left = self.brings(left)
        target, item = out, self.finish.storage.itemsize
        row, step = out.strides
        if row % item or (step != item and out.shape[1] > 1):  # the kernels take whole rows
            target = np.empty(out.shape, out.dtype)
            row = target.strides[0]
        plan = self.plan
        if self.streaming is not None and not (row % LINE or target.ctypes.data % LINE):
            plan = self.streaming
        plan.run(
            left,
            self.strides,
            self.right.addresses,
            target,
            row // item,
            scale=scale,
            zero=zero,
            bias=bias,
            residual=residual,
            parameters=self.finish.parameters,
        )
        if target is not out:
            out[...] = target


def threads_key(threads: int | None) -> int:
    """What a key says of the threads: the number asked for, or, negative, as many as there are now.

    ValueError for what is no number of threads: it could equal one that is (1.0, True).
    """
    if threads is None:
        return -thread_runtime.max_threads()
    return threads if type(threads) is int and threads > 0 else thread_runtime.checked(threads)


def keep(
    key: tuple[Any, ...],
    b: PackedMatrix,
    left: Array,
    finish: Finish,
    *,
    a_zero: bool,
    threads: int | None,
    isa: str | None,
    symmetric: bool = False,
    prove: bool = True,
    planes: int = 0,
) -> Form:
    """Make the form of products of `left`'s kind with b, and keep it in b under `key`.

    `a_zero`: the left operand has zero points. `prove`: whether it is worth looking at all of b for
    what makes a faster kernel possible. `planes`: the digits of 8 bits that floats are made into
    for a b with groups; 0 where it has none. Raises what the choice of a kernel may raise, and
    ValueError for a b with groups without `planes`.
    """
    if b.group_size is not None and not planes:
        raise ValueError(
            f"b has groups of {b.group_size} k, which only products of floats can take: "
            "lowbit.linear_dynamic or lowbit.linear_weight_only"
        )
    used = instruction_sets.active(isa).name
    count = dispatch.thread_count(left.shape[0], b.N, left.shape[1], threads)
    right, brings = b, None
    if not left.shape[1]:  # an empty sum: one column of zeros gives the same, through all steps
        right, brings = _empty_sum(b), _column_of_zeros
    elif left.dtype in (np.float32, bfloat16) and not rows_contiguous(left):
        brings = np.ascontiguousarray
    kind = left if brings is None else brings(left)
    (rows, depth), item = kind.shape, kind.itemsize
    # An axis of one element counts as contiguous.
    row_stride, stride = (
        s // item if n > 1 else 1 for s, n in zip(kind.strides, kind.shape, strict=True)
    )
    plan = streaming = None
    if rows and b.N:
        proven = right.largest_pair if prove and dispatch.wants_proof(used) else UNPROVEN
        source = Source(_KINDS[left.dtype], contiguous=stride == 1, symmetric=symmetric)
        epilogue = Epilogue(a_zero, right.zero_points is not None, finish.steps, finish.out)
        weight, grouping = right.weight, None
        if planes:
            weight, grouping = "u4", _grouping(right, planes)
            scales = "row" if planes == 1 else "none"
            epilogue = epilogue._replace(b_zero=False, scales=scales)
        request = Request(
            used, rows, b.N, depth, source, epilogue, count, proven, weight, grouping
        )  # fmt: skip
        plan = dispatch.plan(request)
        if rows * b.N * finish.storage.itemsize > host.caches()["L2"]:
            streaming = dispatch.plan(request._replace(epilogue=epilogue._replace(streams=True)))
    form = Form(plan, streaming, finish, (rows, b.N), (row_stride, stride), right, brings)
    if len(b.forms) >= _MOST_FORMS:
        b.forms.clear()
    b.forms[key] = form
    return form


def _grouping(b: PackedMatrix, planes: int) -> Grouping:
    """What is static about b's groups. ValueError if sums over one could leave int32."""
    assert b.group_size is not None
    size = min(b.group_size, padded_k(b.K))
    if size > _MOST_GROUP:
        raise ValueError(
            f"sums over groups of {size} k could overflow int32; at most {_MOST_GROUP} cannot: "
            "quantize b with a smaller group_size"
        )
    zeros = "" if b.zero_points is None else "s8" if b.zero_points.dtype == np.int8 else "f32"
    return Grouping(size, planes, zeros)


def rows_contiguous(given: Array) -> bool:
    """Whether rows are contiguous and whole elements apart, as the kernels need it."""
    apart = given.strides[0] % given.itemsize == 0
    return apart and (given.shape[1] <= 1 or given.strides[1] == given.itemsize)


def _column_of_zeros(left: Array) -> Array:
    return np.zeros((left.shape[0], 1), left.dtype)


def _empty_sum(b: PackedMatrix) -> PackedMatrix:
    """What b, which has no rows, may be replaced by: one row of zeros, in groups as b is."""
    panels = blocks(b.N, PANEL)
    columns = panels * PANEL
    zeros = aligned_empty((panels, LINE // GROUP // 2, LINE), np.uint8)
    zeros[...] = NIBBLE_FLIP << 4 | NIBBLE_FLIP
    row = PackedMatrix(
        panels=zeros,
        column_sums=np.zeros(columns, np.int32),
        K=1,
        N=b.N,
        dtype="int4",
        scale=None if b.scale is None else np.ones(columns, np.float32),
    )
    return row if b.group_size is None else row.grouped
