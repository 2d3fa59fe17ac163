"""The command `lowbit quantize`."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli.application import JsonFile, Threads, command, offered, output

if TYPE_CHECKING:
    from lowbit.torch.config import QuantizeConfig
    from lowbit.weights.format import WeightFormat

KEPT = "kept"


def _models() -> Iterable[str]:
    from lowbit.models.model import models

    return models.names()


Data = Annotated[
    str | None,
    typer.Option(
        metavar="FILE.npy|FILE.npz|random",
        help="To calibrate with: samples of the one input, of all inputs by their names, or noise, "
        "which is for speed alone.",
        show_default="the own data of a network that is called by name; others need some",
    ),
]
Rounding = Annotated[
    str,
    typer.Option(
        help="Of weights: nearest; gptq, which makes up for each error behind it; of language "
        "models also awq; of a checkpoint nearest or hqq."
    ),
]
WeightRange = Annotated[
    str | None,
    typer.Option(
        help="Of weights: minmax, or mse, of least squared error.",
        show_default="minmax; mse of a language model",
    ),
]
Config = Annotated[
    str | None,
    typer.Option(
        help="static: all formats known beforehand; dynamic: rows of linear layers' inputs "
        "are quantized when they come; int4: linear layers with 4-bit weights in groups of 128. Of "
        "a checkpoint int8_dynamic, int4_weight_only or int4_dynamic.",
        show_default="static; int8_dynamic of a checkpoint",
    ),
]
Symmetric = Annotated[
    bool,
    typer.Option("--symmetric", help="Of a language model: 4-bit weights without zero points."),
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

Weights = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|w4|w8|kept",
        help="A checkpoint of the named network; of a language model, how many bits weights get; "
        "kept: the integers and scales that it has.",
        show_default="w4 of a language model",
    ),
]
Calibration = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.txt",
        help="Of a language model: a text to calibrate with, which gptq and awq need. Its last "
        "fifth is evaluated.",
    ),
]
Evaluate = Annotated[
    Path | None,
    typer.Option(metavar="FILE.txt", help="Of a language model: another text to evaluate."),
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Of a language model or a checkpoint: how many 4-bit weights share a scale; 0: a row.",
        show_default="32; the configuration's of a checkpoint",
    ),
]
Embeddings = Annotated[
    int | None,
    typer.Option(
        help="Of a checkpoint: bits of the tables of embeddings, 8 or 4; 0: they stay in float.",
        show_default="8",
    ),
]
ModelOf = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODULE:FUNCTION",
        help="Of a checkpoint: returns its PyTorch model, which is made on the device meta, where "
        "it takes no memory.",
        show_default="each matrix NAME.weight is a linear layer's",
    ),
]
Samples = Annotated[int, typer.Option(min=0, help="How many samples to measure accuracy on.")]
Batches = Annotated[
    int, typer.Option(min=1, help="Of 8 samples of the model's own, to calibrate with.")
]
Source = Annotated[
    str,
    typer.Argument(
        help="A network by name (`lowbit bench networks` knows them), module:function that "
        "returns a PyTorch model or a pair (model, example), FILE.onnx; a language model, a "
        "GGUF file or a folder of Hugging Face's; or safetensors, a file, an index or a "
        "folder, whose matrices are quantized a part at a time where --out is a file.",
        show_default=False,
        autocompletion=offered(_models),
    ),
]
Out = Annotated[
    Path,
    typer.Option(metavar="DIR|FILE.safetensors", help="Where to write it.", show_default=False),
]
Observer = Annotated[str, typer.Option(help="minmax, moving_average, percentile, entropy or mse.")]


@command("quantize", example="quantize resnet34 --config static --data random --out resnet34-int8")
def quantize(
    model: Source,
    out: Out,
    config: Config = None,
    data: Data = None,
    weights: Weights = None,
    calibration: Calibration = None,
    evaluate: Evaluate = None,
    group_size: GroupSize = None,
    symmetric: Symmetric = False,
    observer: Observer = "minmax",
    rounding: Rounding = "nearest",
    weight_range: WeightRange = None,
    equalize: Equalize = False,
    smooth: Smooth = None,
    correct_bias: CorrectBias = False,
    batches: Batches = 4,
    samples: Samples = 500,
    embeddings: Embeddings = None,
    model_of: ModelOf = None,
    threads: Threads = None,
    json_file: JsonFile = None,
) -> None:
    """Quantize a network, a language model or a checkpoint, and report what became of it.

    Of a network, DIR has network.safetensors, which `lowbit run` and lowbit.graph.load take and
    which needs no PyTorch, and report.json, which `lowbit report` shows. Of a language model, DIR
    is a folder that `lowbit generate` takes, and the report has the perplexity before and after.
    Of a checkpoint, which need not fit into memory, FILE is what lowbit.torch.load puts into a
    model.
    """
    of_language = {"--calibration": calibration, "--evaluate": evaluate}
    of_networks = {"--data": data, "--smooth": smooth, "--equalize": equalize or None,
                   "--correct-bias": correct_bias or None}  # fmt: skip
    with output(json_file) as show:
        if out.suffix == ".safetensors":
            _refuse(of_language | of_networks, "a checkpoint is quantized without data")
            chosen = _configured(config or "int8_dynamic", group_size, rounding, embeddings)
            show(*_checkpoint(model, out, chosen, model_of))
        elif _is_language_model(model):
            _refuse(of_networks, "of a language model there are --calibration and --rounding")
            bits, range_ = weights or "w4", weight_range or "mse"
            how = None if bits == KEPT else _format(bits, group_size, symmetric, range_, rounding)
            show(*_language_model(model, out, how, calibration, evaluate, threads))
        else:
            _check_place(model)
            _refuse(of_language, "they are for language models; give --data")
            method: dict[str, Any] = {
                "config": config or "static", "observer": observer, "rounding": rounding,
                "weight_range": weight_range or "minmax", "equalize": equalize, "smooth": smooth,
                "correct_bias": correct_bias,
            }  # fmt: skip
            show(*_network(model, out, method, data, weights, batches, threads, samples))
    print(f"written to {out}", file=sys.stderr)


def _check_place(model: str) -> None:
    """FileNotFoundError: what can only be a place of files is none."""
    if ("/" in model and ":" not in model) and not Path(model).exists():
        raise FileNotFoundError(errno.ENOENT, "there is no such file or folder", model)


def _refuse(options: Mapping[str, Any], why: str) -> None:
    """ValueError, with what is given of these options."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ValueError(f"{', '.join(given)}: {why}")


