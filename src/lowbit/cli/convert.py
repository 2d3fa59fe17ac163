"""The command `lowbit convert`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lowbit.cli.app import JsonFile, command, output
from lowbit.cli.generate import Model


@command("convert", example="convert model.gguf model-lowbit")
def convert(
    model: Model,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="A folder to write, new or empty.", show_default=False),
    ],
    json_file: JsonFile = None,
) -> None:
    """Write a language model as lowbit's own folder, in the integers and scales that it has.

    What others quantized stays as it is: nothing is rounded again. `lowbit generate` takes the
    folder, and so does transformers where the model came from a folder of its.
    """
    from lowbit.lm.convert import convert

    with output(json_file) as show:
        written = convert(model, out)
        text = (
            f"{written.bytes_before:,} bytes of weights became {written.bytes_after:,}; "
            f"{written.quantized:,} of them quantized"
        )
        notes = (f"{count:,}: {reason}" for reason, count in written.notes.items())
        show("\n".join((text, *notes)), json.dumps(asdict(written), indent=1))
    print(f"written to {out}", file=sys.stderr)
