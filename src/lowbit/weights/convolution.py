"""The weight of a convolution, packed: one matrix [taps · channels, outputs] for each group."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowbit import isa as instruction_sets
from lowbit.jit.workspace import aligned_empty
from lowbit.kernels.cpu.convolution.depthwise import is_depthwise
from lowbit.kernels.cpu.convolution.winograd_tiles import KERNEL, MOST_SUM, POINTS, weight_words
from lowbit.kernels.cpu.integer.micro_kernel import Shape
from lowbit.kernels.cpu.shared.layout import LINE, PANEL, QUAD, blocks
from lowbit.kernels.cpu.shared.panel_format import PanelFormat
from lowbit.numerics import QTensor
from lowbit.numerics.float32 import moderate
from lowbit.registry.locks import cached_property
from lowbit.weights.panels import PackedMatrix
from lowbit.weights.panels import pack as pack_matrix

_EVEN_BYTES = np.uint32(0x00FF00FF)


class ConvolutionShape(NamedTuple):
    """What a packed weight is, but for its integers: see `PackedConvolution`."""

    channels: int
    outputs: int
    kernel: tuple[int, ...]
    groups: int
    transposed: bool


@dataclass(frozen=True, eq=False)
class PackedDepthwise:
    """A kernel for each output, in the order of kernels/cpu/convolution/depthwise.py.

    - panels: uint8 [blocks of 64 outputs, columns · rows / 4, 256], C-contiguous.
    - column_sums, scale: as those of a `PackedMatrix`, for whole blocks of outputs.
    - format: of the kernels of one channel, [taps, outputs of a channel].
    """

    panels: npt.NDArray[np.uint8]
    column_sums: npt.NDArray[np.int32]
    scale: npt.NDArray[np.float32] | None
    format: PanelFormat

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Where panels, sums, zero points (none) and scale begin."""
        scale = 0 if self.scale is None else self.scale.ctypes.data
        return self.panels.ctypes.data, self.column_sums.ctypes.data, 0, scale

    @property
    def proven_format(self) -> PanelFormat:
        """No kernel asks for a proof."""
        return self.format

    @property
    def split_format(self) -> PanelFormat:
        """They are not split."""
        return self.format

    def addresses_for(self, shape: Shape | None) -> tuple[int, int, int, int]:
        """`addresses`: no kernel reads anything else."""
        return self.addresses

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return (
            self.panels.nbytes
            + self.column_sums.nbytes
            + (0 if self.scale is None else self.scale.nbytes)
        )

    @classmethod
    def of(cls, kernels: npt.NDArray[np.int8], scale: Any, multiplier: int) -> PackedDepthwise:
        """Of kernels [outputs, *kernel] with a scale [outputs] or None."""
        outputs, columns = len(kernels), kernels.shape[-1]
        rows = kernels.reshape(outputs, -1, columns)
        fours = blocks(rows.shape[1], QUAD)
        filled = np.zeros((blocks(outputs, LINE) * LINE, fours * QUAD, columns), np.int8)
        filled[:outputs, : rows.shape[1]] = rows
        # [block, lane, q, output, four, row, column] becomes
        # [block, column, four, q, lane, output, row].
        parts = filled.reshape(-1, LINE // PANEL, PANEL // QUAD, QUAD, fours, QUAD, columns)
        panels = aligned_empty((len(parts), columns * fours, QUAD * LINE), np.uint8)
        ordered = parts.transpose(0, 6, 4, 2, 1, 3, 5)
        panels[...] = ordered.reshape(panels.shape).view(np.uint8)
        sums = filled.sum(axis=(1, 2), dtype=np.int32)
        taps = rows.shape[1] * columns
        fair = scale is not None and moderate(scale)
        form = PanelFormat(taps, multiplier, "int8", scaled=scale is not None, moderate=fair)
        if scale is not None:
            scale = np.pad(scale, (0, len(filled) - outputs))
        return cls(panels, sums, scale, form)


@dataclass(frozen=True, eq=False)
class PackedConvolution:
    """The weight of a convolution of `channels` to `outputs` channels, in equal groups.

    - kernel: the size in each spatial dimension.
    - matrices: of each group, int8 [taps · channels of the group, outputs of the group]; or one for
      all groups, where each channel is one.
    - transposed: of a transposed convolution, its kernel turned around.

    Made by `pack_convolution`.
    """

    channels: int
    outputs: int
    kernel: tuple[int, ...]
    groups: int
    matrices: tuple[PackedMatrix, ...] | tuple[PackedDepthwise]
    transposed: bool = False
    _words: dict[int, npt.NDArray[np.int16]] = field(default_factory=dict, init=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles make words anew, aligned, if they need them."""
        parts = (self.channels, self.outputs, self.kernel, self.groups, self.matrices)
        return PackedConvolution, (*parts, self.transposed)

    @property
    def shape(self) -> ConvolutionShape:
        return ConvolutionShape(
            self.channels, self.outputs, self.kernel, self.groups, self.transposed
        )

    def biased(self, bias: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """A bias [outputs] as the kernels read it: for each matrix as many as it has sums."""
        count, size = len(self.matrices), len(self.matrices[0].column_sums)
        result = np.zeros((count, size), np.float32)
        result[:, : self.outputs // count] = bias[: self.outputs].reshape(count, -1)
        return result

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included; without `words`, which are made if a kernel reads them."""
        return sum(matrix.nbytes for matrix in self.matrices)

    @cached_property
    def bounded(self) -> bool:
        """Whether the sums of windows are known to be so small that words give them exactly: no sum
        of stored values times numbers from 0 to 255 reaches MOST_SUM."""
        first, *others = self.matrices
        if others or self.kernel != (KERNEL, KERNEL) or isinstance(first, PackedDepthwise):
            return False
        if 128 * 255 * first.K < MOST_SUM:
            return True
        # Magnitudes of two bytes each, in two halves of a dword, over sixteen lines of a panel.
        dwords = np.abs(first.panels.view(np.int8)).view(np.uint32)
        halves = (dwords & _EVEN_BYTES) + (dwords >> 8 & _EVEN_BYTES)
        sums = halves.reshape(len(halves), -1, PANEL, PANEL).sum(axis=2, dtype=np.uint32)
        both = (sums & 0xFFFF).sum(axis=1) + (sums >> 16).sum(axis=1)
        # The sum of values is that of positive ones less the magnitudes of the others.
        most = int((both.ravel() + np.abs(first.column_sums)).max()) // 2
        return 255 * most < MOST_SUM

    def words(self, panels: int, threads: int = 1) -> npt.NDArray[np.int16]:
        """The weight as kernels/cpu/convolution/winograd.py reads it, in blocks of so many
        panels: eight times as many bytes."""
        if panels not in self._words:
            (matrix,) = self.matrices
            count, lines, _ = matrix.panels.shape
            size = (POINTS * count * self.channels * PANEL,)
            made = aligned_empty(size, np.int16, lasting=True)
            program = weight_words.program(instruction_sets.active())
            program(threads, matrix.panels, lines * LINE, count, self.channels, panels, made)
            return self._words.setdefault(panels, made)  # addresses of the first are in use
        return self._words[panels]


def refusal(weight: QTensor, *, groups: int = 1, transposed: bool = False) -> str:
    """Why `pack_convolution` does not take a weight's scales and zero points; "" if it does."""
    if weight.zero_point.any():
        return "the weight of a convolution must be symmetric, without zero points"
    along = 1 if transposed and groups == 1 else 0
    if weight.group_size is not None or weight.axis not in (None, along):
        return (
            f"a weight has one scale, or one for each output (axis={along}), "
            f"got axis={weight.axis!r}, group_size={weight.group_size!r}"
        )
    if transposed and groups > 1 and weight.axis is not None:
        return "a transposed weight with groups must have one scale for all"
    return ""


def pack_convolution(
    weight: QTensor | npt.NDArray[Any], *, groups: int = 1, transposed: bool = False
) -> PackedConvolution:
    """Pack the weight of a convolution for `lowbit.convolution`.

    weight: int8 [outputs, channels/groups, *kernel], as in ONNX and PyTorch; with `transposed`,
    which they call ConvTranspose, [channels, outputs/groups, *kernel]. A QTensor has one scale, or
    one for each output (axis=0; with `transposed` and one group axis=1), and no zero points.

    TypeError: not of int8. ValueError: another axis, zero points, or groups that do not divide it.
    """
    values = weight.values if isinstance(weight, QTensor) else np.asarray(weight)
    if values.dtype != np.int8 or (isinstance(weight, QTensor) and weight.format.bits != 8):
        kind = weight.format.name if isinstance(weight, QTensor) else values.dtype
        raise TypeError(f"the weight of a convolution must be int8, got {kind}")
    if values.ndim < 3 or 0 in values.shape:
        raise ValueError(
            f"a weight is [outputs, channels/groups, *kernel], none of them 0: got {values.shape}"
        )
    first, second, *kernel = values.shape
    groups = operator.index(groups)
    if groups < 1 or first % groups:
        raise ValueError(f"groups must divide the {first} of a weight {values.shape}, got {groups}")
    outputs, channels = (second * groups, first) if transposed else (first, second * groups)
    scale = None
    if isinstance(weight, QTensor):
        if reason := refusal(weight, groups=groups, transposed=transposed):
            raise ValueError(reason)
        scale = np.broadcast_to(weight.scale, (outputs,)).reshape(groups, -1)
    spatial = tuple(range(2, values.ndim))
    if transposed:  # [groups, outputs of one, channels of one, *kernel turned around]
        values = np.flip(values, spatial).reshape(groups, channels // groups, second, *kernel)
        values = values.swapaxes(1, 2)
    else:
        values = values.reshape(groups, outputs // groups, second, *kernel)
    if is_depthwise(channels, groups, tuple(kernel)):
        kernels = values.reshape(outputs, *kernel)
        each = None if scale is None else scale.reshape(outputs).astype(np.float32)
        depthwise = PackedDepthwise.of(kernels, each, outputs // groups)
        return PackedConvolution(channels, outputs, tuple(kernel), groups, (depthwise,), transposed)
    matrices: list[PackedMatrix] = []
    for group in range(groups):
        rows = np.moveaxis(values[group], 1, -1).reshape(outputs // groups, -1)
        if isinstance(weight, QTensor):
            assert scale is not None
            one = QTensor(rows, scale[group], np.zeros(len(rows), np.int32), weight.format, axis=0)
            matrices.append(pack_matrix(one.T))
        else:
            matrices.append(pack_matrix(rows.T))
    return PackedConvolution(channels, outputs, tuple(kernel), groups, tuple(matrices), transposed)
