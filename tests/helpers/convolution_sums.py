"""What convolutions of integers in any number of dimensions are held against."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def convolution_sums(
    x: Array, weight: Array, stride: tuple[int, ...], padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...], groups: int = 1, mode: str = "constant",
) -> Array:  # fmt: skip
    """What `lowbit.convolution` computes of integers x [B, *size, C], from which the zero point is
    taken already, and weight [O, C/groups, *kernel]: exact sums, int64 [B, *output, O].

    z[b, i, o] = Σ weight[o, c, t] · x[b, stride·i + dilation·t, C/groups·group of o + c], x padded
    as numpy.pad does in this mode.
    """
    outputs, channels, *kernel = weight.shape
    padded = np.pad(x.astype(np.int64), ((0, 0), *padding, (0, 0)), mode)  # type: ignore[call-overload]
    facts = zip(padded.shape[1:-1], kernel, stride, dilation, strict=True)
    size = [max(0, (n - d * (k - 1) + s - 1) // s) for n, k, s, d in facts]
    sums = np.zeros((len(x), *size, groups, outputs // groups), np.int64)
    for tap in product(*map(range, kernel)):
        first = [t * d for t, d in zip(tap, dilation, strict=True)]
        at = zip(first, size, stride, strict=True)
        seen = padded[:, *(slice(f, f + n * s, s) for f, n, s in at)]
        seen = seen[:, *(slice(n) for n in size)].reshape(*sums.shape[:-1], channels)
        by_group = weight[:, :, *tap].reshape(groups, outputs // groups, channels)
        sums += np.einsum("...gc,goc->...go", seen, by_group.astype(np.int64))
    return sums.reshape(*sums.shape[:-2], outputs)


def transposed_convolution_sums(
    x: Array, weight: Array, stride: tuple[int, ...], padding: tuple[tuple[int, int], ...],
    dilation: tuple[int, ...], groups: int = 1, output_padding: tuple[int, ...] = (),
) -> Array:  # fmt: skip
    """The same of weight [C, O/groups, *kernel] and the transposed convolution: each pixel adds the
    kernel, times its channels, to the output at stride times its place."""
    channels, outputs, *kernel = weight.shape
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    more = output_padding or (0,) * len(kernel)
    sizes = zip(x.shape[1:-1], stride, reach, more, strict=True)
    whole = [(n - 1) * s + r + m for n, s, r, m in sizes]
    sums = np.zeros((len(x), *whole, groups, outputs), np.int64)
    seen = x.reshape(*x.shape[:-1], groups, channels // groups).astype(np.int64)
    for tap in product(*map(range, kernel)):
        by_group = weight[:, :, *tap].reshape(groups, channels // groups, outputs)
        facts = zip(tap, dilation, x.shape[1:-1], stride, strict=True)
        at = tuple(slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in facts)
        sums[:, *at] += np.einsum("...gc,gco->...go", seen, by_group.astype(np.int64))
    sums = sums.reshape(*sums.shape[:-2], groups * outputs)
    return sums[:, *(slice(b, n - a) for n, (b, a) in zip(whole, padding, strict=True))]
