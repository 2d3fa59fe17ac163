"""A right operand in panels: packed once, for every M and every instruction set."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.jit import threads as thread_runtime
from lowbit.jit.builtin import Table
from lowbit.jit.workspace import ALIGNMENT, aligned_empty
from lowbit.kernels.cpu.integer.micro_kernel import Shape as KernelShape
from lowbit.kernels.cpu.shared.layout import FLIP, LINE, NIBBLE_FLIP, PANEL, QUAD, blocks, padded_k
from lowbit.kernels.cpu.shared.pack import pack as pack_kernel
from lowbit.kernels.cpu.shared.panel_format import NIBBLES, STORED, UNPROVEN, PanelFormat
from lowbit.numerics import QTensor, int_format
from lowbit.numerics.affine import check_finite
from lowbit.numerics.float16 import as_float16, float16_offsets
from lowbit.numerics.float32 import moderate
from lowbit.numerics.formats import check_values
from lowbit.registry.locks import cached_property
from lowbit.weights.repacking import Split, columns, largest_pair_of, split

Array = npt.NDArray[Any]
Addresses = tuple[int, int, int, int]

_WORTH_THREADS = 1 << 20  # bytes
NIBBLE_MASK = 15
_GROUP_UNIT = 8  # k in a line of nibbles, which a group cannot divide; of bytes alike
_UINT8, _INT8, _INT32 = map(np.dtype, (np.uint8, np.int8, np.int32))
_FLOAT32, _FLOAT16 = map(np.dtype, (np.float32, np.float16))
_KINDS = {"int32": "s32", "int8": "s8", "float32": "f32", "float16": "f16"}


def group_refusal(group_size: int) -> str | None:
    """Why panels cannot have such groups; None if they can."""
    if group_size < 1 or group_size % _GROUP_UNIT:
        return f"group_size must be a positive multiple of {_GROUP_UNIT}, got {group_size}"
    return None


def one_group(k: int) -> int:
    """The group_size of panels in which all of K is one group."""
    return max(padded_k(k), _GROUP_UNIT)


class Numbers(NamedTuple):
    """How what belongs to columns or groups may be held: scales, and offsets in place of zero
    points, as float16, where that is the same; zero points although all are 0. lasting: arrays are
    kept for long."""

    short_scales: bool = True
    short_offsets: bool = True
    all_zeros: bool = False
    lasting: bool = True


_AS_THEY_COME = Numbers()


def padded(vector: Array) -> Array:
    """A copy of a vector over the columns, filled with zeros to whole panels."""
    result = np.zeros(blocks(len(vector), PANEL) * PANEL, vector.dtype)
    result[: len(vector)] = vector
    return result


def _aligned(array: Array, lasting: bool = True) -> Array:
    """A copy that is C-contiguous and begins at a multiple of 64 bytes."""
    result = aligned_empty(array.shape, array.dtype, lasting=lasting)
    result[...] = array
    return result


def _nibbles_to_bytes(panels: npt.NDArray[np.uint8], signed: bool) -> npt.NDArray[np.uint8]:
    """Panels of nibbles as panels of bytes."""
    panel_count, lines, _ = panels.shape
    pairs = np.empty((panel_count, lines, 2, LINE), np.uint8)
    pairs[:, :, 0], pairs[:, :, 1] = panels & np.uint8(NIBBLE_MASK), panels >> 4
    if signed:
        pairs -= np.uint8(NIBBLE_FLIP)
    return pairs.reshape(panel_count, 2 * lines, LINE)


def _flipped(panels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Signed bytes, made unsigned in place, or back."""
    panels ^= np.uint8(FLIP)
    return panels


def _stored_values(panels: npt.NDArray[np.uint8], k: int, n: int) -> npt.NDArray[np.int8]:
    """The stored values in panels of bytes, int8 [k, n], C-contiguous."""
    stored = panels.reshape(*panels.shape[:2], PANEL, QUAD).transpose(1, 3, 0, 2)
    rows = stored.reshape(padded_k(k), panels.shape[0] * PANEL)[:k, :n]
    return np.ascontiguousarray(rows).view(np.int8)


def _by_panels(each: Array, lasting: bool) -> Array:
    """Numbers [groups, N] as [panels, groups, 16], filled with zeros."""
    groups, columns = each.shape
    count = blocks(columns, PANEL)
    filled = np.zeros((max(groups, 1), count * PANEL), each.dtype)
    filled[:groups, :columns] = each
    return _aligned(filled.reshape(len(filled), count, PANEL).transpose(1, 0, 2), lasting)


