"""Where the windows of convolutions and pools lie, by what ONNX says of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from lowbit.graph.graph import Node
from lowbit.graph.operator import Array
from lowbit.product.geometry import OUTSIDE, Geometry

Sizes = tuple[int, ...]


def seen_through(where: Geometry | Parts, x: Array, fill: float) -> Array:
    """A view [N, C, *out, *kernel] of x [N, C, *image] with `fill` around it, of no `spread`."""
    if isinstance(where, Parts):
        return where.seen_through(x, fill)
    spans = tuple((k - 1) * d + 1 for k, d in zip(where.kernel, where.dilation, strict=True))
    reach = [
        (n - 1) * s + span for n, s, span in zip(where.output, where.stride, spans, strict=True)
    ]
    after = [max(0, r - n - b) for r, n, b in zip(reach, x.shape[2:], where.before, strict=True)]
    around = [(0, 0), (0, 0), *zip(where.before, after, strict=True)]
    padded = np.pad(x, around, constant_values=fill)[(..., *(slice(r) for r in reach))]
    view = sliding_window_view(padded, spans, tuple(range(2, x.ndim)))
    steps = (slice(None, None, step) for step in (*where.stride, *where.dilation))
    return view[(slice(None), slice(None), *steps)]


def divisors(node: Node, where: Geometry | Parts) -> Array:
    """int64 [*out], how many taps of each window of an average count, 1 at least: those on the
    image, with count_include_pad on its padding too, but not on what ceil_mode adds behind that."""
    if isinstance(where, Parts):
        return (where.places() != OUTSIDE).sum(1).reshape(where.output)
    rank, auto = len(where.size), node.get("auto_pad", "NOTSET")
    ends = where.after
    if not auto.startswith("SAME"):
        ends = (0,) * rank if auto == "VALID" else pads(node, rank)[1]
    made = np.ones((), np.int64)
    for axis, count in enumerate(where.output):
        steps, taps = np.arange(count) * where.stride[axis], np.arange(where.kernel[axis])
        at = steps[:, None] + taps * where.dilation[axis] - where.before[axis]
        counted = (at >= 0) & (at < where.size[axis])
        if node.get("count_include_pad", 0):
            counted = at < where.size[axis] + ends[axis]
        made = np.multiply.outer(made, counted.sum(1))
    return np.maximum(made, 1)


def taps_of(over: Geometry, steps: Sequence[int]) -> Iterator[tuple[Sizes, int]]:
    """The taps of a window, and how far each is from the first where pixels are `steps` apart."""
    for tap in product(*map(range, over.kernel)):
        yield tap, sum(t * d * s for t, d, s in zip(tap, over.dilation, steps, strict=True))


def put_back(over: Geometry, parts: Array) -> Array:
    """Images [N, C, *size] of what windows [N, C, *kernel, *count] hold, summed where they overlap:
    float64, or integers."""
    rank = len(over.size)
    sizes = zip(over.size, over.before, over.after, strict=True)
    dtype = parts.dtype if parts.dtype.kind in "iu" else np.dtype(np.float64)
    made = np.zeros((*parts.shape[:2], *(b + n + max(a, 0) for n, b, a in sizes)), dtype)
    for tap in product(*map(range, over.kernel)):
        places = (
            slice(t * d, t * d + (n - 1) * s + 1, s)
            for t, d, s, n in zip(
                tap, over.dilation, over.stride, parts.shape[2 + rank :], strict=True
            )
        )
        made[(..., *places)] += parts[(slice(None), slice(None), *tap)]
    inside = (slice(b, b + n) for b, n in zip(over.before, over.size, strict=True))
    return made[(..., *inside)]


class Parts(NamedTuple):
    """Windows that cut an image into parts as equal as can be, which overlap where sizes do not
    divide: of n pixels in m parts, part i has those from floor(i·n/m) to ceil((i + 1)·n/m).
    PyTorch's adaptive pools have them."""

    size: Sizes
    output: Sizes

    @property
    def pixels(self) -> int:
        return math.prod(self.output)

    def places(self) -> Array:
        """int64 [pixels, taps], as `Geometry.places` has them."""
        made = np.zeros((1, 1), np.int64)
        for n, m in zip(self.size, self.output, strict=True):
            part = np.arange(m)
            first, last = part * n // m, -(-(part + 1) * n // m)
            along = first[:, None] + np.arange(int((last - first).max(initial=0)))
            along = np.where(along < last[:, None], along, OUTSIDE)
            outside = (made == OUTSIDE)[:, None, :, None] | (along == OUTSIDE)[None, :, None, :]
            wide = np.where(outside, OUTSIDE, made[:, None, :, None] * n + along[:, None, :])
            made = wide.reshape(len(made) * m, -1)
        return made

    def seen_through(self, x: Array, fill: float) -> Array:
        """[N, C, *out, taps] of x [N, C, *image], `fill` where a window has fewer."""
        places = self.places()
        flat = x.reshape(*x.shape[:2], math.prod(self.size))
        seen = np.where(places == OUTSIDE, x.dtype.type(fill), flat[:, :, places])
        return seen.reshape(*x.shape[:2], *self.output, -1)


def pool_windows(node: Node, image: Sizes) -> Geometry | Parts:
    """The windows of a pool: of `kernel_shape`, or, with the attribute `output_size`, `Parts`.
    ValueError: there are none."""
    parts = node.get("output_size")
    if parts is None:
        return windows(node, image, tuple(node.get("kernel_shape")))
    if len(parts) != len(image) or min(parts) < 0 or not all(image):
        raise ValueError(f"output_size {tuple(parts)} does not fit an image of {image}")
    return Parts(image, tuple(parts))


