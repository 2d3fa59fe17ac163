"""What users write into a file of variants, and what they are told of it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("jaxtyping")

from lowbit.registry.conflicts import conflict
from lowbit_lab import check_file
from lowbit_lab.backends.source import read, request_of_file
from lowbit_lab.compare.problem import Baseline, Problem, bare_lines
from lowbit_lab.compare.run import Result, compare
from lowbit_lab.compare.text import render

HEAD = """
import numpy as np
from jaxtyping import Float32


def spec(x: Float32[np.ndarray, "N K"]) -> Float32[np.ndarray, "N K"]:
    return x + x


{sizes}
"""

NUMBA = (
    HEAD
    + """
from numba import njit


@njit
def twice(x, z):
    for i in range(x.shape[0]):
        for k in range(x.shape[1]):
            z[i, k] = x[i, k] + x[i, k]
"""
)


ONE_FORMAT = """
import {language}
from lowbit.spec.exercises import add_constant_blocks as spec

sizes = {{"N0": 64}}
small = {{"N0": 40}}
{launch}


{kernel}
"""

TRITON_OF_BOTH = """
import triton.language as tl

@triton.jit
def plus_ten(x):
    return x + 10

@triton.jit
def add(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    tl.store(z_ptr + i, plus_ten(tl.load(x_ptr + i, mask=i < N0)), mask=i < {bound})
"""

NUMBA_OF_BOTH = """
from numba import cuda

@cuda.jit(device=True)
def plus_ten(x):
    return x + 10

@cuda.jit
def add(x, z, N0):
    i = cuda.grid(1)
    if i < {bound}:
        z[i] = plus_ten(x[i])

def grid(size):
    return -(-size["N0"] // 16)
"""


@pytest.mark.deep
@pytest.mark.parametrize(
    ("language", "launch", "kernel"),
    [
        ("triton", "constants = {'B0': 32, 'num_warps': 1}", TRITON_OF_BOTH),
        ("numba", "block = 16", NUMBA_OF_BOTH),
    ],
)
@pytest.mark.parametrize(("bound", "right"), [("N0", True), ("N0 - 1", False)])
def test_one_file_is_checked_and_compared(
    language: str, launch: str, kernel: str, bound: str, right: bool, tmp_path: Path
) -> None:
    """What a kernel calls is no kernel; Triton needs no grid; one block and constants for both."""
    pytest.importorskip(language)
    file = tmp_path / "mine.py"
    written = kernel.format(bound=bound)
    file.write_text(ONE_FORMAT.format(language=language, launch=launch, kernel=written))
    assert check_file(file, device="cpu").ok is right
    (one,) = compare(file, time=False).variants
    assert one.name == "add"
    if one.checked.how != "its PTX, interpreted" or one.built.ptx is not None:
        assert one.checked.ok is right, str(one.checked)


def text_of(found: Result) -> str:
    from rich.console import Console

    console = Console(width=200, soft_wrap=True)
    with console.capture() as capture:
        console.print(render(found))
    return capture.get()


@pytest.mark.parametrize(
    ("sizes", "few", "large"),
    [
        ("sizes = {'N': 9, 'K': 11}", (9, 11), (9, 11)),
        ("small = {'N': 3, 'K': 4}", (3, 4), (3, 4)),
        ("sizes = {'N': 9, 'K': 11}; small = {'N': 3, 'K': 4}", (3, 4), (9, 11)),
        ("sizes = {'N': 9, 'K': 11}; small = {'K': 4}", (9, 4), (9, 11)),
        ("sizes = {'N': 9}; small = {'N': 2, 'K': 4}", (2, 4), (9, 4)),
        ("sizes = {'N': np.int64(9), 'K': 11}", (9, 11), (9, 11)),
    ],
)
def test_sizes_of_a_plain_function(
    tmp_path: Path, sizes: str, few: tuple[int, int], large: tuple[int, int]
) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "variants.py"
    file.write_text(NUMBA.format(sizes=sizes))
    found = read(file)
    assert tuple(found.small.sizes.values()) == few
    assert tuple(found.large.sizes.values()) == large
    assert tuple(read(file, {"N": 20}).large.sizes.values()) == (20, large[1])
    (twice,) = compare(file, time=False).variants
    assert twice.checked.ok


@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ("", ValueError, "gives no size N, K; write sizes = "),
        ("sizes = {'N': 9}", ValueError, "gives no size K; write sizes = "),
        ("sizes = {'N': 9, 'K': 1, 'M': 2}", ValueError, "spec has the sizes N, K; got N, K, M"),
        ("sizes = 9", TypeError, "sizes is 9; it must be a dict"),
        ("small = {'N': 'x'}", TypeError, "small is {'N': 'x'}; it must be a dict"),
        ("spec = 3", TypeError, "spec is 3; it must be an Operation, or a function"),
    ],
)
def test_sizes_that_will_not_do(
    tmp_path: Path, sizes: str, error: type[Exception], words: str
) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "variants.py"
    file.write_text(NUMBA.format(sizes=sizes))
    with pytest.raises(error) as caught:
        read(file)
    assert words in str(caught.value)


def test_an_exercise_is_where_a_variant_is_checked(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "variants.py"
    head = NUMBA.replace("def spec(", "@operation(exercise={{'N': 5, 'K': 6}})\ndef spec(")
    head = head.replace(
        "import numpy as np\n", "import numpy as np\nfrom lowbit.spec import operation\n"
    )
    file.write_text(head.format(sizes="sizes = {'N': 9}"))
    found = read(file)
    assert found.small.sizes == {"N": 5, "K": 6}
    assert found.large.sizes == {"N": 9, "K": 6}


@pytest.mark.parametrize("name", ["float64", "tl", "range", "load", "x", "mask", "kernel", "def_"])
def test_a_name_is_replaced_where_it_is_defined(name: str) -> None:
    rows = [
        "@jit",
        f"def  {name}(x, z, mask='{name}'):",
        f"    # {name}",
        f"    t = tl.zeros((B,), tl.{name}) + range({name}) + {name}.load(x)",
    ]
    assert bare_lines(rows) == [
        rows[0],
        rows[1].replace(f"def  {name}", "def  kernel", 1),
        *rows[2:],
    ]
    told = [*rows[:2], '    """What it does.', "", '    def is no definition."""', *rows[2:]]
    assert bare_lines(told) == bare_lines(rows)
    indented = ["    " + row for row in rows]
    assert bare_lines(indented)[1].startswith("def  kernel(x")
    c = [
        f"// __global__ void {name}(int)",
        f"__global__ void __launch_bounds__(128) {name}(const float* {name}_in) {{",
        f"    {name}_in[0] = {name}(1);",
        "}",
    ]
    assert bare_lines(c) == [c[0], c[1].replace(f" {name}(", " kernel(", 1), *c[2:]]


@pytest.mark.deep
def test_a_change_quotes_the_text(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "variants.py"
    again = "\n\n@njit\ndef float64(x, z):\n    z[:] = np.float64(2) * x\n"
    file.write_text(NUMBA.format(sizes="sizes = {'N': 9, 'K': 11}") + again)
    (changed,) = compare(file, time=False).changes
    assert "+     z[:] = np.float64(2) * x" in changed.text
    assert not any("def" in row for row in changed.text)


def test_a_declared_signature_is_what_is_compiled(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "variants.py"
    text = NUMBA.format(sizes="sizes = {'N': 9, 'K': 11}")
    file.write_text(text.replace("@njit", '@njit("void(float32[:, :], float32[:, :])")'))
    (twice,) = compare(file, time=False).variants
    assert twice.checked.ok
    assert [one.type for one in twice.types][:2] == ["array(float32, 2d, A)"] * 2


def test_an_error_has_its_line_in_a_file_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text("size = 0\n1 / size\n")
    with pytest.raises(ValueError, match=r"^broken\.py, line 2: ZeroDivisionError"):
        read(Path("broken.py"))
    with pytest.raises(ValueError, match=r"^broken\.py, line 2: ZeroDivisionError"):
        request_of_file(Path("broken.py"))


TRITON = (
    HEAD.format(sizes="sizes = {'N': 64, 'K': 64}; constants = {'B': 64}")
    + """
import triton
import triton.language as tl


def grid(size):
    return size["N"]


@triton.jit
def fetch(p):
    # from memory
    return tl.load(p, nothing=3)


@triton.jit
def undefined(x, z, N, K, B: tl.constexpr):
    # comment

    tl.store(z, missing)


@triton.jit
def called(x, z, N, K, B: tl.constexpr):
    tl.store(z, fetch(x))


@triton.jit
def of_the_library(x, z, N, K, B: tl.constexpr):
    a = tl.load(x + tl.arange(0, B))
    tl.store(z, tl.sum(a, axis=3))


@triton.jit
def asserted(x, z, N, K, B: tl.constexpr):
    tl.static_assert(B == 3, "B is not 3")
    tl.store(z, 1)


@triton.jit
def right(x, z, N, K, B: tl.constexpr):
    at = tl.program_id(0) * K + tl.arange(0, B)
    for start in range(0, K, B):
        inside = (start + tl.arange(0, B)) < K
        tl.store(z + at + start, 2 * tl.load(x + at + start, mask=inside), mask=inside)
"""
)


def _line(text: str, part: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if part in line)


@pytest.mark.deep
def test_errors_of_triton_are_whole_and_have_the_line_of_the_file(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "variants.py"
    file.write_text(TRITON)
    found = {one.name: one for one in compare(file, time=False).variants}
    for name, part, words in (
        ("undefined", "tl.store(z, missing)", "missing is not defined"),
        ("called", "return tl.load(p, nothing=3)", "unexpected keyword argument 'nothing'"),
        ("of_the_library", "tl.sum(a, axis=3)", "invalid axis 3"),
        ("asserted", "static_assert", "B is not 3"),
    ):
        (note,) = found[name].notes
        first, *rest = note.splitlines()
        assert first.startswith(f"{file}, line {_line(TRITON, part)}: ")
        assert part in first
        assert words in "\n".join(rest)
        assert str(found[name].checked) == "not judged: it was not compiled (nothing was compared)"
    assert found["right"].checked.ok
    # A function that others call is no variant.
    assert "fetch" not in found


BROKEN = (
    NUMBA.format(sizes="sizes = {'N': 4, 'K': 4}")
    + """

@njit
def undefined(x, z):
    # missing
    z[0, 0] = x[0, 0] + missing


@njit
def no_attribute(x, z):
    z[:] = x.nothing


@njit
def raises(x, z):
    raise ValueError("on purpose")


@njit
def wrong(x, z):
    z[:] = x
"""
)


@pytest.mark.deep
def test_errors_of_numba_are_whole_and_plain(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "variants.py"
    file.write_text(BROKEN)
    result = compare(file, time=False)
    found = {one.name: one for one in result.variants}
    (note,) = found["undefined"].notes
    assert f"line {_line(BROKEN, '+ missing')}: z[0, 0] = x[0, 0] + missing" in note
    assert "name 'missing' is not defined" in note
    (note,) = found["no_attribute"].notes
    assert note.startswith("Unknown attribute 'nothing' of type array")
    assert f"line {_line(BROKEN, 'x.nothing')}" in note
    assert note.count("z[:] = x.nothing") == 1
    assert not result.ok
    text = text_of(result)
    assert "\x1b" not in text
    assert "against nothing" not in text
    checks = [row.strip() for row in text.splitlines() if row.strip().startswith("check:")]
    assert len(checks) == 5
    assert checks[3].startswith("check: WRONG, by a call: it raises an error: ")
    assert checks[3].endswith("ValueError: on purpose (nothing was compared)")
    assert checks[4].startswith("check: WRONG against the specification spec, by a call: ")


@pytest.mark.parametrize(
    ("result", "ok", "words"),
    [
        (
            np.array([1, 2], np.float32),
            True,
            "right against the first result, of wide, by a call: the same",
        ),
        (
            np.array([1, 3], np.float32),
            None,
            "not judged against the first result, of wide, by a call: ",
        ),
        (np.array([1.0, 2]), False, "WRONG against the first result, of wide, by a call: float64"),
        (
            np.array([1, np.inf], np.float32),
            False,
            "WRONG against the first result, of wide, by a call",
        ),
    ],
)
def test_a_verdict_names_what_was_compared(result: np.ndarray, ok: bool | None, words: str) -> None:
    problem = Problem({"N": 2}, None, lambda sizes: {"z": np.zeros(2, np.float32)}, "z")
    judged = problem.judge(result, Baseline("wide", np.array([1, 2], np.float32)), "a call")
    assert judged.ok is ok
    assert str(judged).startswith(words)
    alone = str(problem.judge(result, None, "a call"))
    assert alone.startswith("not judged, by a call: the first")
    assert alone.endswith("(nothing was compared)")


@pytest.mark.deep
def test_threads_without_elements_are_named(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "variants.py"
    head, tail = TRITON.index("@triton.jit"), TRITON.index("@triton.jit\ndef right")
    lines = (
        TRITON[:head]
        + TRITON[tail:]
        + (
            "\nfrom lowbit_lab.compare import variant\n"
            "variants = {f'{w} warps': variant(right, num_warps=w) for w in (1, 2, 4, 32)}\n"
        )
    )
    file.write_text(lines)
    found = compare(file, time=False).variants
    idle = {one.name: [f.message for f in one.faults if f.kind == "idle-threads"] for one in found}
    assert idle["1 warps"] == idle["2 warps"] == []
    assert "4 warps, 128 threads, for tensors of 64 elements" in idle["4 warps"][0]
    assert "960 threads repeat" in idle["32 warps"][0]
    assert "num_warps=2 is enough" in idle["32 warps"][0]


@pytest.mark.deep
def test_packages_that_do_not_fit_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As numba-cuda 0.30 is with NumPy 2.5, which has no row_stack."""
    package, facts = tmp_path / "oldcuda", tmp_path / "old_cuda-0.30.4.dist-info"
    package.mkdir()
    facts.mkdir()
    (package / "__init__.py").write_text("import numpy\ndef build(): numpy.no_such_name\n")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: old-cuda\nVersion: 0.30.4\n")
    (facts / "top_level.txt").write_text("oldcuda\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "oldcuda", raising=False)
    file = tmp_path / "variants.py"
    file.write_text("import oldcuda\noldcuda.build()\n")
    before = ".".join(np.__version__.split(".")[:2])
    with pytest.raises(ValueError, match="old-cuda") as caught:
        read(file)
    assert str(caught.value) == (
        f"{file}, line 2: old-cuda 0.30.4 uses numpy.no_such_name, which numpy {np.__version__} "
        f"does not have; it works with older versions: pip install 'numpy<{before}'"
    )
    # Of a name that is there, or of a package that is not installed, nothing is claimed.
    assert conflict(AttributeError("module 'numpy' has no attribute 'ndarray'")) is None
    assert conflict(AttributeError("module 'nowhere' has no attribute 'x'")) is None
    assert conflict(ValueError("no")) is None