def by_groups(each: Array, k: int, n: int, group_size: int) -> Array:
    """What `_by_panels` was given, in memory of its own."""
    rows = each.transpose(1, 0, 2).reshape(each.shape[1], -1)[: blocks(k, group_size), :n]
    return rows.astype(np.float32) if rows.dtype == _FLOAT16 else rows.copy()


@dataclass(frozen=True, eq=False, repr=False)
class PackedMatrix:
    """The matrix b[K, N] of 8-bit or 4-bit integers in panels (kernels/cpu/shared/layout.py).

    - panels: uint8 [ceil(N/16), K rounded up to 64 / 4, 64], C-contiguous; of 4-bit integers half
      as many lines. Copied where they do not begin at a multiple of 64 bytes.
    - column_sums: int32 [ceil(N/16)·16], Σ_k of the stored values less their zero point.
    - dtype: "int8", "uint8", "int4" or "uint4", what `unpack` gives back (4-bit integers one to
      an int8 or uint8).
    - scale: float32 [ceil(N/16)·16], one for each column, or None for plain integers.
    - zero_points: int32 [ceil(N/16)·16] of the stored values, or None if all are 0.
    - group_size: how many k share a scale, a multiple of 8; None: all. With groups, panels hold
      unsigned integers, of signed ones with 8 or 128 added; scale is float32 [ceil(N/16), groups,
      16], or float16 where that is the same; so are zero_points, int8 or float32, of unsigned
      integers less 8 or 128, or float16, −scale·zero point of unsigned integers; and column_sums
      are those of the real values, float32.

    Made by `lowbit.pack`, kept by `lowbit.save_packed` and `lowbit.load_packed`.
    """

    panels: npt.NDArray[np.uint8]
    column_sums: Array
    K: int
    N: int
    dtype: str
    scale: Array | None = None
    zero_points: Array | None = None
    group_size: int | None = None
    # Where panels, sums, zero points and scale begin (0: absent); asking NumPy takes microseconds.
    addresses: Addresses = field(init=False)
    _columns: dict[tuple[int, int], npt.NDArray[np.uint8]] = field(default_factory=dict, init=False)
    # By public functions, the known calls with this on the right (product/call_cache.py).
    _calls: dict[str, Table] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.dtype not in STORED:
            raise ValueError(f"dtype must be one of {', '.join(STORED)}, got {self.dtype!r}")
        for name, size in (("K", self.K), ("N", self.N)):
            if type(size) is not int or size < 0:
                raise ValueError(f"{name} must be an integer of at least 0, got {size!r}")
        for name, (kinds, shape) in self._expected().items():
            part = getattr(self, name)
            if part is None:
                continue
            if part.dtype not in kinds or part.shape != shape or not part.flags.c_contiguous:
                known = " or ".join(map(str, kinds))
                raise ValueError(
                    f"{name} of a packed {self.K}x{self.N} matrix must be {known} {shape}, "
                    f"C-contiguous, got {part.dtype} {part.shape}"
                )
            if name == "panels" and part.ctypes.data % ALIGNMENT:
                part = _aligned(part)
            # A view that cannot be written: what has been found out about it must stay true.
            view = part.view()
            view.flags.writeable = False
            object.__setattr__(self, name, view)
        parts = self.panels, self.column_sums, self.zero_points, self.scale
        addresses = tuple(0 if part is None else part.ctypes.data for part in parts)
        object.__setattr__(self, "addresses", addresses)

    def _expected(self) -> dict[str, tuple[tuple[np.dtype[Any], ...], tuple[int, ...]]]:
        """The types and the shape of each array."""
        count, size = blocks(self.N, PANEL), self.group_size
        lines = padded_k(self.K) // QUAD // (2 if self.weight in NIBBLES else 1)
        panels, columns = ((_UINT8,), (count, lines, LINE)), (count * PANEL,)
        if size is None:
            whole, scale = ((_INT32,), columns), ((_FLOAT32,), columns)
            return {"panels": panels, "column_sums": whole, "scale": scale, "zero_points": whole}
        if type(size) is not int or size > one_group(self.K) or self.scale is None:
            raise ValueError(f"K = {self.K} cannot be in groups of {size!r}, or without scales")
        if refusal := group_refusal(size):
            raise ValueError(refusal)
        each, floats = (count, max(1, blocks(self.K, size)), PANEL), (_FLOAT32, _FLOAT16)
        sums, zeros = ((_FLOAT32,), columns), ((_INT8, *floats), each)
        scale = floats, each
        return {"panels": panels, "column_sums": sums, "scale": scale, "zero_points": zeros}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are made anew, since addresses hold for one object only."""
        parts = (self.panels, self.column_sums, self.K, self.N, self.dtype)
        return PackedMatrix, (*parts, self.scale, self.zero_points, self.group_size)

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N)."""
        return self.K, self.N

    @property
    def weight(self) -> str:
        """What the panels hold: bytes, "s8", with groups "u8"; or nibbles, "u4" or "s4"."""
        kind = STORED[self.dtype]
        return "u8" if kind == "s8" and self.group_size is not None else kind

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        parts = (self.panels, self.column_sums, self.scale, self.zero_points)
        return sum(part.nbytes for part in parts if part is not None)

    @cached_property
    def format(self) -> PanelFormat:
        """What this is, but for its numbers, and what needs no look at all of them."""
        zeros = "" if self.zero_points is None else _KINDS[self.zero_points.dtype.name]
        halves = self.scale is not None and self.scale.dtype == _FLOAT16
        plain = self.scale is not None and self.group_size is None
        fair = plain and moderate(self.scale[: self.N])  # type: ignore[index]
        largest = 2 * NIBBLE_MASK if self.weight in NIBBLES else UNPROVEN
        return PanelFormat(self.K, self.N, self.dtype, self.scale is not None,
                           self.group_size is None and self.centred, zeros,
                           self.group_size or 0, largest, moderate=fair, halves=halves)  # fmt: skip

    @cached_property
    def proven_format(self) -> PanelFormat:
        """`format` with the largest pair, for which all values are looked at, once."""
        return self.format._replace(largest_pair=self.largest_pair)

    @cached_property
    def split(self) -> Split | None:
        """The panels split for sums of four products, where that can be; of nibbles, None."""
        return split(self.panels) if self.weight == "s8" else None

    @cached_property
    def split_format(self) -> PanelFormat:
        """`proven_format` with what is known of the split panels, which are made for that."""
        known = self.proven_format
        return known if self.split is None else known._replace(split=self.split.format)

    def addresses_for(self, shape: KernelShape | None) -> Addresses:
        """`addresses`, or, in place of the panels, those of what such a kernel reads."""
        memory = None if shape is None else self.right_for(shape)
        if memory is None or memory is self.panels:
            return self.addresses
        return memory.ctypes.data, *self.addresses[1:]

    def right_for(self, shape: KernelShape) -> npt.NDArray[np.uint8]:
        """What a kernel of this shape reads: panels, split panels with lists, or long columns."""
        if shape.summed:
            assert self.split is not None
            return self.split.memory
        if shape.piece <= QUAD:
            return self.panels
        key = shape.held, shape.piece
        if key not in self._columns:
            made = columns(_stored_values(self.panels, self.K, self.N), *key)
            return self._columns.setdefault(key, made)  # addresses of the first are in use
        return self._columns[key]

    @cached_property
    def grouped(self) -> PackedMatrix:
        """The same integers with groups: itself, or one group for all of K. Of bytes, a copy."""
        if self.group_size is not None or self.scale is None:
            return self
        panels, zeros = self.panels, np.zeros(len(self.scale), np.int32)
        if self.zero_points is not None:
            zeros += self.zero_points
        if self.weight == "u4":
            zeros -= NIBBLE_FLIP
        elif self.weight == "s8":
            panels = _flipped(_aligned(panels))
        each = (len(self.panels), 1, PANEL)
        return PackedMatrix(
            panels=panels,
            column_sums=(self.scale * self.column_sums).astype(np.float32),
            K=self.K,
            N=self.N,
            dtype=self.dtype,
            scale=self.scale.reshape(each),
            zero_points=zeros.astype(np.int8).reshape(each) if zeros.any() else None,
            group_size=one_group(self.K),
        )

    @cached_property
    def centred(self) -> bool:
        """Whether values have zero points of their own, not only those that make them signed."""
        signed = -FLIP if self.dtype == "uint8" else 0
        if self.zero_points is None:
            return signed != 0
        return bool((self.zero_points[: self.N] != signed).any())

    @cached_property
    def largest_pair(self) -> int:
        """What decides whether sums of two products fit 16 bits: over all pairs k = 2i, 2i + 1 of
        stored values in a column, the largest sum of their positive parts, or of their negative
        parts' magnitudes. Computed when first asked for; of others, the most it can be."""
        return largest_pair_of(self.panels) if self.weight == "s8" else self.format.largest_pair

    def unpack(self) -> Array:
        """The integers that were packed: int8 or uint8 [K, N]."""
        panels = self.panels
        if self.weight in NIBBLES:
            panels = _nibbles_to_bytes(panels, self.weight == "s4")
        elif self.weight == "u8":
            panels = _flipped(panels.copy())
        stored = _stored_values(panels, self.K, self.N)
        if self.dtype == "uint4":
            return stored.view(np.uint8)
        return stored.view(np.uint8) ^ np.uint8(FLIP) if self.dtype == "uint8" else stored

    def dequantize(self) -> npt.NDArray[np.float32]:
        """What the integers stand for, float32 [K, N]: scale · (integer − zero point)."""
        k, n, size = self.K, self.N, self.group_size
        values = self.unpack().astype(np.float32)
        if self.scale is None:
            return values
        middle = int_format(self.dtype).midpoint if size or self.weight == "s8" else 0
        zeros = np.float32(0) if self.zero_points is None else self.zero_points.astype(np.float32)
        zeros = np.broadcast_to(zeros, self.scale.shape)
        if size is None:
            return (values - (zeros[:n] + middle)) * self.scale[:n]
        scale, zeros = (by_groups(each, k, n, size) for each in (self.scale, zeros))
        groups = np.arange(k) // size
        return (values - (zeros[groups] + middle)) * scale[groups]

    def quantized(self) -> QTensor:
        """The QTensor [K, N] that was packed, with a scale for each column, or of each group.

        ValueError if it was none, or has real zero points.
        """
        fmt, k, n, size = int_format(self.dtype), self.K, self.N, self.group_size
        if self.scale is None:
            raise ValueError("only integers were packed, without a scale")
        zeros = np.zeros(self.scale.shape, np.int32)
        if self.zero_points is not None:
            if self.zero_points.dtype.kind == "f":
                raise ValueError("real zero points were packed, which a QTensor cannot have")
            zeros += self.zero_points
        if size is not None or self.weight == "s8":
            zeros += fmt.midpoint  # which had been taken from the integers
        if size is None:
            return QTensor(self.unpack(), self.scale[:n].copy(), zeros[:n], fmt, axis=1)
        scale, zeros = by_groups(self.scale, k, n, size), by_groups(zeros, k, n, size)
        return QTensor(self.unpack(), scale, zeros, fmt, 1, min(size, max(k, 1)), 0)

    def __repr__(self) -> str:
        extra = "" if self.scale is None else ", scaled per column"
        if self.group_size is not None:
            extra += f" and {self.group_size} k"
        return f"PackedMatrix({self.dtype} [{self.K}, {self.N}]{extra}, {self.nbytes:,} bytes)"


