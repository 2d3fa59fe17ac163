"""What threads of a warp and a block compute together, from PTX and from Numba."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jaxtyping")

from lowbit_lab.compare.ptx.block import NotInterpretedError
from lowbit_lab.compare.ptx.execute import Launch
from lowbit_lab.compare.ptx.memory import Memory, packed_parameters
from lowbit_lab.compare.ptx.parse import parse
from lowbit_lab.compare.run import compare
from lowbit_lab.compare.toolchain import MissingToolError, library

TEXT = """
.version 8.0
.target sm_90
.global .align 4 .b8 table[8] = {{1, 0, 0, 0, 255}};
.const .align 4 .u32 pair[2] = {{7, 9}};
.global .align 4 .f32 third = 0f40400000;
.visible .entry f(.param .u64 f_0)
{{
    .reg .pred %p<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    .shared .align 4 .b8 one[4];
    ld.param.u64 %rd1, [f_0];
    mov.u32 %r1, %tid.x;
    and.b32 %r2, %r1, 31;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    setp.lt.u32 %p1, %r2, 3;
    setp.lt.u32 %p2, %r1, 3;
    {body}
    st.global.u32 [%rd3], %r3;
    ret;
}}
"""


def run(body: str, threads: int = 64) -> np.ndarray:
    out = np.full(threads, 0xA5, np.uint32)
    memory, ptx = Memory(), parse(TEXT.format(body=body), "f.cu")
    values = packed_parameters({"f_0": ("u", 64)}, [memory.place("out", out)])
    launch = Launch(ptx, memory, values, (1, 1, 1), (threads, 1, 1), 96)
    assert launch.run()
    return out


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("vote.sync.ballot.b32 %r3, %p1, -1;", lambda t: 7),
        ("vote.sync.ballot.b32 %r3, !%p1, -1;", lambda t: 2**32 - 8),
        ("vote.sync.ballot.b32 %r3, %p2, -1;", lambda t: 7 if t < 32 else 0),
        ("vote.sync.any.pred %p3, %p2, -1;\nselp.u32 %r3, 1, 0, %p3;", lambda t: int(t < 32)),
        ("vote.sync.all.pred %p3, %p1, -1;\nselp.u32 %r3, 1, 0, %p3;", lambda t: 0),
        ("vote.sync.uni.pred %p3, %p2, -1;\nselp.u32 %r3, 1, 0, %p3;", lambda t: int(t >= 32)),
        ("mov.u32 %r3, 0;\n@%p1 activemask.b32 %r3;", lambda t: 7 if t % 32 < 3 else 0),
        ("match.any.sync.b32 %r3, %r2, -1;", lambda t: 1 << t % 32),
        ("match.all.sync.b32 %r3|%p3, %r2, -1;", lambda t: 0),
        ("match.all.sync.b32 %r3|%p3, 5, -1;", lambda t: 2**32 - 1),
        ("redux.sync.add.s32 %r3, %r1, -1;", lambda t: 496 if t < 32 else 1520),
        ("redux.sync.max.u32 %r3, %r1, -1;", lambda t: 31 if t < 32 else 63),
        ("shfl.sync.bfly.b32 %r3|%p3, %r1, 1, 31, -1;", lambda t: t ^ 1),
        ("shfl.sync.idx.b32 %r3, %r1, 4, 31, -1;", lambda t: t // 32 * 32 + 4),
        ("bar.red.popc.u32 %r3, 0, %p1;", lambda t: 6),
        ("bar.red.or.pred %p3, 0, %p2;\nselp.u32 %r3, 1, 0, %p3;", lambda t: 1),
        ("bar.red.and.pred %p3, 0, %p2;\nselp.u32 %r3, 1, 0, %p3;", lambda t: 0),
        ("mov.u32 %r3, %lanemask_lt;", lambda t: 2 ** (t % 32) - 1),
        ("mov.u32 %r3, %lanemask_ge;", lambda t: 2**32 - 2 ** (t % 32)),
        ("mov.u32 %r3, %lanemask_gt;", lambda t: 2**32 - 2 ** (t % 32 + 1)),
        ("mov.u32 %r3, %lanemask_le;", lambda t: 2 ** (t % 32 + 1) - 1),
        ("mov.u32 %r3, %dynamic_smem_size;", lambda t: 96),
        ("brev.b32 %r3, %r1;", lambda t: int(f"{t:032b}"[::-1], 2)),
        ("bfind.u32 %r3, %r1;", lambda t: t.bit_length() - 1 & 2**32 - 1),
        ("bfind.shiftamt.u32 %r3, %r1;", lambda t: 32 - t.bit_length() if t else 2**32 - 1),
        ("bfi.b32 %r3, %r1, 255, 8, 4;", lambda t: 255 | (t & 15) << 8),
        ("shf.l.wrap.b32 %r3, %r1, 3, 33;", lambda t: 6),
        ("shf.r.clamp.b32 %r3, %r1, 3, 1;", lambda t: (3 << 32 | t) >> 1 & 2**32 - 1),
        ("sad.u32 %r3, %r1, 5, 1;", lambda t: abs(t - 5) + 1),
        ("cnot.b32 %r3, %r1;", lambda t: int(t == 0)),
        ("mov.u64 %rd4, table;\nld.global.u32 %r3, [%rd4+4];", lambda t: 255),
        ("mov.u64 %rd4, pair;\nld.const.u32 %r3, [%rd4+4];", lambda t: 9),
        ("mov.u64 %rd4, third;\nld.global.u32 %r3, [%rd4];", lambda t: 0x40400000),
    ],
)
def test_what_an_instruction_leaves(body: str, expected: object) -> None:
    assert callable(expected)
    assert run(body).tolist() == [expected(thread) for thread in range(64)]


@pytest.mark.parametrize(
    ("what", "expected"), [("inc.u32 %r4, [%r5], 5", 4), ("dec.u32 %r4, [%r5], 5", 2)]
)
def test_atomics_that_wrap(what: str, expected: int) -> None:
    """64 threads count 0, 1 ... 5, 0 ..., or down from 0 to 5, 4 ..."""
    body = f"mov.u32 %r5, one;\natom.shared.{what};\nbar.sync 0;\nld.shared.u32 %r3, [%r5];"
    assert set(run(body).tolist()) == {expected}


def test_a_warp_does_not_let_the_block_go() -> None:
    """The first warp waits for itself before it writes what the second reads behind the block's
    barrier."""
    body = """mov.u32 %r5, one;
    setp.ge.u32 %p4, %r1, 32;
    @%p4 bra $L_meet;
    bar.warp.sync -1;
    mov.u32 %r6, 3;
    st.shared.u32 [%r5], %r6;
