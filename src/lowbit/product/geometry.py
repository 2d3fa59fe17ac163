"""Where the windows of a convolution lie, in any number of dimensions: tables for the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.convolution.depthwise import Header as Line
from lowbit.kernels.cpu.convolution.depthwise import Window
from lowbit.kernels.cpu.rows.shifted import ShiftedImage
from lowbit.kernels.cpu.rows.windows import Header, LoweredImage
from lowbit.kernels.cpu.shared.layout import LINE

MODES = ("constant", "reflect", "edge", "wrap")
"""What lies outside of an image: the zero point, or its own pixels as `numpy.pad` repeats them."""

OUTSIDE = -1
_SHARED = 3  # windows that a line of a pixel should be part of, to be kept for them
_MOST = 1 << 31  # bytes of an image, whose places are int32
_TABLES = 512  # that are kept
_Places = npt.NDArray[np.int64]


class Geometry(NamedTuple):
    """A convolution but for its channels: one entry for each spatial dimension.

    - size: of the image. kernel, stride, dilation: as in ONNX.
    - before, after: pixels added at both ends; negative ones are taken away.
    - mode: of `MODES`, what is added.
    - spread: pixels of the image are first brought so far apart, with zeros between.
    """

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    mode: str = "constant"
    spread: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, size: tuple[int, ...], kernel: tuple[int, ...], stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, mode: str = "constant",
    ) -> Geometry:  # fmt: skip
        """From the arguments of `lowbit.convolution`; raises what it documents."""
        count = len(kernel)
        stride, dilation = each(stride, count, "stride", 1), each(dilation, count, "dilation", 1)
        before, after = sides(padding, count)
        if mode not in MODES:
            raise ValueError(f"padding_mode must be one of {', '.join(MODES)}, got {mode!r}")
        most = {"reflect": 1, "wrap": 0}
        for axis, most_added in enumerate(s - most.get(mode, 0) for s in size):
            if mode in most and max(before[axis], after[axis]) > most_added:
                raise ValueError(
                    f"padding_mode {mode!r} of {size[axis]} pixels adds {most_added} at most, "
                    f"got {before[axis]} and {after[axis]}"
                )
        return cls(size, kernel, stride, dilation, before, after, mode)

    @classmethod
    def transposed(
        cls, size: tuple[int, ...], kernel: tuple[int, ...], stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, output_padding: Any = 0,
    ) -> Geometry:  # fmt: skip
        """Of a transposed convolution, as one with stride 1 whose kernel is turned around."""
        count = len(kernel)
        stride, dilation = each(stride, count, "stride", 1), each(dilation, count, "dilation", 1)
        before, after = sides(padding, count)
        more = each(output_padding, count, "output_padding", 0)
        end = tuple(a - m for a, m in zip(after, more, strict=True))
        image = tuple(
            (n - 1) * s + d * (k - 1) + 1 - b - e
            for n, s, d, k, b, e in zip(size, stride, dilation, kernel, before, end, strict=True)
        )
        return cls(image, kernel, stride, dilation, before, end).turned(size)

    def turned(self, size: tuple[int, ...]) -> Geometry:
        """The transpose of this convolution, whose input is of this `size` and whose output is of
        `self.size`, as a convolution."""
        reach = [d * (k - 1) for k, d in zip(self.kernel, self.dilation, strict=True)]
        before = tuple(r - b for r, b in zip(reach, self.before, strict=True))
        after = tuple(
            m + b - (n - 1) * s - 1
            for m, b, n, s in zip(self.size, self.before, size, self.stride, strict=True)
        )
        ones = (1,) * len(size)
        return Geometry(size, self.kernel, ones, self.dilation, before, after, spread=self.stride)

    @property
    def output(self) -> tuple[int, ...]:
        """The size of the output; 0 where the kernel does not fit."""
        made = []
        for axis, size in enumerate(self.size):
            spread = self.spread[axis] if self.spread else 1
            whole = (size - 1) * spread + 1 if size else 0
            added = self.before[axis] + self.after[axis]
            if size or self.mode == "constant":
                whole += added
            room = whole - self.dilation[axis] * (self.kernel[axis] - 1)
            made.append(len(range(0, max(room, 0), self.stride[axis])))
        return tuple(made)

    @property
    def pixels(self) -> int:
        """Of an image of the output."""
        return math.prod(self.output)

    def check_pixels(self) -> None:
        """ValueError: an image of the output is too large for tables of int32."""
        if self.pixels >= _MOST:
            raise ValueError(f"images of {self.output} are too large: 2³¹ pixels are the limit")

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def plain(self) -> bool:
        """Whether each window is the pixel at its place."""
        return self.taps == 1 and self.output == self.size and self.mode == "constant" and not any(
            (*self.before, *self.after)
        ) and set(self.stride) <= {1} and set(self.spread) <= {1}  # fmt: skip

    def strips(self, channels: int, pixel: int) -> LoweredImage | ShiftedImage | None:
        """Images of so many channels, in pixels of so many bytes, as kernels make strips of them;
        None: they do not, since windows have not enough in common, or lie not alike."""
        plane = len(self.size) == 2 and self.mode == "constant" and not set(self.spread) - {1}
        large = math.prod(self.size) * pixel >= _MOST
        if not plane or large or min(*self.before, *self.after) < 0:
            return None
        (height, width), (skip, step) = self.size, self.stride
        (above, left), (reach, taps) = self.before, self.kernel
        lines, length = self.output
        if channels % LINE == 0:
            if self.taps < _SHARED * skip * step:
                return None
            down, along = self.dilation
            parts, wide = channels // LINE, length + along * (taps - 1) // step
            return ShiftedImage(
                lines, length, height, width, pixel, above, left, skip, step,
                reach=down * (reach - 1) + 1,
                parts=parts,
                wide=wide,
                line_bytes=parts * step * wide * LINE,
                part_bytes=step * wide * LINE,
                pixels=lines * length,
                taps=tuple((down * y, along * x) for y, x in np.ndindex(reach, taps)),
            )  # fmt: skip
        if set(self.dilation) - {1} or reach == 1 or channels != pixel:
            return None
        if skip > reach or step > taps:  # what lies between windows would be copied too
            return None
        return LoweredImage(lines, length, height, width * channels, above, left * channels, skip,
                            step * channels, reach, taps * channels)  # fmt: skip

    def _along(self, axis: int) -> _Places:
        """The pixel under each tap, or `OUTSIDE`, int64 [output, kernel] of one dimension."""
        size, kernel, dilation = self.size[axis], self.kernel[axis], self.dilation[axis]
        before, after = self.before[axis], self.after[axis]
        spread = self.spread[axis] if self.spread else 1
        whole = max(size - 1, 0) * spread + min(size, 1)
        pixels = np.full(whole, OUTSIDE, np.int64)
        pixels[::spread] = np.arange(size)
        added = max(before, 0), max(after, 0)
        if self.mode == "constant":
            pixels = np.pad(pixels, added, constant_values=OUTSIDE)
        elif size:
            pixels = np.pad(pixels, added, mode=self.mode)  # type: ignore[call-overload]
        pixels = pixels[max(-before, 0) : len(pixels) - max(-after, 0)]
        reach = dilation * (kernel - 1)
        first = np.arange(0, max(len(pixels) - reach, 0), self.stride[axis])
        return pixels[first[:, None] + dilation * np.arange(kernel)]

    @property
    def window(self) -> Window:
        """What keys the kernel of depthwise convolutions."""
        *rows, columns = self.kernel
        return Window(math.prod(rows), columns, self.stride[-1], self.dilation[-1])

    def steps(self) -> _Places:
        """How far each tap is from the first, in pixels of the image, where all are inside: [taps];
        of a spread image, as if it were not."""
        steps = np.zeros(1, np.int64)
        for size, kernel, dilation in zip(self.size, self.kernel, self.dilation, strict=True):
            steps = (steps[:, None] * size + dilation * np.arange(kernel)).ravel()
        return steps

    def places(self, axes: int | None = None) -> _Places:
        """The pixel of the image under each tap of each window, or `OUTSIDE`: [pixels, taps]; as if
        only the first axes were there."""
        places, outside = np.zeros((1, 1), np.int64), np.zeros((1, 1), bool)
        for axis, size in enumerate(self.size[:axes]):
            along = self._along(axis)
            shape = len(places) * len(along), places.shape[1] * along.shape[1]
            wide = places[:, None, :, None] * size + along[:, None, :]
            outside = (outside[:, None, :, None] | (along == OUTSIDE)[:, None, :]).reshape(shape)
            places = wide.reshape(shape)
        places[outside] = OUTSIDE
        return places


def each(given: Any, count: int, name: str, least: int) -> tuple[int, ...]:
    """One integer for each dimension, or one for all. TypeError, ValueError: it is neither."""
    values = tuple(given) if isinstance(given, Sequence) else (given,) * count
    if any(type(value) is not int for value in values):
        raise TypeError(f"{name} must be an integer or a sequence of them, got {given!r}")
    if len(values) != count or any(value < least for value in values):
        raise ValueError(
            f"{name} must be {count} integers of at least {least}, or one, got {given!r}"
        )
    return values


def sides(padding: Any, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What is added before and after: from one number, one for each dimension, or pairs."""
    if isinstance(padding, Sequence) and any(isinstance(one, Sequence) for one in padding):
        if not all(isinstance(one, Sequence) and len(one) == 2 for one in padding):
            raise ValueError(f"padding must be numbers, or pairs of them, got {padding!r}")
        before, after = zip(*padding, strict=True)
        return each(before, count, "padding", 0), each(after, count, "padding", 0)
    both = each(padding, count, "padding", 0)
    return both, both