def pack(
    b: QTensor | Array, *, dtype: str | None = None, zero_point: Any = None,
    isa: str | None = None, numbers: Numbers = _AS_THEY_COME,
) -> PackedMatrix:  # fmt: skip
    """`lowbit.pack` of a QTensor, or of an int8 or uint8 array [K, N]. `numbers`: how what belongs
    to columns or groups may be held."""
    if isinstance(b, QTensor) and dtype not in (None, b.format.name):
        raise ValueError(f"b is quantized to {b.format.name}, and dtype is {dtype!r}")
    if isinstance(b, QTensor) and b.group_size is not None:
        return _pack_groups(b, zero_point, isa, numbers)
    if zero_point is not None:
        raise ValueError("zero_point belongs to a QTensor with groups; others hold their own")
    scale = None
    if isinstance(b, QTensor):
        if b.values.ndim != 2 or b.axis not in (None, 1):
            raise ValueError(
                f"b has scales along axis={b.axis}; a packed matrix [K, N] takes one scale, or "
                "one for each column: lowbit.quantize(b, axis=1)"
            )
        values, dtype = b.values, b.format.name
        depth, columns = values.shape
        scale = padded(np.broadcast_to(b.scale, (columns,)))
        zero = np.broadcast_to(b.zero_point, (columns,))
    else:
        values, dtype = b, _checked_dtype(b, dtype)
        depth, columns = values.shape
        zero = np.zeros(columns, np.int32)
    stored_zero = padded(zero - np.int32(FLIP) if dtype == "uint8" else zero)
    panels, sums = packed_panels(values, dtype, isa, lasting=numbers.lasting)
    return PackedMatrix(
        panels=panels,
        column_sums=sums - np.int32(depth) * stored_zero,
        K=depth,
        N=columns,
        dtype=dtype,
        scale=scale,
        zero_points=stored_zero if numbers.all_zeros or stored_zero.any() else None,
    )


