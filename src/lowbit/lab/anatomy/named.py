"""The anatomy of a kernel of lowbit by its name, or of a file's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lowbit.lab.anatomy.result import Anatomy
from lowbit.lab.source import PRODUCT, request_named

_SHAPE = "256x1024:1024x1024"
_SIZE = 1024  # about what sizes are that a file does not give


def anatomy_of(
    name: str,
    shape: str | None = None,
    sm: int = 90,
    *,
    sizes: Mapping[str, int] | None = None,
    time: bool = True,
) -> Anatomy:
    """Take `product:ISA` apart at a shape `MxK:KxN`; or for a compute capability and at sizes by
    name a Triton kernel of lowbit, or of a file, as `FILE.py` or `FILE.py:kernel`, one of any kind.

    ValueError, with the names that there are, for another name; FileNotFoundError.
    """
    path, separator, kernel = name.partition(".py")
    if name.startswith(PRODUCT):
        from lowbit.lab.anatomy import cpu

        return cpu.anatomy(name.removeprefix(PRODUCT), shape or _SHAPE, time=time)
    if shape:
        raise ValueError(f"the shape {shape!r} is a product's; sizes of {name} are N0=100,T=64")
    if separator and kernel[:1] in ("", ":"):
        return _of_file(Path(path + separator), kernel[1:], sm, sizes or {})
    return _teaching(name, sm, sizes or {})


def _teaching(name: str, sm: int, sizes: Mapping[str, int]) -> Anatomy:
    from lowbit.lab.anatomy import gpu
    from lowbit.lab.compare.kinds.triton import TritonKind
    from lowbit.lab.compare.problem import Problem
    from lowbit.lab.compare.variant import Variant

    request = request_named(name)
    operation = request.operation
    problem = Problem(
        operation.complete({**operation.exercise, **sizes}), operation, None, request.output
    )
    variant = Variant(request.kernel, operation.name, request.grid, None, dict(request.given))
    file = Path(TritonKind.text(request.kernel)[2])
    return gpu.anatomy(variant, problem, sm, file, f"{operation.doc} {_listed(problem.sizes)}")


def _of_file(path: Path, kernel: str, sm: int, sizes: Mapping[str, int]) -> Anatomy:
    from lowbit.lab.anatomy import gpu, host
    from lowbit.lab.compare.file import read
    from lowbit.lab.compare.kind import build, kind_of
    from lowbit.lab.compare.kinds.cpu import NumbaCpu

    comparison = read(path, sizes, _SIZE)
    variants = {one.name: one for one in comparison.variants}
    first = next(iter(variants))
    if kernel in ("", "kernel") and kernel not in variants:
        kernel = comparison.kernel or (kernel if len(variants) > 1 else first)
    if kernel not in variants:
        wrong = f"no kernel {kernel!r}, but" if kernel else "several kernels:"
        raise ValueError(f"{path} defines {wrong} {', '.join(variants)}; write {path}:{first}")
    variant, problem = variants[kernel], comparison.large
    kind = kind_of(variant.kernel)
    about = f"{kind.title}, {_listed(problem.sizes)}"
    if kind.on_gpu:
        return gpu.anatomy(variant, problem, sm, path, about)
    build(variant, problem, sm, path)  # which says what is wrong with it
    of_kind = host.numba_anatomy if kind is NumbaCpu else host.lowbit_anatomy
    return of_kind(variant, problem, about)


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())