@lru_cache(maxsize=_TABLES)
def window_table(geometry: Geometry, channels: int, pixel_bytes: int) -> npt.NDArray[np.int32]:
    """The table (kernels/cpu/rows/windows.py) of windows of `channels` bytes at each tap, in images
    whose pixels are `pixel_bytes` apart.

    ValueError: an image, or the table, is too large for int32.
    """
    places, shared = geometry.places(), geometry.steps()
    end = (math.prod(geometry.size) - 1) * pixel_bytes + channels
    whole = channels % LINE == 0  # then each line is a tap
    parts = np.arange(0, channels, LINE) if whole else np.zeros(1, np.int64)
    outside = np.repeat(places == OUTSIDE, len(parts), axis=1)
    places, shared = (
        (one[..., None] * pixel_bytes + parts).reshape(*one.shape[:-1], -1)
        for one in (places, shared)
    )
    places[outside] = OUTSIDE
    inside = np.asarray(~outside.any(axis=1))
    inside[inside] = (places[inside] - places[inside, :1] == shared).all(axis=1)
    channels = LINE if whole else channels
    offsets, positions = shared, np.zeros(0, np.int64)
    if not whole:
        offsets, positions = _pieces(shared, channels)
        inside &= places[:, 0] + offsets.max(initial=0) + LINE <= end
    entries, own = places[:, 0].copy(), places[~inside]
    taps = own.shape[1]
    first = len(Header._fields)
    at = np.cumsum([first, len(offsets), len(positions), len(places)])
    if max(end, at[-1] + own.size) >= _MOST:
        raise _too_large(geometry, pixel_bytes)
    entries[~inside] = -(at[3] + np.arange(len(own)) * taps)
    header = Header(len(places), taps, channels, end, len(offsets), *at[:3])
    table = aligned_empty((int(at[-1]) + own.size,), np.int32)
    sections = header, offsets, positions, entries, own.ravel()
    np.concatenate([np.asarray(one, np.int64) for one in sections], out=table, casting="unsafe")
    table.flags.writeable = False
    return table


