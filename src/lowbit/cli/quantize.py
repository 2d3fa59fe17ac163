"""The command `lowbit quantize`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from lowbit.cli.app import JsonFile, Threads, command, offered, output


def _models() -> Iterable[str]:
    from lowbit.bench.models.model import models

    return models.names()


Data = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.npy|FILE.npz|random",
        help="To calibrate with: samples of the input, of all inputs in their order, or noise.",
        show_default="the model's own, where it has any",
    ),
]
Rounding = Annotated[
    str, typer.Option(help="Of weights: nearest, or gptq, which makes up for each error behind it.")
]
WeightRange = Annotated[
    str, typer.Option(help="Of weights: minmax, or mse, of least squared error.")
]
Equalize = Annotated[
    bool, typer.Option("--equalize", help="Neighbouring layers get equal ranges of each channel.")
]
Smooth = Annotated[
    float | None,
    typer.Option(
        help="SmoothQuant's alpha, 0 to 1: outliers move from layer norms into weights.",
        show_default="none move",
    ),
]
CorrectBias = Annotated[
    bool, typer.Option("--correct-bias", help="Biases make up for the mean error of weights.")
]

Batches = Annotated[
    int, typer.Option(min=1, help="Of 8 samples of the model's own, to calibrate with.")
]


@command("quantize", example="quantize resnet34 --config static --data random --out resnet34-int8")
def quantize(
    model: Annotated[
        str,
        typer.Argument(
            help="A network by name (`lowbit bench networks` knows them), module:function that "
            "returns a PyTorch model or a pair (model, example), or FILE.onnx.",
            show_default=False,
            autocompletion=offered(_models),
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where to write it.", show_default=False)
    ],
    config: Annotated[
        str,
        typer.Option(
            help="static: all formats known beforehand; dynamic: rows of linear layers' inputs "
            "are quantized when they come; int4: linear layers with 4-bit weights in groups of 128."
        ),
    ] = "static",
    data: Data = None,
    weights: Annotated[
        str | None, typer.Option(metavar="FILE", help="A checkpoint of the named network.")
    ] = None,
    observer: Annotated[
        str, typer.Option(help="minmax, moving_average, percentile, entropy or mse.")
    ] = "minmax",
    rounding: Rounding = "nearest",
    weight_range: WeightRange = "minmax",
    equalize: Equalize = False,
    smooth: Smooth = None,
    correct_bias: CorrectBias = False,
    batches: Batches = 4,
    samples: Annotated[
        int, typer.Option(min=0, help="How many samples to measure accuracy on.")
    ] = 500,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Quantize a network, and report what became of it.

    Writes DIR/network.safetensors, which `lowbit run` and lowbit.graph.load take and which needs no
    PyTorch, and DIR/report.json, which `lowbit report` shows.
    """
    from lowbit.bench.networks.quantize import Method
    from lowbit.lab.networks import report, source

    range_: Any = weight_range  # which Method checks
    method = Method(
        config=config, observer=observer, rounding=rounding, weight_range=range_,
        equalize=equalize, smooth=smooth, correct_bias=correct_bias,
    )  # fmt: skip
    found = source.find(model, data, weights, batches)
    made = report.quantize(found, method, out, threads=threads, samples=samples)
    with output(json_file) as show:
        show(report.text(made), json.dumps(made, indent=1, allow_nan=False))
    print(f"written to {out}", file=sys.stderr)