def _pack_groups(b: QTensor, zero_point: Any, isa: str | None, numbers: Numbers) -> PackedMatrix:
    """`pack` for integers [K, N] with a scale for each column of each group of k."""
    size = b.group_size
    if b.values.ndim != 2 or b.axis != 1 or b.group_axis != 0:
        raise ValueError(
            f"groups of a matrix [K, N] lie along K; got {b.format.name} {list(b.shape)} with "
            f"axis={b.axis}, group_axis={b.group_axis}: "
            "lowbit.quantize(b, 'int4', axis=1, group_size=..., group_axis=0)"
        )
    assert size is not None
    (depth, columns), middle = b.shape, b.format.midpoint
    size = one_group(depth) if size >= depth else size
    if refusal := group_refusal(size):
        raise ValueError(refusal)
    zero = b.zero_point - np.int32(middle)
    real_zero = zero.astype(np.float64)
    if zero_point is not None:
        real_zero = _real_zeros(zero_point, b.scale.shape) - middle
    counts = np.minimum(depth - np.arange(0, depth, size), size)[:, None]
    lasting = numbers.lasting
    panels, sums = packed_panels(b.values, b.format.name, isa, group=size, lasting=lasting)
    real = by_groups(sums, depth, columns, size) - counts * real_zero
    real_sums = (b.scale.astype(np.float64) * real).sum(axis=0)
    zeros = real_zero.astype(np.float32) if zero_point is not None else zero.astype(np.int8)
    kept = numbers.all_zeros or zeros.any()
    if numbers.short_offsets and zero_point is not None and kept:
        zeros = float16_offsets(b.scale, real_zero + (1 << b.format.bits - 1), zeros)
    return PackedMatrix(
        panels=panels,
        column_sums=padded(real_sums.astype(np.float32)),
        K=depth,
        N=columns,
        dtype=b.format.name,
        scale=_by_panels(as_float16(b.scale) if numbers.short_scales else b.scale, lasting),
        zero_points=_by_panels(zeros, lasting) if kept else None,
        group_size=size,
    )


