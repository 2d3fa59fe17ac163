"""Sets of shapes, by name: products that real work consists of, and products that nobody chose.

A convolution is the product that im2col makes of it: M = output pixels of one image, K = input
channels times kernel area, N = output channels. Equal products stand once, under the first name.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """A product of a set: [m, k] by [k, n], and what it is part of."""

    name: str
    m: int
    k: int
    n: int

    @property
    def shape(self) -> str:
        """`MxK:KxN`."""
        return f"{self.m}x{self.k}:{self.k}x{self.n}"


def _seed() -> list[Work]:
    """The layers that the project began with, for one sample, a small and a large batch; and a
    wide product. Layers are in x out."""
    layers = ((256, 512), (1024, 2048), (2048, 4096))
    works = [Work(f"linear {k}x{n}, batch {m}", m, k, n) for k, n in layers for m in (1, 32, 256)]
    return [*works, Work("256x256 by 256x16384", 256, 256, 16384)]


def _convolution(name: str, size: int, channels: int, kernel: int, out: int) -> Work:
    """A convolution whose output is `size` by `size`."""
    return Work(name, size * size, channels * kernel * kernel, out)


def _resnet34() -> list[Work]:
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
    return [*works, Work("fc", 1, 512, 1000)]


def _vit_b16() -> list[Work]:
    """ViT-B/16 (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021, table 1) on one image
    of 224 by 224: 196 patches and the class token."""
    width, hidden, patches = 768, 3072, 14 * 14
    tokens = patches + 1
    return [
        Work("patches", patches, 3 * 16 * 16, width),
        Work("qkv", tokens, width, 3 * width),
        Work("proj", tokens, width, width),
        Work("mlp up", tokens, width, hidden),
        Work("mlp down", tokens, hidden, width),
        Work("head", 1, width, 1000),
    ]


def _minilm() -> list[Work]:
    """A layer of the sentence encoder all-MiniLM-L6-v2 (width 384), for one sentence of 20 tokens
    and for a batch of 32."""
    return [
        Work(f"{name}, {tokens} tokens", tokens, k, n)
        for tokens in (20, 640)
        for name, k, n in (
            ("attention", 384, 384),
            ("intermediate", 384, 1536),
            ("output", 1536, 384),
        )
    ]


def _llm() -> list[Work]:
    """The projections of a decoder of 8 billion parameters (width 4096, feed-forward 14336)."""
    return [
        Work(f"{name}, {tokens} token{'s' if tokens > 1 else ''}", tokens, k, n)
        for tokens in (1, 16, 128, 512)
        for name, k, n in (
            ("attention", 4096, 4096),
            ("up", 4096, 14336),
            ("down", 14336, 4096),
        )
    ]


def _square() -> list[Work]:
    return [Work(f"{size} cubed", size, size, size) for size in (128, 256, 512, 1024, 2048)]


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


def _random(seed: int, count: int) -> tuple[Work, ...]:
    """So many shapes, each of M, N and K log-uniform from 1 to 16,384. Left out are those with more
    than 2^33 multiply-adds, or with more than 2^27 bytes in M*K + K*N + 4*M*N: a hundred then take
    one thread some ten minutes."""
    if count < 1:
        raise ValueError(f"count is {count}; it must be at least 1")
    draw = random.Random(seed)
    found: dict[str, Work] = {}
    while len(found) < count:
        m, n, k = (int((_LARGEST + 1) ** draw.random()) for _ in range(3))
        if m * k + k * n + 4 * m * n <= _MOST_BYTES and m * n * k <= _MOST_MULTIPLY_ADDS:
            work = Work(f"{RANDOM}: {len(found) + 1}", m, k, n)
            found.setdefault(work.shape, work)
    return tuple(found.values())


def works_of(name: str, seed: int = 0, count: int = 100) -> tuple[Work, ...]:
    """The products of a set, each shape once; seed and count are for "random". ValueError, naming
    the sets, if it is unknown."""
    if name not in SHAPES:
        raise ValueError(f"no set of shapes is called {name!r}; known are {', '.join(SHAPES)}")
    if name == RANDOM:
        return _random(seed, count)
    found: dict[str, Work] = {}
    for one in _MAKERS if name == "all" else (name,):
        for work in _MAKERS[one]():
            found.setdefault(work.shape, Work(f"{one}: {work.name}", work.m, work.k, work.n))
    return tuple(found.values())
