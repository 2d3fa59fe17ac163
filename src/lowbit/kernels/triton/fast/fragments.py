# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
"""What products with tiles share: from words to floats in registers, and the end.

In Gluon, the language below Triton: it lets a kernel say which thread holds what, and tiles lie in
memory as the threads of a matrix instruction hold its left operand. Triton's own compiler brings
such values through shared memory, or, where it doesn't, gave wrong sums in some configurations.
Gluon has no interpreter: these kernels are compiled ahead for two GPUs by tests, and compared with
the specification on one.

Nibbles must not be turned into floats by conversion: that would take longer than the memory does.
A word's halves, masked and OR-ed with the exponent of 128 (of 1024 for float16), are two floats
128 + n. 128 + z is subtracted, which is exact.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

# Gluon of Triton 3.9 has renamed them.
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def _text(exponent: str) -> str:
    """PTX for the four nibbles of both halves of a word, with the bits of an exponent."""
    lines = [f"lop3.b32 $0, $4, 0x000F000F, {exponent}, 0xEA;"]
    for i in range(1, 4):
        lines += [f"shr.u32 t, $4, {4 * i};", f"lop3.b32 ${i}, t, 0x000F000F, {exponent}, 0xEA;"]
    return f"{{ .reg .b32 t; {' '.join(lines)} }}"


def _constants(instruction: str, m: str) -> str:
    """PTX of one instruction on pairs of 16 bits, with a constant m."""
    return f"{{ .reg .b32 m; mov.b32 m, {m}; {instruction} }}"


_BFLOAT16_NIBBLES = gl.constexpr(_text("0x43004300"))
_FLOAT16_NIBBLES = gl.constexpr(_text("0x64006400"))
# By fused multiply-add, which sm_80 has for bfloat16: b·(-1) + a, a·b - 0, b·16 + a.
_BFLOAT16_LESS = gl.constexpr(_constants("fma.rn.bf16x2 $0, $2, m, $1;", m="0xBF80BF80"))
_BFLOAT16_TIMES = gl.constexpr(_constants("fma.rn.bf16x2 $0, $1, $2, m;", m="0x80008000"))
_BFLOAT16_16 = gl.constexpr(_constants("fma.rn.bf16x2 $0, $2, m, $1;", m="0x41804180"))
_FLOAT16_LESS = gl.constexpr("sub.f16x2 $0, $1, $2;")
_FLOAT16_TIMES = gl.constexpr("mul.f16x2 $0, $1, $2;")
_FLOAT16_16 = gl.constexpr(_constants("fma.rn.f16x2 $0, $2, m, $1;", m="0x4C004C00"))


@gluon.jit
def _pairs(ASM: gl.constexpr, a, b):
    """An instruction on pairs of 16 bits; b is a tensor, or a number for all."""
    b = gl.to_tensor(b).to(gl.int16)
    a, b = gl.broadcast(a, b)
    return gl.inline_asm_elementwise(ASM, "=r,r,r", [a, b], dtype=gl.int16, is_pure=True, pack=2)


@gluon.jit
def _nibbles(halves, LAYOUT: gl.constexpr, HALF: gl.constexpr):
    """int16 [2·rows, k / 8] of units as bits of floats, [rows, k]; values stay in their threads."""
    rows: gl.constexpr = halves.shape[0] // 2
    words: gl.constexpr = halves.shape[1] // 2
    a, b, c, d = gl.inline_asm_elementwise(
        _FLOAT16_NIBBLES if HALF else _BFLOAT16_NIBBLES, "=r,=r,=r,=r,r", [halves],
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True, pack=2,
    )  # fmt: skip
    w = gl.join(gl.join(a, c), gl.join(b, d))
    w = gl.reshape(w, [rows // 16, 8, 4, words, 2, 2, 2])  # unit, g, t, c, p, h, row half
    w = gl.reshape(gl.permute(w, [0, 6, 1, 3, 5, 2, 4]), [rows, 16 * words])
    return gl.convert_layout(w, LAYOUT, assert_trivial=True)


@gluon.jit
def zeros_of(words, REAL: gl.constexpr, HALF: gl.constexpr):
    """The zero points in words of groups, as bits of floats that are subtracted."""
    if not REAL:
        return ((words & 0xFF) | (0x6400 if HALF else 0x4300)).to(gl.int16)
    elif HALF:  # noqa: RET505  # Triton's compiler looks into code after a return.
        high = (words & -65536).to(gl.float32, bitcast=True)
        return high.to(gl.float16).to(gl.int16, bitcast=True)
    else:
        return (words >> 16).to(gl.int16)


@gluon.jit
def scales_of(words, REAL: gl.constexpr):
    """The scales in words of groups, float32."""
    bits = (words << 16) if REAL else (words & -256)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _less_zeros(high, low, words, LAYOUT: gl.constexpr, SCALED: gl.constexpr,
                REAL: gl.constexpr, HALF: gl.constexpr):  # fmt: skip
    """Units of k that share a group, as bits of floats: integers, or times their scales.

    high: halves of words, `low` those of the lower plane of 8 bits, or None.
    """
    LESS: gl.constexpr = _FLOAT16_LESS if HALF else _BFLOAT16_LESS
    base: gl.constexpr = 0x6400 if HALF else 0x4300
    w = _nibbles(high, LAYOUT, HALF)
    if low is not None:
        low = _pairs(LESS, _nibbles(low, LAYOUT, HALF), base)
        w = _pairs(_FLOAT16_16 if HALF else _BFLOAT16_16, low, _pairs(LESS, w, base + 8))
    else:
        if REAL:
            w = _pairs(LESS, w, base + 8)
        w = _pairs(LESS, w, gl.expand_dims(zeros_of(words, REAL, HALF), 1))
    if SCALED:
        scale = scales_of(words, REAL).to(gl.float16 if HALF else gl.bfloat16)
        scale = gl.expand_dims(scale.to(gl.int16, bitcast=True), 1)
        w = _pairs(_FLOAT16_TIMES if HALF else _BFLOAT16_TIMES, w, scale)
    return w


@gluon.jit
def _halved(x):
    """[a, 2·b] as two [a, b], the first and the second half of each row."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@gluon.jit