def _real_zeros(given: Any, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
    zeros = np.asarray(given, np.float64)
    if zeros.shape != shape:
        raise ValueError(f"zero_point must have shape of the scales, {shape}, got {zeros.shape}")
    with np.errstate(over="ignore"):  # float32 is what is kept
        check_finite(zeros.astype(np.float32))
    return zeros


def _checked_dtype(values: Array, dtype: str | None) -> str:
    """What to pack `values` as."""
    if dtype is None or dtype == values.dtype.name:
        return values.dtype.name
    if dtype not in ("int4", "uint4"):
        raise ValueError(f"dtype must be one of {', '.join(STORED)}, got {dtype!r}")
    fmt = int_format(dtype)
    if np.dtype(fmt.storage) != values.dtype:
        raise TypeError(f"{dtype} values are given as {fmt.storage}, got {values.dtype}")
    check_values(values, fmt, "b")
    return dtype


def packed_panels(
    values: Array, dtype: str, isa: str | None = None, *, group: int | None = None,
    lasting: bool = True,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:  # fmt: skip
    """The panels of integers [K, N] of a format, and the sums of each column, int32 [N rounded up
    to 16]; of unsigned bytes, of what is stored.

    With groups of so many k, the panels that these have, and the sums of each group, [panels,
    groups, 16], of the integers less the middle of their format."""
    (depth, columns), fmt, nibbles = values.shape, int_format(dtype), STORED[dtype] in NIBBLES
    count = blocks(columns, PANEL)
    each = max(1, blocks(depth, group)) if group else 1
    shape = count, padded_k(depth) // QUAD // (2 if nibbles else 1), LINE
    panels = aligned_empty(shape, np.uint8, lasting=lasting)
    sums = np.zeros((count, each, PANEL) if group else count * PANEL, np.int32)
    if values.size:
        k_stride, n_stride = _strides(values)
        # Nibbles and bytes in groups are stored unsigned, others signed.
        changed = fmt.signed == bool(nibbles or group)
        program = pack_kernel.program(
            instruction_sets.active(isa),
            along="n" if n_stride == 1 else "k" if k_stride == 1 else "",
            flip=(NIBBLE_FLIP if nibbles else FLIP) if changed else 0,
            zero=fmt.midpoint if group or not nibbles else 0,
            nibbles=nibbles,
        )
        threads = thread_runtime.max_threads() if values.size >= _WORTH_THREADS else 1
        strides, size = (k_stride, n_stride), group or padded_k(depth)
        program(threads, values, *strides, panels, sums, depth, columns, size)
    return panels, sums


def _strides(given: Array) -> tuple[int, ...]:
    """Strides of bytes, where an axis of one element counts as contiguous."""
    return tuple(s if n > 1 else 1 for s, n in zip(given.strides, given.shape, strict=True))