def _network(
    model: str, out: Path, method: Mapping[str, Any], data: str | None, weights: str | None,
    batches: int, threads: int | None, samples: int,
) -> tuple[Any, str]:  # fmt: skip
    """What is shown, and the same as JSON."""
    from lowbit.models import report, source
    from lowbit.models.quantize import Method

    how = Method(**method)
    found = source.find(model, data, weights, batches)
    made = report.quantize(found, how, out, threads=threads, samples=samples)
    if found.data == source.RANDOM:
        print(f"warning: {report.NOISE}", file=sys.stderr)
    return report.text(made), json.dumps(made, indent=1, allow_nan=False)


def _is_language_model(model: str) -> bool:
    return model.endswith(".gguf") or (Path(model) / "config.json").is_file()


def _format(
    weights: str, size: int | None, symmetric: bool, range: Any, method: str
) -> WeightFormat:
    """What the options say. ValueError: they are none of a language model's."""
    from lowbit.weights.format import WeightFormat

    known = {"weights": (weights, ("w4", "w8")), "weight-range": (range, ("minmax", "mse")),
             "rounding": (method, ("nearest", "gptq", "awq"))}  # fmt: skip
    for name, (value, values) in known.items():
        if value not in values:
            raise ValueError(f"--{name} must be {' or '.join(values)}, got {value!r}")
    group_size = 32 if size is None else size
    if group_size < 8 or group_size % 8:
        raise ValueError(f"--group-size must be a multiple of 8, got {group_size}")
    if weights == "w8":
        return WeightFormat("int8", None, range, method)
    return WeightFormat("int4" if symmetric else "uint4", group_size, range, method)


def _language_model(
    model: str, out: Path, format: WeightFormat | None, calibration: Path | None,
    evaluate: Path | None, threads: int | None,
) -> tuple[str, str]:  # fmt: skip
    """The same of a language model; format: None keeps its weights as they are."""
    if format is None:
        return _kept(Path(model), out)
    from lowbit.lm.quantize import quantize
    from lowbit.registry.files import write_text

    texts = (None if one is None else one.read_text("utf-8") for one in (calibration, evaluate))
    known, other = texts
    report = quantize(
        model, out, format, calibration=known, evaluation=other, threads=threads,
        on_layer=lambda number, count: print(f"layer {number} of {count}", file=sys.stderr),
    )  # fmt: skip
    text = json.dumps(asdict(report), indent=1)
    write_text(out / "report.json", text + "\n")
    return str(report), text


def _kept(model: Path, out: Path) -> tuple[str, str]:
    from lowbit.lm.convert import convert

    written = convert(model, out)
    text = (
        f"{written.bytes_before:,} bytes of weights became {written.bytes_after:,}; "
        f"{written.quantized:,} of them quantized"
    )
    notes = (f"{count:,}: {reason}" for reason, count in written.notes.items())
    return "\n".join((text, *notes)), json.dumps(asdict(written), indent=1)


def _checkpoint(
    source: str, target: Path, config: QuantizeConfig, model: str | None
) -> tuple[str, str]:
    """The same of a checkpoint, which is read, quantized and written a part at a time."""
    import torch

    from lowbit.models.source import called
    from lowbit.torch import quantize_checkpoint

    made: Any = None
    if model is not None:
        with torch.device("meta"):
            made = called(model)
        made = made[0] if isinstance(made, tuple) else made  # else with an example
    found = quantize_checkpoint(Path(source), target, config, made)
    sizes = {"bytes_before": found.bytes_before, "bytes_after": found.bytes_after}
    return str(found), json.dumps({**sizes, **asdict(found)}, indent=1)


def _configured(
    kind: str, group_size: int | None, rounding: str, embeddings: int | None
) -> QuantizeConfig:
    """ValueError: a configuration has no such option."""
    from lowbit.torch.config import configurations

    given: dict[str, Any] = {"embeddings": 8 if embeddings is None else embeddings or None}
    if group_size is not None:
        given["group_size"] = group_size or None
    if rounding != "nearest":
        given["method"] = rounding
    made = configurations.get(kind)
    unknown = given.keys() - {one.name for one in fields(made)}
    if unknown:
        raise ValueError(f"{kind} has no {', '.join(sorted(unknown)).replace('_', '-')}")
    return made(**given)