def weights(ws, ss, half, LAYOUT: gl.constexpr, PLANES: gl.constexpr, GROUP: gl.constexpr,
            SCALED: gl.constexpr, REAL: gl.constexpr, HALF: gl.constexpr):  # fmt: skip
    """64 k of a weight in x's dtype, [rows, 64], less its zero points, and `SCALED` or not.

    ws: int16 [2·PLANES·2·rows, 8] and ss: int32 [128 / GROUP, or 1, · rows] in shared memory, the
    units and the words of 128 k, of which these are the first or the second half.
    """
    NATIVE: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [gl.num_warps(), 1], [1, 0])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    SIZE: gl.constexpr = ws.shape[0] // (2 * PLANES)
    ROWS: gl.constexpr = SIZE // 2
    high = ws.slice(half * PLANES * SIZE, SIZE).load(NATIVE)
    low = None
    if PLANES == 2:
        low = ws.slice((half * 2 + 1) * SIZE, SIZE).load(NATIVE)
    first: gl.constexpr = 0 if GROUP >= 128 else half * (64 // GROUP)
    words = ss.slice(first * ROWS, ROWS).load(OF_ROWS)
    if GROUP == 32:
        left, right = _halved(high)
        low_left, low_right = None, None
        if PLANES == 2:
            low_left, low_right = _halved(low)
        others = ss.slice((first + 1) * ROWS, ROWS).load(OF_ROWS)
        left = _less_zeros(left, low_left, words, LAYOUT, SCALED, REAL, HALF)
        right = _less_zeros(right, low_right, others, LAYOUT, SCALED, REAL, HALF)
        w = gl.reshape(gl.permute(gl.join(left, right), [0, 2, 1]), [left.shape[0], 64])
        w = gl.convert_layout(w, LAYOUT, assert_trivial=True)
    else:
        w = _less_zeros(high, low, words, LAYOUT, SCALED, REAL, HALF)
    return w.to(gl.float16 if HALF else gl.bfloat16, bitcast=True)


@gluon.jit
def weight_in_slots(tiles_ptr, words_ptr, n0, K, padded, ROWS: gl.constexpr, SLOTS: gl.constexpr,
                    PLANES: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Shared memory for SLOTS times 128 k of ROWS rows from n0 on, and where the first 128 k are:
    units, words, pointers to both, and which units there are."""
    WARPS: gl.constexpr = gl.num_warps()
    WIDE: gl.constexpr = 128 // tiles_ptr.dtype.element_ty.primitive_bitwidth  # of 16 bytes
    NATIVE: gl.constexpr = gl.BlockedLayout([1, WIDE], [32, 1], [WARPS, 1], [1, 0])
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SUBS: gl.constexpr = 128 // GROUP if GROUP < 128 else 1
    r = gl.arange(0, 4 * PLANES * ROWS, gl.SliceLayout(1, NATIVE))
    unit = n0 // 16 + r % (2 * ROWS) // 32
    at = unit.to(gl.int64) * ((K + 127) // 128 * 2 * PLANES) + r // (2 * ROWS)
    at = (at * 32 + r % 32) * WIDE
    within = gl.arange(0, WIDE, gl.SliceLayout(0, NATIVE))
    of_tile = tiles_ptr + (gl.expand_dims(at, 1) + gl.expand_dims(within, 0))
    # Past the end the last words are read again: what they scale isn't stored.
    i = gl.arange(0, SUBS * ROWS, FLAT)
    of_words = words_ptr + i // ROWS * padded + gl.minimum(n0 + i % ROWS, padded - 1)
    ws = gl.allocate_shared_memory(
        tiles_ptr.dtype.element_ty, [SLOTS, 4 * PLANES * ROWS, WIDE],
        gl.SwizzledSharedLayout(WIDE, 1, 1, [1, 0]),
    )  # fmt: skip
    ss = gl.allocate_shared_memory(
        gl.int32, [SLOTS, SUBS * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    return ws, ss, of_tile, of_words, unit * 16 < padded


@gluon.jit
def load_weight(step, end, slot, ws, ss, of_tile, of_words, inside, padded, PLANES: gl.constexpr,
                GROUP: gl.constexpr):  # fmt: skip
    """128 k, from 128·step on, begin to move into a slot; none past the end."""
    there = step < end
    mask = gl.expand_dims(inside & there, 1)
    load_async(ws.index(slot), of_tile + step * (64 * PLANES * ws.shape[2]), mask=mask)
    if GROUP > 128:
        of_words += step // (GROUP // 128) * padded
    else:
        of_words += step * (128 // GROUP) * padded
    load_async(ss.index(slot), of_words, mask=there)
    async_copy.commit_group()


@gluon.jit
def part_of(split, K, SPLITS: gl.constexpr):
    """Which steps of 128 k one of SPLITS programs takes: from the first to before the second."""
    steps = (K + 127) // 128
    each = (steps + SPLITS - 1) // SPLITS
    return split * each, gl.minimum(split * each + each, steps)


@gluon.jit
def tile_of(unit, tiles_m, tiles_n, SPLITS: gl.constexpr):
    """Which tile, and which part along K, is the work `unit`: rows of tiles of the weight go over
    all of x eight at a time, so that both stay in L2. Tile, part, row and column."""
    TALL: gl.constexpr = 8
    tile, split = unit // SPLITS, unit % SPLITS
    first = tile // (TALL * tiles_m) * TALL
    tall = gl.minimum(tiles_n - first, TALL)
    at = tile % (TALL * tiles_m)
    return tile, split, first + at % tall, at // tall


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def block_of_rows(block, M, N, ends_ptr, experts, BLOCK_M: gl.constexpr, EXPERTS: gl.constexpr):
    """Of a block of rows of x the first, that behind the last, and the first row of its weight.

    Of a grouped product, EXPERTS > 0 (a power of two, at least as many as there are), rows belong
    to experts, whose weights lie one after another; blocks of each expert's rows begin anew, and
    behind the last are blocks of no rows. Each warp finds its block by itself.
    """
    first, last, below = block * BLOCK_M, M, 0
    if EXPERTS > 0:
        LAYOUT: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [gl.num_warps()], [0])
        e = gl.arange(0, EXPERTS, LAYOUT)
        end = gl.load(ends_ptr + e, mask=e < experts, other=0)
        begin = gl.load(ends_ptr + e - 1, mask=(e > 0) & (e < experts), other=0)
        blocks = (end - begin + BLOCK_M - 1) // BLOCK_M
        until = gl.associative_scan(blocks, 0, _plus)
        own = (until > block) & (until - blocks <= block)
        first = gl.sum(gl.where(own, begin + (block - until + blocks) * BLOCK_M, 0), 0)
        last = gl.sum(gl.where(own, end, 0), 0)
        below = gl.sum(gl.where(own, e, 0), 0) * ((N + 63) // 64 * 64)
    return first, last, below


@gluon.jit
def finish(total, tile, split, n0, m0, last, N, z_ptr, bias_ptr, residual_ptr, part_ptr, met_ptr,
           OUT: gl.constexpr, BIAS: gl.constexpr, RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr,
           SPLITS: gl.constexpr, GATED: gl.constexpr = False,
           TURNED: gl.constexpr = False):  # fmt: skip
    """Store activation(total + bias) + residual, rounded once, as z[m0 + m, n0 + n], of rows
    before `last`; total: [n, m] or, TURNED, [m, n].

    Of several programs along K the last to arrive adds all parts, in their order. OUT: the layout
    in which threads side by side store side by side; None: that of the sums. GATED: z has half as
    many columns, see `_gated`.
    """
    N, ends = gl.to_tensor(N), True
    if SPLITS > 1:
        # Parts lie as threads of a matrix instruction hold them, four of each side by side.
        AREA: gl.constexpr = total.shape[0] * total.shape[1]
        held = gl.reshape(total, [total.shape[0] // 16, 2, 8, total.shape[1] // 8, 4, 2])
        held = gl.reshape(gl.permute(held, [0, 3, 2, 4, 1, 5]), [AREA // 4, 4])
        HELD: gl.constexpr = held.type.layout
        at = gl.expand_dims(gl.arange(0, AREA // 4, gl.SliceLayout(1, HELD)) * 4, 1)
        at += gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, HELD)), 0)
        parts = part_ptr + gl.to_tensor(tile).to(gl.int64) * (SPLITS * AREA)
        gl.store(parts + split * AREA + at, held)
        barrier()  # all have stored; Triton puts another behind the atomic, for its result
        ends = gl.atomic_add(met_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    if ends:
        z = total
        if SPLITS > 1:
            z = gl.zeros([AREA // 4, 4], gl.float32, HELD)
            for i in range(SPLITS):
                z += gl.load(parts + i * AREA + at, cache_modifier=".cg")
            gl.store(met_ptr + tile, 0)
            z = gl.reshape(z, [total.shape[0] // 16, total.shape[1] // 8, 8, 4, 2, 2])
            z = gl.reshape(gl.permute(z, [0, 4, 2, 1, 3, 5]), total.shape)
            z = gl.convert_layout(z, total.type.layout, assert_trivial=True)
        if TURNED:
            z = gl.permute(z, (1, 0))
        if BIAS:
            n = n0 + gl.arange(0, z.shape[0], gl.SliceLayout(1, z.type.layout))
            bias = gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32)
            z += gl.expand_dims(bias, 1)
        if GATED:
            z = _gated(z, ACTIVATION)
            n0, N = n0 // 2, N // 2
        else:
            z = activated(z, ACTIVATION)
        TO: gl.constexpr = z.type.layout if OUT is None else OUT
        n = n0 + gl.arange(0, z.shape[0], gl.SliceLayout(1, TO))
        m = m0 + gl.arange(0, z.shape[1], gl.SliceLayout(0, TO))
        to = gl.expand_dims(m.to(gl.int64) * N, 0) + gl.expand_dims(n, 1)
        known = gl.expand_dims(n < N, 1) & gl.expand_dims(m < last, 0)
        if RESIDUAL:
            z = gl.convert_layout(z, TO)
            z += gl.load(residual_ptr + to, mask=known, other=0.0).to(gl.float32)
        z = gl.convert_layout(z.to(z_ptr.dtype.element_ty), TO)
        gl.store(z_ptr + to, z, mask=known)


@gluon.jit
def activated(x, ACTIVATION: gl.constexpr):
    """An activation of `tiles.ACTIVATIONS`, or the function of a gate."""
    if ACTIVATION == "relu":
        x = gl.where(x < 0.0, 0.0, x)  # NaN stays
    elif ACTIVATION == "silu":
        x = x / (1.0 + gl.exp(-x))
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh u) / 2 is the logistic function of 2 u
        x = x / (1.0 + gl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        gl.static_assert(ACTIVATION == "")
    return x


@gluon.jit
def _gated(z, FUNCTION: gl.constexpr):
    """f(a) · b of sums [rows, columns], of which each 16 rows are 8 of a and 8 of b, that the same
    threads hold: [rows / 2, columns]."""
    rows: gl.constexpr = z.shape[0]
    columns: gl.constexpr = z.shape[1]
    a, b = gl.split(gl.permute(gl.reshape(z, [rows // 16, 2, 8, columns]), [0, 2, 3, 1]))
    return gl.reshape(activated(a, FUNCTION) * b, [rows // 2, columns])
