"""Checking kernels against the specifications of their operations: one that is given, that of a
file, and those that lowbit has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from lowbit.spec import Operation
from lowbit_lab.backends.backend import GridLike, Request, Variant
from lowbit_lab.backends.source import (
    FUNCTION,
    OPERATOR,
    blamed,
    in_simulator,
    needs_simulator,
    request_named,
    request_of_file,
)
from lowbit_lab.bench.core.remote import send_progress
from lowbit_lab.checks.cases import check_request
from lowbit_lab.checks.result import CheckResult, OnProgress
from lowbit_lab.views.run import View


def check(
    kernel: Any,
    spec: Operation | Callable[..., Any],
    *,
    grid: GridLike | None = None,
    output: str | None = None,
    initial: float | None = None,
    device: str | None = None,
    seed: int = 0,
    stop: bool = False,
    on_progress: OnProgress | None = None,
    **given: Any,
) -> CheckResult:
    """Whether a kernel does what a specification says, for many sizes and kinds of data.

    kernel: a function under triton.jit, a lowbit kernel, or one under numba.cuda.jit where the
    simulator is on (NUMBA_ENABLE_CUDASIM=1); or a function of torch tensors, named as the inputs of
    the specification, that launches Triton kernels and returns the result: of it `grid`, `output`
    and `initial` are left out, and `given` are its other arguments. spec: an Operation, or a
    function whose annotations carry shapes and dtypes in jaxtyping's form and whose body is the
    reference. grid: the number of programs on up to three axes, or a function that makes it from a
    dict of all sizes and block sizes; one that is no function is run at the exercise's sizes only;
    None: what the names of a Triton kernel's parameters say (B0 along N0), else one program.
    output: the input that the kernel replaces by the result. initial: what the caller fills the
    result with. device: "cpu" for the interpreter alone, "cuda" to run on the GPU too; by default
    where there is one. stop: end after the first case in which an error is found. on_progress:
    called after each case. given: values of other parameters, block sizes for example, or functions
    of the sizes.

    ValueError or TypeError if the arguments do not fit together; RuntimeError if what runs the
    kernel is of a version that is not known, or there is no GPU for device "cuda".
    """
    request = Request(Variant(kernel, grid=grid, constants=given), spec, output, initial, seed)
    return check_request(request, device, stop=stop, on_progress=on_progress)


def check_file(
    path: Path,
    device: str | None = None,
    *,
    stop: bool = False,
    on_progress: OnProgress | None = None,
) -> CheckResult:
    """Check the kernel of a file; a Numba kernel in a process where the simulator is on.

    FileNotFoundError if there is no such file; ValueError if it does not define what is needed;
    otherwise as `check`, and whatever the file itself raises.
    """
    if needs_simulator(path):
        action = partial(check_file, device=device, stop=stop, on_progress=send_progress)
        result = in_simulator(action, path, on_progress)
        return replace(result, viewer=partial(view_failing, path))
    request = request_of_file(path)
    with blamed(path):
        return check_request(request, device, stop=stop, on_progress=on_progress)


def view_failing(path: Path) -> View:
    """The view of the first case of a file in which a check finds something, made as small as it
    still does; of the exercise if nothing is found. Raises as `check_file`."""
    if needs_simulator(path):
        return in_simulator(view_failing, path)
    viewer = check_file(path, "cpu", stop=True).viewer
    if viewer is None:
        raise TypeError(f"{path} is of a function that launches kernels; view one of these")
    with blamed(path):
        return viewer()


def check_what(what: str, device: str | None = None, **how: Any) -> Iterator[CheckResult]:
    """Check a file, a kernel of lowbit, an operator `gpu:NAME`, a function `cpu:NAME`, or all of a
    kind: `all` (teaching kernels), `gpu`, `cpu`. One result after the other, as they come; `how` as
    `check` takes it. ValueError, with the names that there are, for another name.
    """
    kind, colon, name = what.partition(":")
    if f"{kind}:" == OPERATOR:
        from lowbit_lab.checks.operators import check_gpu

        yield from check_gpu(name if colon else None, device, **how)
    elif f"{kind}:" == FUNCTION:
        from lowbit_lab.checks.cpu import check_cpu

        yield from check_cpu(name if colon else None, **how)
    elif what.endswith(".py"):
        yield check_file(Path(what), device, **how)
    else:
        from lowbit.spec.exercises import exercises

        for one in exercises.names() if what == "all" else (what,):
            yield check_request(request_named(one), device, **how)