$L_meet:
    bar.sync 0;
    ld.shared.u32 %r3, [%r5];"""
    assert set(run(body).tolist()) == {3}


def test_a_call_that_is_not_inlined_is_named() -> None:
    body = """{ // callseq 0, 0
    .param .b64 param0;
    st.param.b64 [param0+0], %rd1;
    .param .b32 retval0;
    call.uni (retval0),
    vprintf,
    (
    param0
    );
    ld.param.b32 %r3, [retval0+0];
    }"""
    with pytest.raises(NotInterpretedError, match=r"not inlined; the kernel calls vprintf$"):
        run(body)


NUMBA = """
import math
import numpy as np
from jaxtyping import Float32
from numba import cuda, float32, int32, uint32


def spec(x: Float32[np.ndarray, "N"]) -> Float32[np.ndarray, "N"]:
    return x + x


sizes, block = {"N": 130}, 64
ALL = 0xFFFFFFFF


def grid(size):
    return -(-size["N"] // 64)


@cuda.jit(device=True)
def fetch(x, i):
    return x[i]


@cuda.jit(device=True)
def unused(x):
    return x


@cuda.jit
def half_of_them(x, z):
    i = cuda.blockIdx.x * 64 + cuda.threadIdx.x * 2
    if cuda.threadIdx.x < 32 and i < x.size:
        z[i] = x[i] + x[i]
        if i + 1 < x.size:
            z[i + 1] = x[i + 1] + x[i + 1]


@cuda.jit
def shuffled(x, z):
    i = cuda.grid(1)
    v = fetch(x, i) if i < x.size else float32(0)  # load
    there = cuda.shfl_xor_sync(ALL, v, 1)
    back = cuda.shfl_xor_sync(ALL, there, 1)
    up = cuda.shfl_up_sync(ALL, cuda.laneid, 1)
    down = cuda.shfl_down_sync(ALL, cuda.laneid, 2)
    first = cuda.shfl_sync(ALL, cuda.laneid, 7)
    lane = cuda.laneid
    good = first == 7 and (up == lane - 1 or lane == 0) and (down == lane + 2 or lane > 29)
    if i < x.size and good:
        z[i] = v + back


@cuda.jit
def voted(x, z):
    i = cuda.grid(1)
    even = cuda.ballot_sync(ALL, i % 2 == 0)
    some, every = cuda.any_sync(ALL, i % 32 == 3), cuda.all_sync(ALL, i % 32 == 3)
    alike, apart = cuda.eq_sync(ALL, i < 0), cuda.eq_sync(ALL, i % 32 == 3)
    same = cuda.match_any_sync(ALL, i % 2)
    mask, all_same = cuda.match_all_sync(ALL, 3)
    good = even == 0x55555555 and some and not every and alike and not apart
    good = good and cuda.popc(same) == 16 and all_same and cuda.popc(mask) == 32
    good = good and cuda.popc(cuda.activemask()) == 32
    if i < x.size and good and cuda.lanemask_lt() == (1 << cuda.laneid) - 1:
        z[i] = x[i] + x[i]


@cuda.jit
def counted(x, z):
    i = cuda.grid(1)
    if cuda.threadIdx.x < 32:
        cuda.syncwarp()
    n = cuda.syncthreads_count(1 if i % 2 else 0)
    every = cuda.syncthreads_and(1)
    some = cuda.syncthreads_or(1 if cuda.threadIdx.x == 5 else 0)
    if i < x.size and n == 32 and every and some:
        z[i] = x[i] + x[i]


@cuda.jit
def bits(x, z):
    i = cuda.grid(1)
    good = cuda.brev(cuda.brev(uint32(i))) == i and cuda.clz(int32(i + 1)) <= 31
    if i < x.size and good and cuda.ffs(int32(12)) == 3 and cuda.popc(int32(7)) == 3:
        z[i] = x[i] + x[i]


@cuda.jit
def atomics(x, z):
    i = cuda.grid(1)
    s = cuda.shared.array(6, uint32)
    if cuda.threadIdx.x < 6:
        s[cuda.threadIdx.x] = 0
    cuda.syncthreads()
    cuda.atomic.add(s, 0, 1)
    cuda.atomic.max(s, 1, uint32(cuda.threadIdx.x))
    cuda.atomic.or_(s, 2, 4)
    cuda.atomic.cas(s, 3, 0, 7)
    cuda.atomic.inc(s, 4, 1000)
    cuda.atomic.dec(s, 5, 1000)
    cuda.syncthreads()
    good = s[0] == 64 and s[1] == 63 and s[2] == 4 and s[3] == 7 and s[4] == 64 and s[5] == 938 - 1
    if i < x.size and good:
        z[i] = x[i] + x[i]


@cuda.jit
def functions(x, z):
    i = cuda.grid(1)
    if i < x.size:
        v = abs(x[i])
        near = math.sqrt(v) * math.sqrt(v) - v
        one = math.sin(v) ** 2 + math.cos(v) ** 2
        z[i] = x[i] + x[i] * float32(round(one)) + float32(round(near))


@cuda.jit
def printed(x, z):
    i = cuda.grid(1)
    if i < x.size:
        z[i] = x[i] + x[i]
        print(i)
"""


@pytest.mark.deep
def test_numba_runs_warp_functions_without_a_gpu(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    try:
        library("libnvvm")
    except MissingToolError:
        pytest.skip("NVVM is not installed")
    file = tmp_path / "variants.py"
    file.write_text(NUMBA)
    found = {one.name: one for one in compare(file, time=False).variants}
    assert not {"fetch", "unused"} & {*found}
    idle = {
        name: [f.message for f in one.faults if "idle" in f.kind] for name, one in found.items()
    }
    assert idle.pop("half_of_them") == ["32 of the 64 threads of the first block access no memory"]
    assert not any(idle.values())
    said = found.pop("printed").checked
    assert said.ok is None
    assert "a call of a function that is not inlined; the kernel calls vprintf" in said.message
    for name, one in found.items():
        assert one.checked.ok, (name, str(one.checked), one.notes)
    loads = {one.line for one in found["shuffled"].accesses if not one.stores}
    assert loads == {1 + NUMBA[: NUMBA.index("# load")].count("\n")}
