"""Images in planes of float32 as images of bytes with channels last, for few channels.

What `elementwise` would write byte by byte is made of whole vectors: the bytes of a pixel are put
together in a word of 32 bits, and words of which not all bytes are wanted are pushed together.
"""

from __future__ import annotations

from lowbit.isa.generic import minimum, shuffle
from lowbit.isa.types import F32Pointer, Int, U8Pointer, Vector, s32, u8
from lowbit.isa.value import Value
from lowbit.jit.builder import Builder
from lowbit.jit.kernel import kernel
from lowbit.kernels.cpu.shared.formats import parameters_of, storing

CHANNELS = (2, 3, 4)
_BLOCK = 4096  # pixels of an item


@kernel
def interleave_channels(
    k: Builder,
    out: U8Pointer,
    x: F32Pointer,
    parameters: F32Pointer,
    images: Int,
    pixels: Int,
    *,
    channels: int,
    format: str,
) -> None:
    """out[i, p, c] = x[i, c, p], rounded to "u8" or "s8"; both contiguous, c in `CHANNELS`.

    parameters: 1 / scale and zero point of the output, as `elementwise` has them.
    """
    lanes = k.isa.vector_bytes // 4
    given = [(parameters + i).load() for i in range(parameters_of(format))]
    stored = storing(format, [number.splat(lanes) for number in given])
    one = storing(format, given)
    wanted = tuple(4 * lane + c for lane in range(lanes) for c in range(channels))
    blocks = (pixels + (_BLOCK - 1)) // _BLOCK
    for item in k.parallel(images * blocks):
        image, begin = item // blocks, item % blocks * _BLOCK
        end = minimum(begin + _BLOCK, pixels)
        source = [x + (image * channels + c) * pixels for c in range(channels)]
        target = out + image * pixels * channels
        whole = begin + (end - begin) // lanes * lanes
        for at in k.range(begin, whole, lanes):
            word: Value | None = None
            for c, plane in enumerate(source):
                part = stored((plane + at).load(lanes)).to(u8).to(s32) << (8 * c)
                word = part if word is None else word | part
            assert word is not None
            made = word.bits(Vector(u8, 4 * lanes))
            made = made if channels == 4 else shuffle(made, made, wanted)
            (target + at * channels).store(made)
        for at in k.range(whole, end):
            for c, plane in enumerate(source):
                (target + at * channels + c).store(one((plane + at).load()).to(u8))
