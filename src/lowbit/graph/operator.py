"""What the operators of a graph are: one record each, in operators/.

A record holds an operator's meaning, which is the definition that kernels are held against, and all
else that is known of it; passes and importers ask the record, and name no operator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from lowbit.graph.graph import Constant, Node, Tensor
from lowbit.registry import Registry

if TYPE_CHECKING:
    from lowbit.graph.lower import Lowering
    from lowbit.graph.parts import Parts

Array = npt.NDArray[Any]
Sizes = tuple[int, ...]


Known = Callable[[str], Array | None]
"""The numbers of a constant, by name."""


@dataclass(frozen=True)
class Weight:
    """What there is to know of a product with a weight, its second input.

    - outputs: the axis of the weight that is the output's channels. channels: the axis of x that is
      summed over.
    - choices: what can become of it, see `passes.quantize.Choice`.
    - rows: of a node, x and the weight's shape, the rows [..., K] that meet the weight as a matrix
      [N, K]; None where there is no one matrix.
    """

    outputs: int = 0
    channels: int = 1
    choices: tuple[str, ...] = ("int8",)
    rows: Callable[[Node, Array, Sizes], Array | None] = lambda node, x, weight: None


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator:
    """An operator of networks.

    What it means:

    - meaning: of a node and its inputs, the output or a tuple of them: real numbers (float32 where
      inputs are), integers or booleans. An input that is left out is None.
    - shape: of a node and its inputs' sizes, those of the only output. From the input
      `numbers_from` on it is given the numbers, which have to be known. Without, the meaning is run
      on zeros that take no room, which serves what makes no copies, or of few numbers.
    - dtype: of the output, where it is not that of the first input; also as a function of a node
      and its inputs. further: of these and the first output, those behind it.

    How it runs:

    - lowering: adds its steps. parts: puts other operators in its place, right before lowering;
      false: the node stays.

    How others know it:

    - onnx: whether it is ONNX's. outputs: how many of ONNX's outputs are known here, if not all.
      qlinear: whether ONNX Runtime's operator QLinear... of it is read.
    - aten: the operators of ATen that are this one, with the same tensors. arguments: by attribute,
      the argument of ATen's, or a number, if it is always that there.

    What passes ask:

    - data: how many of its inputs are what it computes with, not weights, shapes or limits; None:
      all of them.
    - eight_bits: "moved": the outputs are elements of the inputs, and keep their format; "format":
      they keep the format; "rescaled": each may have a format of its own. eight_bits_if: of which
      nodes that is true, by a function of constants.
    - weight: if it is a product with a weight; stays: why another product is never quantized.
    - multiply_adds: their number, of a node and the sizes of inputs and output.
    - samples: "alone": each sample is treated by itself; "broadcast": if other inputs broadcast.
    - positions: "kept": the first axes of data are those of outputs; "reshaped": also where ranks
      differ; "indices": those of the second input are. positions_if: of which nodes, by a function
      of the output's rank and of how many axes are asked about.
    - idle: whether a node does nothing; of whether its input and output are known to be of the same
      shape, and its input's dtype, functions both.
    - sizes_only: whether outputs follow from the sizes of inputs alone.
    - post_op: as what it may follow a product, by a function that gives the number of a constant;
      only functions of each element have it.
    - formulas: the attributes with which exporters write it in parts, as a function of one value.
    """

    meaning: Callable[..., Any]
    shape: Callable[..., Sequence[int]] | None = None
    numbers_from: int | None = None
    dtype: str | Callable[[Node, Sequence[Tensor | None]], str] | None = None
    further: Callable[[Node, Sequence[Tensor | None], Tensor], Sequence[Tensor]] | None = None
    lowering: Callable[[Lowering, Node], None] | None = None
    parts: Callable[[Parts, Node], bool] | None = None
    onnx: bool = True
    outputs: int | None = None
    qlinear: bool = False
    aten: tuple[str, ...] = ()
    arguments: Mapping[str, str | int] = field(default_factory=dict)
    data: int | None = 1
    eight_bits: Literal["", "moved", "format", "rescaled"] = ""
    eight_bits_if: Callable[[Known, Node], bool] | None = None
    weight: Weight | None = None
    stays: str = ""
    multiply_adds: Callable[..., int] | None = None
    samples: Literal["", "alone", "broadcast"] = ""
    positions: Literal["", "kept", "reshaped", "indices"] = ""
    positions_if: Callable[[Node, int, int], bool] | None = None
    idle: Callable[[Node, Callable[[], bool], Callable[[], str]], bool] | None = None
    sizes_only: bool = False
    post_op: Callable[[Node, Callable[[str], float | None]], tuple[Any, ...] | None] | None = None
    formulas: tuple[Mapping[str, Any], ...] = ()

    def compute(self, node: Node, *inputs: Array | None) -> tuple[Array, ...]:
        """The outputs. ValueError: the inputs do not fit."""
        self.check_given(inputs)
        made = self.meaning(node, *inputs)
        return made if isinstance(made, tuple) else (np.asarray(made),)

    def infer(
        self, node: Node, tensors: Sequence[Tensor | None], known: Sequence[Array | None]
    ) -> tuple[Tensor, ...]:
        """What the outputs are: from what the inputs are, and from those that are constants.

        ValueError: they do not fit, or the shape depends on numbers that are not known."""
        self.check_given(tensors)
        first = len(tensors) if self.numbers_from is None else self.numbers_from
        self._check_known(node, tensors, known, first)
        if self.shape is not None:
            sizes = [one and one.sizes for one in tensors[:first]]
            made = tuple(map(int, self.shape(node, *sizes, *known[first:])))
            if min(made, default=0) < 0:
                raise ValueError(f"a size of its output is negative: {list(made)}")
            own = self.dtype or next(real(one).name for one in tensors if one is not None)
            dtype = own if isinstance(own, str) else own(node, tensors)
            output = Tensor(dtype, made)
            return output, *(self.further(node, tensors, output) if self.further else ())
        arrays = [
            one if one is not None or t is None else np.broadcast_to(np.zeros((), real(t)), t.sizes)
            for t, one in zip(tensors, known, strict=True)
        ]
        return tuple(Tensor(one.dtype.name, one.shape) for one in self.compute(node, *arrays))

    def data_inputs(self, node: Node) -> tuple[str, ...]:
        """The inputs whose elements a node computes with: not its weights, shapes or limits."""
        if self.weight is not None:
            return tuple(name for name in (node.inputs[0], *node.inputs[3:4]) if name)
        return node.inputs[: self.data]

    @property
    def required(self) -> int:
        """How many inputs cannot be left out."""
        return required(self.meaning) - 1  # but for the node

    def check_given(self, inputs: Sequence[object]) -> None:
        """ValueError: an input is left out that cannot be."""
        count = sum(one is not None for one in inputs[: self.required])
        if count < self.required:
            raise ValueError(
                f"an input is missing: of the first {self.required}, {count} are there"
            )

    def _check_known(
        self,
        node: Node,
        tensors: Sequence[Tensor | None],
        known: Sequence[Array | None],
        first: int,
    ) -> None:
        """ValueError: from the input `first` on the numbers of one are not known."""
        for index in range(first, len(tensors)):
            if tensors[index] is not None and known[index] is None:
                raise ValueError(
                    f"its shape depends on the numbers of {node.inputs[index]!r}, which are "
                    "known only when the network runs: that is not supported"
                )


@cache
def required(function: Callable[..., Any]) -> int:
    """How many positional arguments a function needs."""
    if (count := getattr(function, "nin", None)) is not None:  # of NumPy's, and of primitives
        return count
    return sum(
        one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        for one in inspect.signature(function).parameters.values()
    )


@contextmanager
def naming(node: Node, inputs: Sequence[Tensor | Constant | None]) -> Iterator[None]:
    """What goes wrong becomes a ValueError that names the node and the shapes of its inputs."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        shapes = ", ".join("none" if one is None else str(list(one.shape)) for one in inputs)
        raise ValueError(f"{node.op} {node.name!r} of inputs {shapes}: {error}") from error
    except AssertionError as error:
        raise ValueError(f"{node.op} {node.name!r}: an input is missing") from error
    except MemoryError as error:
        raise MemoryError(f"{node.op} {node.name!r}: {error}") from error


def finite(x: Array) -> Array:
    """x, as it is rounded to 8 bits: infinities become the greatest float32s, NaN the least."""
    most = float(np.finfo(np.float32).max)
    return np.nan_to_num(x, nan=-most, posinf=most, neginf=-most)


def real(tensor: Tensor) -> np.dtype[Any]:
    """The dtype of the numbers that a tensor stands for: float32 where it has a scale."""
    return np.dtype("float32" if tensor.scale is not None else tensor.dtype)


operators: Registry[Operator] = Registry("operator", "lowbit.graph.operators")
