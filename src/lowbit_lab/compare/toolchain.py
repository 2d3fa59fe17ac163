"""The compilers for GPUs that are installed: each found where it lies, or said to be missing."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lowbit.registry.extras import installed
from lowbit_lab.compare import sass
from lowbit_lab.compare.code import Code
from lowbit_lab.compare.ptx.parse import settled

_USED = re.compile(r"Used (\d+) registers")
_SPILLED = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SHARED = re.compile(r"(\d+) bytes smem")
_VERSION = re.compile(r"release (\d+)\.(\d+)")


class MissingToolError(RuntimeError):
    """Something that is not installed, and what would bring it: one line."""


@dataclass(frozen=True)
class Machine:
    """Machine code of one kernel. registers, stack, spill_stores, spill_loads: of a thread, in
    registers and bytes; shared: bytes of a block. sass: None where nvdisasm is missing."""

    cubin: bytes
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int
    assembler: str
    sass: Code | None
    missing: str | None = None


def _folders(*below: str) -> Iterator[Path]:
    """Where CUDA's parts lie: a toolkit, packages of Python, Triton."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    homes += sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True)
    for entry in sys.path:
        homes += [str(one) for one in sorted(Path(entry or ".").glob("nvidia/*"), reverse=True)]
        homes.append(str(Path(entry or ".", "triton", "backends", "nvidia")))
    for home in homes:
        for part in below:
            if home and (found := Path(home, part)).is_dir():
                yield found


@cache
def _tools(name: str) -> tuple[Path, ...]:
    on_path = shutil.which(name)
    found = [Path(on_path)] if on_path else []
    found += [folder / name for folder in _folders("bin") if (folder / name).is_file()]
    return tuple(dict.fromkeys(found))


@cache
def _release(tool: Path) -> tuple[int, int]:
    done = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)
    found = _VERSION.search(done.stdout)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _newest(*names: str) -> Path | None:
    return max((tool for name in names for tool in _tools(name)), key=_release, default=None)


def library(name: str) -> Path:
    """A shared library of CUDA's, the newest. MissingToolError if there is none."""
    places = ("lib64", "lib", "nvvm/lib64")
    found = [one for folder in _folders(*places) for one in sorted(folder.glob(f"{name}.so*"))]
    if not found:
        package = {"libnvrtc": "nvidia-cuda-nvrtc", "libnvvm": "nvidia-cuda-nvcc-cu12"}[name]
        raise MissingToolError(f"{name} is not installed; pip install {package}")
    return found[0]


def assemble(ptx: str, sm: int, file: str | None, most_registers: int | None = None) -> Machine:
    """Machine code for a compute capability (90 for 9.0), with lines of `file`.

    MissingToolError without ptxas, or if its version does not know this PTX; RuntimeError with
    what it says if it refuses.
    """
    tool = _newest("ptxas", "ptxas-blackwell")
    if tool is None:
        raise MissingToolError("ptxas is not installed; pip install nvidia-cuda-nvcc, or triton")
    architecture = (re.search(r"\.target\s+(sm_\d+a?)", ptx) or ["", f"sm_{sm}"])[1]
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(settled(ptx))
        command = [tool, "-v", "-lineinfo", f"-arch={architecture}", source, "-o", made]
        if most_registers is not None:
            command.append(f"-maxrregcount={most_registers}")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().replace(f"{folder}{os.sep}", "")
            raise RuntimeError(f"ptxas: {said}")
        said = done.stderr + done.stdout
        missing, listing = _disassembled(made, file)
        stack, stores, loads = _numbers(_SPILLED, said)
        return Machine(
            cubin=made.read_bytes(),
            registers=_numbers(_USED, said)[0],
            stack=stack,
            spill_stores=stores,
            spill_loads=loads,
            shared=_numbers(_SHARED, said)[0],
            assembler=f"ptxas {'.'.join(map(str, _release(tool)))}",
            sass=listing,
            missing=missing,
        )


def _numbers(pattern: re.Pattern[str], text: str) -> list[int]:
    """The groups of the first match, zeros without one."""
    found = pattern.search(text)
    return [int(one) for one in found.groups()] if found else [0] * pattern.groups


def _disassembled(cubin: Path, file: str | None) -> tuple[str | None, Code | None]:
    tool = _newest("nvdisasm")
    if tool is None:
        return "nvdisasm is not installed: no machine code is shown; pip install triton", None
    for flags in (["-gi", "-c"], ["-g", "-c"], ["-c"]):
        done = subprocess.run([tool, *flags, cubin], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return None, sass.parse(done.stdout, file)
    return f"nvdisasm does not read it: {done.stderr.strip().splitlines()[0]}", None


def compile_cuda_c(source: str, file: str, sm: int) -> tuple[str, str]:
    """The PTX of CUDA C, and what made it: NVRTC, else nvcc.

    MissingToolError if neither is installed; ValueError with all errors of a source that does not
    compile.
    """
    options = [f"--gpu-architecture=compute_{sm}", "--generate-line-info", "--std=c++17"]
    try:
        return _nvrtc(source, file, options)
    except MissingToolError as missing:
        tool = _newest("nvcc")
        if tool is None:
            raise missing from None
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "kernel.cu"), Path(folder, "kernel.ptx")
        given.write_text(source)
        command = [tool, "-ptx", "-lineinfo", "-std=c++17", f"-arch=sm_{sm}", given, "-o", made]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError((done.stderr + done.stdout).strip())
        return made.read_text(), f"nvcc {'.'.join(map(str, _release(tool)))}"


def _nvrtc(source: str, file: str, options: Sequence[str]) -> tuple[str, str]:
    nvrtc = ctypes.CDLL(str(library("libnvrtc")))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), file.encode(), 0, None, None)
    given = (ctypes.c_char_p * len(options))(*(one.encode() for one in options))
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
        if failed:
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise ValueError(log.value.decode().strip())
        nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetPTX(program, text)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return text.value.decode(), f"NVRTC {major.value}.{minor.value}"


def find_nvvm() -> None:
    """Lead Numba to NVVM where it lies in a package of Python. MissingToolError without it."""
    found = library("libnvvm")
    home = (
        found.parents[2]
        if found.parent.name == "lib64" and found.parents[1].name == "nvvm"
        else found.parents[1]
    )
    if not str(found).startswith("/usr/local/cuda") and installed("numba"):
        os.environ.setdefault("CUDA_HOME", str(home))