@lru_cache(maxsize=_TABLES)
def line_table(geometry: Geometry, pixel_bytes: int) -> npt.NDArray[np.int32]:
    """The table of kernels/cpu/convolution/depthwise.py.

    ValueError: an image, or the table, is too large for int32.
    """
    rows, under = geometry.places(len(geometry.size) - 1), geometry._along(-1)
    window = geometry.window
    length = len(under)
    columns = np.full(window.seen(length + LINE), OUTSIDE, np.int64)  # for a block beyond, too
    pixels, taps = np.indices(under.shape)
    columns[window.place(pixels, taps)] = under
    end = math.prod(geometry.size) * pixel_bytes
    first = len(Line._fields)
    if max(end, first + columns.size + rows.size) >= _MOST:
        raise _too_large(geometry, pixel_bytes)
    header = Line(len(rows), length, end, first, first + len(columns))
    parts = (
        np.where(part == OUTSIDE, OUTSIDE, part * scale).ravel()
        for part, scale in ((columns, pixel_bytes), (rows, geometry.size[-1] * pixel_bytes))
    )
    return np.concatenate([header, *parts]).astype(np.int32)


def _too_large(geometry: Geometry, pixel_bytes: int) -> ValueError:
    return ValueError(
        f"images of {geometry.size} with {pixel_bytes} bytes a pixel, or their windows, are too "
        "large: a convolution takes 2 GiB at most"
    )


def _pieces(offsets: _Places, channels: int) -> tuple[_Places, _Places]:
    """(offsets, positions) of loads of 64 bytes that gather taps of `channels` bytes: neighbours
    are read together."""
    found: list[tuple[int, int]] = []
    begin = 0
    for tap in range(len(offsets)):
        if tap + 1 < len(offsets) and offsets[tap + 1] == offsets[tap] + channels:
            continue
        length = (tap + 1 - begin) * channels
        found += [
            (int(offsets[begin]) + at, begin * channels + at) for at in range(0, length, LINE)
        ]
        begin = tap + 1
    pieces = np.array(found, np.int64).reshape(-1, 2)
    return pieces[:, 0], pieces[:, 1]
