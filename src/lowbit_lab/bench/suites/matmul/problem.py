"""What a benchmark multiplies: shapes and dtypes as text, and the data that all are given."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lowbit.numerics import affine_parameters, int_format, quantize_affine
from lowbit.registry.locks import cached_property
from lowbit.spec import Case, Operation
from lowbit.spec.operations.products import linear_dynamic, matmul, matmul_scaled
from lowbit_lab.bench.core import case as cases
from lowbit_lab.bench.core.context import physical_memory

Array = NDArray[Any]

GEMMS = (matmul, matmul_scaled, linear_dynamic)
"""The operations that multiply two matrices; their dtypes tell them apart."""

SIGNATURES = tuple(
    signature
    for spec in GEMMS
    for signature in spec.signatures
    if signature.split(":")[2] in ("s32", "f32", "u8")
)
"""The dtypes that are timed."""

DISTRIBUTION = (
    "integers uniform over the full range; float activations N(0, 1); weight scales log-uniform "
    "from 1e-4 to 1e-2; one scale and one zero point for the whole activation, and for an output "
    "of 8 bits, spread over its range"
)
"""What the data of `MatmulProblem.make` are, for the record."""

_UINT8 = int_format("uint8")
_SHAPE = re.compile(r"(\d+)x(\d+):(\d+)x(\d+)")
_EXAMPLE = "write MxK:KxN, for example 256x512:512x1024"

# Reference and float copies are float64 and float32 beside operands of a byte or four.
_REFERENCE_BYTES = 8


def parse_shape(text: str) -> dict[str, int]:
    """Read `MxK:KxN`, for example `256x512:512x1024`, as sizes of M, N and K.

    ValueError if the text has another form, the inner sizes differ, or a size is 0.
    """
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise ValueError(f"shape {text!r} is not understood; {_EXAMPLE}")
    m, k, k_of_b, n = (int(number) for number in match.groups())
    if k != k_of_b:
        raise ValueError(f"shape {text!r}: the inner sizes differ, {k} and {k_of_b}; {_EXAMPLE}")
    if 0 in (m, n, k):
        raise ValueError(f"shape {text!r}: every size must be at least 1; {_EXAMPLE}")
    return {"M": m, "N": n, "K": k}


def find_gemm(dtypes: str) -> Operation:
    """The operation that has these dtypes (`left:right:output`, for example `u8:s8:s32`).

    ValueError lists the known ones.
    """
    if dtypes not in SIGNATURES:
        raise ValueError(f"dtypes {dtypes!r} are not known; known are {', '.join(SIGNATURES)}")
    return next(spec for spec in GEMMS if dtypes in spec.signatures)


@dataclass(frozen=True)
class MatmulCase(cases.Case):
    """A product [M, K] by [K, N]."""

    @property
    def spec(self) -> Operation:
        """What it means."""
        return find_gemm(self.dtypes)

    @property
    def stated(self) -> Case:
        """The case of the specification, without what not every peer has: a bias, and zero points
        of the weights."""
        without = set(self.spec.optional) - {"a_zero_point"}
        return self.spec.case(self.sizes, dtypes=self.dtypes, without=without)


def product(shape: str, dtypes: str, work: str = "") -> MatmulCase:
    """The case that a shape and dtypes name.

    ValueError if either is not understood, the sums could overflow, or the data would not fit
    into this machine's memory.
    """
    sizes = parse_shape(shape)
    case = MatmulCase(find_gemm(dtypes).name, shape, dtypes, work, sizes)
    _ = case.stated  # which refuses sums that overflow
    elements = sum(sizes[x] * sizes[y] for x, y in ("MK", "KN", "MN"))
    needed, memory = 2 * _REFERENCE_BYTES * elements, physical_memory()
    if needed > memory:
        raise ValueError(
            f"shape {shape!r} needs about {needed / 1e9:.0f} GB with its reference, and this "
            f"machine has {memory / 1e9:.0f} GB; give a smaller one"
        )
    return case


@dataclass(frozen=True, eq=False)
class MatmulProblem(cases.StatedProblem):
    """One case with data, the same for every implementation: the inputs of the specification."""

    case: MatmulCase
    inputs: dict[str, Array]
    # To quantize costs less. Peers that add products of bytes in 16 bits cut off sums.
    most_error: ClassVar[float] = 0.05

    @classmethod
    def make(cls, case: MatmulCase, seed: int = 0) -> MatmulProblem:
        """Draw the data of `case`; the same seed gives the same."""
        inputs = case.stated.inputs(seed)
        # The specification's own data go to extremes from row to row; here they are ordinary.
        for name in ("a_scale", "a_zero_point"):
            if name in inputs:
                inputs[name][:] = inputs[name][-1]
        if "x" in inputs:
            normal = np.random.default_rng(seed).standard_normal(inputs["x"].shape)
            inputs["x"] = normal.astype(np.float32)
        problem = cls(case, inputs)
        if problem.quantizes:
            scale, zero_point = _quantization_of(problem.a_float @ problem.b_float)
            inputs["out_scale"] = np.array(scale, np.float32)
            inputs["out_zero_point"] = np.array(zero_point, np.int32)
        return problem

    @cached_property
    def a(self) -> Array:
        """The left factor [M, K] in the dtype of the case, C-contiguous."""
        return self.inputs[self.case.spec.factors[0]]

    @cached_property
    def b(self) -> Array:
        """The right factor [K, N] in the dtype of the case, C-contiguous."""
        return self.inputs[self.case.spec.factors[1]]

    @cached_property
    def a_float(self) -> NDArray[np.float32]:
        """What a stands for, for implementations in floating point."""
        shifted = self.a.astype(np.float32) - np.float32(self.a_zero_point or 0)
        return shifted * np.float32(self.a_scale or 1)

    @cached_property
    def b_float(self) -> NDArray[np.float32]:
        """What b stands for."""
        return self.b.astype(np.float32) * (1 if self.b_scale is None else self.b_scale)

    @property
    def a_scale(self) -> float | None:
        """Of all of a, since not every peer takes one for each row; None where the operation has
        none."""
        return float(self.inputs["a_scale"][0]) if "a_scale" in self.inputs else None

    @property
    def a_zero_point(self) -> int | None:
        """As `a_scale`."""
        return int(self.inputs["a_zero_point"][0]) if "a_zero_point" in self.inputs else None

    @property
    def b_scale(self) -> NDArray[np.float32] | None:
        """Of each column, [N]; None where the operation has none."""
        return self.inputs.get("b_scale")

    @cached_property
    def stated(self) -> Case:
        return self.case.stated

    @cached_property
    def ideal(self) -> Array:
        """The result, int64 or float64 [M, N], with nothing quantized inside."""
        return self.stated.ideal(self.inputs) if self.case.spec.ideal else super().ideal

    @cached_property
    def weight_bytes(self) -> int:
        return self.b.nbytes

    @property
    def quantizes(self) -> bool:
        """Whether the result is of 8 bits."""
        return self.case.dtypes.endswith(":u8")

    @property
    def out_quantization(self) -> tuple[float, int]:
        """Scale and zero point of a result of 8 bits: what the case says, or what would fit."""
        if self.quantizes:
            return float(self.inputs["out_scale"]), int(self.inputs["out_zero_point"])
        return _quantization_of(self.ideal)

    def from_real(self, result: Array) -> Array:
        """The result [M, N] of the case from real numbers, for an implementation that stops
        there: 8 bits where the case says so."""
        return quantize_affine(result, *self.out_quantization, _UINT8) if self.quantizes else result

    def from_sums(self, sums: Array) -> Array:
        """The result of the case from integer sums of a[m, k] * b[k, n]."""
        if self.a_scale is None or self.b_scale is None:
            return sums
        columns = self.b.sum(axis=0, dtype=np.int64)
        real = (sums - (self.a_zero_point or 0) * columns) * np.float64(self.a_scale)
        return self.from_real(real * self.b_scale)


def _quantization_of(real: Array) -> tuple[float, int]:
    """Scale and zero point that spread 8 bits over the range of `real`."""
    scale, zero_point = affine_parameters(real.min(), real.max(), _UINT8, symmetric=False)
    return float(scale), int(zero_point)


# Sets of shapes, by name: products that real work consists of, and products that nobody chose.
#
# A convolution is the product that im2col makes of it: M = output pixels of one image, K = input
# channels times kernel area, N = output channels. Equal products stand once, under the first name.


@dataclass(frozen=True)
class NamedShape:
    """A product of a set: [m, k] by [k, n], and what it is part of."""

    name: str
    m: int
    k: int
    n: int

    @property
    def shape(self) -> str:
        """`MxK:KxN`."""
        return f"{self.m}x{self.k}:{self.k}x{self.n}"


def _seed() -> list[NamedShape]:
    """The layers that the project began with, for one sample, a small and a large batch; and a
    wide product. Layers are in x out."""
    layers = ((256, 512), (1024, 2048), (2048, 4096))
    works = [
        NamedShape(f"linear {k}x{n}, batch {m}", m, k, n) for k, n in layers for m in (1, 32, 256)
    ]
    return [*works, NamedShape("256x256 by 256x16384", 256, 256, 16384)]


def _convolution(name: str, size: int, channels: int, kernel: int, out: int) -> NamedShape:
    """A convolution whose output is `size` by `size`."""
    return NamedShape(name, size * size, channels * kernel * kernel, out)


def _resnet34() -> list[NamedShape]:
    """ResNet-34 (He et al., "Deep Residual Learning for Image Recognition", 2016, table 1) on one
    image of 224 by 224."""
    works = [_convolution("conv1", 112, 3, 7, 64)]
    before = 64
    for number, (size, channels) in enumerate(((56, 64), (28, 128), (14, 256), (7, 512)), start=1):
        if channels != before:
            works.append(_convolution(f"layer{number}.0.conv1", size, before, 3, channels))
            works.append(_convolution(f"layer{number}.0.downsample", size, before, 1, channels))
        works.append(_convolution(f"layer{number} conv", size, channels, 3, channels))
        before = channels
    return [*works, NamedShape("fc", 1, 512, 1000)]


def _vit_b16() -> list[NamedShape]:
    """ViT-B/16 (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021, table 1) on one image
    of 224 by 224: 196 patches and the class token."""
    width, hidden, patches = 768, 3072, 14 * 14
    tokens = patches + 1
    return [
        NamedShape("patches", patches, 3 * 16 * 16, width),
        NamedShape("qkv", tokens, width, 3 * width),
        NamedShape("proj", tokens, width, width),
        NamedShape("mlp up", tokens, width, hidden),
        NamedShape("mlp down", tokens, hidden, width),
        NamedShape("head", 1, width, 1000),
    ]


def _projections(counts: Iterable[int], layers: Mapping[str, tuple[int, int]]) -> list[NamedShape]:
    """Layers in x out, each for so many tokens."""
    return [
        NamedShape(f"{name}, {tokens} token{'s' if tokens > 1 else ''}", tokens, *sizes)
        for tokens in counts
        for name, sizes in layers.items()
    ]


def _minilm() -> list[NamedShape]:
    """A layer of the sentence encoder all-MiniLM-L6-v2 (width 384), for one sentence of 20 tokens
    and for a batch of 32."""
    layers = {"attention": (384, 384), "intermediate": (384, 1536), "output": (1536, 384)}
    return _projections((20, 640), layers)


def _llm() -> list[NamedShape]:
    """The projections of a decoder of 8 billion parameters (width 4096, feed-forward 14336)."""
    layers = {"attention": (4096, 4096), "up": (4096, 14336), "down": (14336, 4096)}
    return _projections((1, 16, 128, 512), layers)


def _square() -> list[NamedShape]:
    return [NamedShape(f"{size} cubed", size, size, size) for size in (128, 256, 512, 1024, 2048)]


_MAKERS = {
    "seed": _seed,
    "resnet34": _resnet34,
    "vit_b16": _vit_b16,
    "minilm": _minilm,
    "llm": _llm,
    "square": _square,
}
RANDOM = "random"
SHAPES = (*_MAKERS, "all", RANDOM)
"""The names of the sets; "all" is those before it, one after another, "random" is drawn."""

_LARGEST = 16384
_MOST_BYTES = 1 << 27
_MOST_MULTIPLY_ADDS = 1 << 33


def _random(seed: int, count: int) -> tuple[NamedShape, ...]:
    """So many shapes, each of M, N and K log-uniform from 1 to 16,384. Left out are those with more
    than 2^33 multiply-adds, or with more than 2^27 bytes in M*K + K*N + 4*M*N: a hundred then take
    one thread some ten minutes."""
    if count < 1:
        raise ValueError(f"count is {count}; it must be at least 1")
    draw = random.Random(seed)
    found: dict[str, NamedShape] = {}
    while len(found) < count:
        m, n, k = (int((_LARGEST + 1) ** draw.random()) for _ in range(3))
        if m * k + k * n + 4 * m * n <= _MOST_BYTES and m * n * k <= _MOST_MULTIPLY_ADDS:
            work = NamedShape(f"{RANDOM}: {len(found) + 1}", m, k, n)
            found.setdefault(work.shape, work)
    return tuple(found.values())


def works_of(name: str, seed: int = 0, count: int = 100) -> tuple[NamedShape, ...]:
    """The products of a set, each shape once; seed and count are for "random". ValueError, naming
    the sets, if it is unknown."""
    if name not in SHAPES:
        raise ValueError(f"no set of shapes is called {name!r}; known are {', '.join(SHAPES)}")
    if name == RANDOM:
        return _random(seed, count)
    found: dict[str, NamedShape] = {}
    for one in _MAKERS if name == "all" else (name,):
        for work in _MAKERS[one]():
            found.setdefault(work.shape, NamedShape(f"{one}: {work.name}", work.m, work.k, work.n))
    return tuple(found.values())
