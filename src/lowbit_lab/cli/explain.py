"""The commands `lowbit explain`: of products and layers here, others in files of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from lowbit.cli.application import HtmlFile, JsonFile, Threads, command, group, output

if TYPE_CHECKING:
    from lowbit.report.page import Figure
    from lowbit_lab.explain.product import Explanation


class _ByName(TyperGroup):
    """Where no command is named first, what is to be explained says which one is meant."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = args[0].startswith("-") or args[0] in self.list_commands(ctx)
        return super().resolve_command(ctx, args if known else [kind_of(args[0]), *args])


explain = group(
    "explain",
    "Take apart what is named, and say how fast it should be: a product, a layer, a kernel, a call "
    "of a library, a network.",
    example="explain resnet34",
    cls=_ByName,
)


def kind_of(named: str) -> str:
    """The command for a shape, a kernel's file or name, a library's call, or else a network."""
    from lowbit_lab.backends.source import PRODUCT
    from lowbit_lab.cli import exercises
    from lowbit_lab.trace.subject import RUN, engines

    if file := re.match(r"(.*\.py)(:|$)", named):
        path = Path(file[1])
        text = path.read_text("utf-8") if path.is_file() else ""
        return "call" if re.search(rf"^def {RUN}\(", text, re.MULTILINE) else "kernel"
    if re.fullmatch(r"\d+x\d+:\d+x\d+", named):
        return "matmul"
    if ":" in named and named.split(":")[0] in engines.names():
        return "call"
    return "kernel" if named.startswith(PRODUCT) or named in exercises() else "network"


@command(
    "matmul", example="explain matmul 256x512:512x256 --dtype u8:s8:f32 --threads 1", within=explain
)
def matmul(
    shape: Annotated[str, typer.Argument(help="A shape MxK:KxN.", show_default=False)],
    dtype: Annotated[
        str, typer.Option(help="Left, right and output: u8:s8:s32, u8:s8:f32, f32:s8:f32, ...")
    ] = "u8:s8:f32",
    threads: Threads = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Which kernel serves a product, how it is cut and packed, what was rejected and why, and the
    time predicted from the measured limits of this machine beside the measured one."""
    from lowbit_lab.explain.product import explain_gemm, render

    with output(json_file, html_file) as show:
        found = explain_gemm(shape, dtype, threads)
        title = f"{found.operation} {found.dtypes} {found.shape}"
        show(render(found), found.to_json(), title, lambda: _figures(found))


@command(
    "linear", example="explain linear 64x4096:4096x14336 --device 'NVIDIA H200'", within=explain
)
def linear(
    shape: Annotated[str, typer.Argument(help="A shape MxK:KxN.", show_default=False)],
    device: Annotated[
        str, typer.Option(help="cuda; or a GPU that lowbit has a table of: 'NVIDIA H200'.")
    ] = "cuda",
    format: Annotated[
        str, typer.Option(help="w4a16, w4a8, 'w4a8 fp8', w8a16, int8, fp8 or 'fp8 blocks'.")
    ] = "w4a16",
    json_file: JsonFile = None,
) -> None:
    """Which kernel serves a quantized layer on a GPU, how it is cut, why, and which others do not;
    the time that the measured limits of the GPU allow, and where it is here, the measured one."""
    from lowbit.registry.extras import require

    require("lowbit explain linear", "gpu", "torch", "triton")
    from lowbit_lab.explain.layer import explain_linear, render

    with output(json_file) as show:
        found = explain_linear(shape, format, device)
        show(render(found), found.to_json())


def _figures(found: Explanation) -> Iterator[Figure]:
    from lowbit.report.page import Figure
    from lowbit_lab.bench.core.charts import roofline

    guess, limits = found.prediction, found.ceiling
    point = {
        "name": "measured",
        "intensity": guess.operations / guess.moved_bytes,
        "gops": guess.operations / found.measured.median / 1e9,
    }
    drawn = roofline([point], {f"{limits.dtype} peak": limits.gops}, limits.read_gbs)
    yield Figure(drawn, "Roofline: limits measured in the same call; operations with padding.")