def listed(node: Node, attribute: str, default: int, rank: int) -> Sizes:
    """An attribute of one number an axis. ValueError: there are not, or one is below 1."""
    given = tuple(node.get(attribute) or (default,) * rank)
    if len(given) != rank or min(given, default=1) < 1:
        raise ValueError(f"{attribute} should be {rank} positive numbers, got {given}")
    return given


def pads(node: Node, rank: int) -> tuple[Sizes, Sizes]:
    """The attribute `pads`, before and after. ValueError: it does not fit, or is negative."""
    given = tuple(node.get("pads") or (0,) * (2 * rank))
    if len(given) != 2 * rank or min(given, default=0) < 0:
        raise ValueError(f"pads should be {2 * rank} numbers, none negative, got {given}")
    return given[:rank], given[rank:]


def _halves(total: Sequence[int], auto: str) -> tuple[Sizes, Sizes]:
    """Padding before and after, of which with "SAME_UPPER" the latter may be more by one."""
    less, more = tuple(t // 2 for t in total), tuple(t - t // 2 for t in total)
    return (less, more) if auto == "SAME_UPPER" else (more, less)


def windows(node: Node, image: Sizes, kernel: Sizes) -> Geometry:
    """The windows of a convolution or pool over an image. ValueError: there are none."""
    rank, auto = len(image), node.get("auto_pad", "NOTSET")
    if len(kernel) != rank:
        raise ValueError(f"a window of {len(kernel)} sizes does not fit an image of {rank}")
    strides = listed(node, "strides", 1, rank)
    dilations = listed(node, "dilations", 1, rank)
    spans = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        out = tuple(-(-n // s) for n, s in zip(image, strides, strict=True))
        total = [
            max(0, (o - 1) * s + span - n)
            for o, s, span, n in zip(out, strides, spans, image, strict=True)
        ]
        return Geometry(image, kernel, strides, dilations, *_halves(total, auto))
    if auto not in ("NOTSET", "VALID"):
        raise ValueError(f"auto_pad {auto!r} is unknown")
    before, after = ((0,) * rank,) * 2 if auto == "VALID" else pads(node, rank)
    ends = []
    for n, b, a, span, s in zip(image, before, after, spans, strides, strict=True):
        room = n + b + a - span
        if room < 0:
            raise ValueError(f"windows of {spans} are larger than the padded image {image}")
        last = -(-room // s) * s
        # One more window that begins in the image or before it, not one behind it.
        more = node.get("ceil_mode", 0) and last < n + b
        ends.append(a + last - room if more else a)
    return Geometry(image, kernel, strides, dilations, before, tuple(ends))


def convolution_windows(node: Node, x: Sizes, weight: Sizes) -> tuple[Geometry, int]:
    """The windows of a Conv, and its groups. ValueError: the shapes do not fit."""
    groups = node.get("group", 1)
    if len(x) < 3 or len(weight) != len(x):
        raise ValueError(f"expected [N, C, *image] and [O, C/g, *kernel], got {x} and {weight}")
    if x[1] != weight[1] * groups or weight[0] % groups:
        raise ValueError(f"x {x} and weight {weight} in {groups} groups do not fit together")
    if tuple(node.get("kernel_shape") or weight[2:]) != tuple(weight[2:]):
        raise ValueError(f"kernel_shape {node.get('kernel_shape')} is not that of weight {weight}")
    return windows(node, x[2:], weight[2:]), groups


def transposed_windows(node: Node, x: Sizes, weight: Sizes) -> tuple[Geometry, int]:
    """The convolution that a ConvTranspose turns around, and groups: `size` is that of the output,
    `output` that of x. Padding is what is cut from the sum of all windows."""
    groups = node.get("group", 1)
    if len(x) < 3 or len(weight) != len(x):
        raise ValueError(f"expected [N, C, *image] and [C, O/g, *kernel], got {x} and {weight}")
    if x[1] != weight[0] or x[1] % groups:
        raise ValueError(f"x {x} and weight {weight} in {groups} groups do not fit together")
    kernel, image, rank = weight[2:], x[2:], len(x) - 2
    strides, dilations = listed(node, "strides", 1, rank), listed(node, "dilations", 1, rank)
    windows = tuple(
        (n - 1) * s + (k - 1) * d + 1
        for n, s, k, d in zip(image, strides, kernel, dilations, strict=True)
    )
    auto, out = node.get("auto_pad", "NOTSET"), node.get("output_shape")
    if auto in ("SAME_UPPER", "SAME_LOWER") and out is None:
        out = tuple(n * s for n, s in zip(image, strides, strict=True))
    more = tuple(node.get("output_padding") or (0,) * rank)
    if out is not None:  # which can be more than there is
        more = tuple(max(m, o - w) for m, w, o in zip(more, windows, out, strict=True))
    whole = tuple(w + m for w, m in zip(windows, more, strict=True))
    if out is None:
        before, after = ((0,) * rank,) * 2 if auto == "VALID" else pads(node, rank)
    else:
        total = [max(0, w - o) for w, o in zip(whole, out, strict=True)]
        before, after = _halves(total, auto)
    out = tuple(w - b - a for w, b, a in zip(whole, before, after, strict=True))
    if min(out) < 1:
        raise ValueError(f"the padding leaves nothing of {whole}")
    after = tuple(a - m for a, m in zip(after, more, strict=True))
    return Geometry(out, kernel, strides, dilations, before, after), groups
