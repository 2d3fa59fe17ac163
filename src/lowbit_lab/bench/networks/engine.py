"""What an engine is: something that runs a whole network, in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lowbit.models.model import Array, Arrays
from lowbit.registry import Registry
from lowbit.registry.extras import absent

INPUTS, CALIBRATION, REFERENCE = "inputs.npz", "calibration.npz", "reference.npy"
"""In the folder of a prepared network: samples, batches of one sample to calibrate with, and what
the float network makes of the samples."""
FLOAT_ONNX, STATIC_ONNX, DYNAMIC_ONNX = "float.onnx", "static.onnx", "dynamic.onnx"
FLOAT, STATIC, DYNAMIC = "float.safetensors", "static.safetensors", "dynamic.safetensors"


@dataclass(frozen=True)
class Work:
    """What an engine is to run: a model of the registry with a checkpoint, as the files of `folder`
    hold it, `batch` samples at a time."""

    model: str
    weights: str | None
    folder: str
    batch: int
    threads: int

    def file(self, name: str) -> Path:
        return Path(self.folder, name)

    def arrays(self, name: str) -> Arrays:
        """The arrays of a file that `save_arrays` wrote."""
        with np.load(self.file(name)) as held:
            return tuple(held[f"arr_{index}"] for index in range(len(held.files)))


@dataclass(frozen=True)
class Opened:
    """A network ready to be called. detail: a few words on what it runs on. measure: what else is
    measured of it, once nothing else runs."""

    call: Callable[..., Array]
    detail: str = ""
    measure: Callable[[], Mapping[str, Any]] = field(default=dict)


class Engine:
    """A way to run a network. Importing its file needs nothing that may be missing.

    name: in tables. config: how it is quantized: "static", "dynamic", or "" for floats. files: of
    the prepared network, those that it reads. needs: modules. package: the library, by its name
    and that on package indices; None is lowbit. ours: whether it is lowbit. always: whether it runs
    without peers too.
    """

    name: str
    config: str = ""
    files: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    package: tuple[str, str] | None = None
    ours: bool = False
    always: bool = False

    def unavailable(self) -> str | None:
        """Why it cannot run here; None if it may. Asked outside of its process."""
        return next(filter(None, map(absent, self.needs)), None)

    def open(self, work: Work) -> Opened:
        """Make the network ready, inside of the engine's process."""
        raise NotImplementedError


engines: Registry[Engine] = Registry("engine", "lowbit_lab.bench.networks.engines")


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write arrays to a file that `Work.arrays` reads."""
    np.savez(path, *arrays)
