"""The command `lowbit explain kernel`."""

from __future__ import annotations

from typing import Annotated

import typer

from lowbit.cli.application import JsonFile, command, opened, output
from lowbit_lab.cli.explain import explain


@command("kernel", example="explain kernel mine.py --html mine.html", within=explain, code=2)
def kernel(
    name: Annotated[
        str,
        typer.Argument(
            help="A kernel of a file of yours as FILE.py or FILE.py:NAME (Triton, Numba, "
            "Numba-CUDA, CUDA C or lowbit), lowbit's product on a CPU as product:ISA, or a "
            "teaching kernel by the name of its operation.",
            metavar="FILE.py[:NAME]|KERNEL",
            show_default=False,
        ),
    ],
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="MxK:KxN|NAME=SIZE,...",
            help="Of a product MxK:KxN, of other kernels M=512,N=512.",
            show_default="256x1024:1024x1024, or the file's",
        ),
    ] = None,
    sm: Annotated[int, typer.Option(help="Compute capability of a kernel for a GPU.")] = 90,
    time: Annotated[bool, typer.Option(help="Time the four parts of a product.")] = True,
    html_file: Annotated[
        str | None,
        typer.Option("--html", metavar="FILE", help="Write the texts side by side as a page."),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Show a kernel's text beside all that becomes of it, line by line, and what it uses.

    Source, LLVM IR and assembly, or TTIR, TTGIR, PTX and machine code; registers and tiles; the
    four parts of a product with their times; llvm-mca's verdict. A file is one as `lowbit check`
    and `lowbit compare` take it.
    """
    from lowbit_lab.anatomy import page
    from lowbit_lab.anatomy.named import anatomy_of
    from lowbit_lab.cli.view import sizes_of

    with opened(html_file) as stream, output(json_file) as show:
        sizes = sizes_of([shape]) if shape and "=" in shape else {}
        found = anatomy_of(name, None if sizes else shape, sm, sizes=sizes, time=time)
        if stream is not None:
            stream.write(page.page(found))
        show(page.text(found), found.to_json())
    if html_file not in (None, "-") and json_file != "-":
        print(f"written to {html_file}")
