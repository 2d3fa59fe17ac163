"""The command `lowbit explain call`."""

from __future__ import annotations

from typing import Annotated

import typer

from lowbit.cli.application import JsonFile, command, console, output
from lowbit_lab.cli.explain import explain


@command("call", example="explain call 'torch:linear 1024x2048'", within=explain)
def call(
    subject: Annotated[
        str,
        typer.Argument(
            help="torch:linear 1024x2048, torch:quantized_linear 1024x2048 engine=fbgemm, any "
            "function of torch: or numpy: with shapes, onnxruntime:FILE, openvino:FILE, or FILE.py "
            "with a function run().",
            show_default=False,
            metavar="SUBJECT|FILE.py",
        ),
    ],
    threads: Annotated[int, typer.Option(help="Threads for the subject.")] = 1,
    whole: Annotated[
        bool, typer.Option("--whole", help="Show every operator, frame and instruction.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """What really runs when a library computes something: its operators, the calls from Python to
    the kernel, the hot loop in machine code, and what that loop allows.

    Exit code: 1 if the subject ended its process or raised, 2 if there is no such subject.
    """
    from lowbit.registry.extras import require

    require("lowbit explain call", "lab", "iced_x86", "msgspec")
    from lowbit_lab.trace.run import trace
    from lowbit_lab.trace.text import render

    with output(json_file) as show:
        with console(stderr=True).status("tracing") as status:
            try:
                found = trace(
                    subject,
                    threads,
                    on_progress=lambda phase: status.update(f"the subject is {_now(phase)}"),
                )
            except FileNotFoundError as error:  # bad input, as any unknown subject
                raise ValueError(f"{error.filename}: {error.strerror}") from error
        show(render(found, whole), found.to_json())


def _now(phase: str) -> str:
    return phase.replace("was ", "being ").replace("ran for the first time", "called first")
