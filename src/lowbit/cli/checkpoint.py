"""The command `lowbit checkpoint`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowbit.cli.app import JsonFile, command, offered, output

if TYPE_CHECKING:
    from lowbit.torch.config import QuantizeConfig


def _kinds() -> Iterable[str]:
    from lowbit.torch.config import configurations

    return configurations.names()


@command("checkpoint", example="checkpoint llama/ llama-int4.safetensors --config int4_weight_only")
def checkpoint(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|DIR",
            help="A safetensors file, a folder with model.safetensors or its index, or an index.",
            show_default=False,
        ),
    ],
    target: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Where to write what lowbit.torch.load reads.", show_default=False
        ),
    ],
    config: Annotated[
        str,
        typer.Option(
            help="int8_dynamic, int4_weight_only or int4_dynamic.", autocompletion=offered(_kinds)
        ),
    ] = "int8_dynamic",
    group_size: Annotated[
        int | None,
        typer.Option(
            min=0, help="Of 4-bit weights; 0: one group a row.", show_default="the configuration's"
        ),
    ] = None,
    method: Annotated[str, typer.Option(help="nearest, or hqq for 4 bits.")] = "nearest",
    embeddings: Annotated[
        int, typer.Option(help="Bits of the tables of embeddings, 8 or 4; 0: they stay in float.")
    ] = 8,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="Returns the PyTorch model that the checkpoint is of. It is made on the device "
            "meta, where it takes no memory.",
            show_default="each matrix NAME.weight is taken for that of a linear layer",
        ),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Quantize a checkpoint that does not fit into memory.

    Weights are read, quantized and written a part at a time. `load` puts the result into a model.
    """
    from lowbit.torch import quantize_checkpoint

    made = _on_meta(model) if model else None
    chosen = _configured(config, group_size, method=method, embeddings=embeddings or None)
    found = quantize_checkpoint(source, target, chosen, made)
    sizes = {"bytes_before": found.bytes_before, "bytes_after": found.bytes_after}
    with output(json_file) as show:
        show(str(found), json.dumps({**sizes, **asdict(found)}, indent=1))


def _on_meta(model: str) -> Any:
    import torch

    from lowbit.models.source import called

    with torch.device("meta"):
        made = called(model)
    return made[0] if isinstance(made, tuple) else made  # else with an example


def _configured(kind: str, group_size: int | None, **given: Any) -> QuantizeConfig:
    from lowbit.torch.config import configurations

    if group_size is not None:
        given["group_size"] = group_size or None
    made = configurations.get(kind)
    unknown = given.keys() - {one.name for one in fields(made)}
    if unknown:
        raise ValueError(f"{kind} has no {', '.join(sorted(unknown)).replace('_', '-')}")
    return made(**given)
