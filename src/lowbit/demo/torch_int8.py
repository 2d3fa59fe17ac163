"""PyTorch's own dynamic int8, on whichever of its engines runs, and runs fastest, here.

An engine can crash the process (onednn has, in version 2.13). So each is first tried in a
process of its own, on layers of the model's shapes: `python -m lowbit.demo.torch_int8` with
the trial as JSON.
"""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.ao.quantization.qconfig import per_channel_dynamic_qconfig

_TIME_LIMIT = 60.0  # seconds for the trial of one engine
_REPEATS = 15


@dataclass(frozen=True)
class Trial:
    """How one engine did: seconds for the model's linear layers at each number of rows."""

    engine: str
    seconds: tuple[float, ...]
    failure: str | None = None

    @property
    def figure(self) -> float:
        """What is compared: the product over the numbers of rows, so that each weighs alike."""
        return math.inf if self.failure else math.prod(self.seconds)


def engines() -> list[str]:
    """PyTorch's quantized engines that are worth trying on this machine."""
    supported = [name for name in torch.backends.quantized.supported_engines if name != "none"]
    # qnnpack is made for phones; elsewhere it is no rival unless there is no other.
    return [name for name in supported if name != "qnnpack"] or supported


def try_engine(engine: str, model: nn.Module, rows: list[int], threads: int) -> Trial:
    """Run the linear layers of `model` on `engine` in a process of its own, and time them."""
    sizes = Counter(
        (layer.in_features, layer.out_features)
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    )
    task = {
        "engine": engine,
        "layers": [[*size, count] for size, count in sizes.items()],
        "rows": rows,
        "threads": threads,
    }
    command = [sys.executable, "-m", "lowbit.demo.torch_int8", json.dumps(task)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIME_LIMIT, check=False, env=_path()
        )
    except subprocess.TimeoutExpired:
        return Trial(engine, (), f"no answer within {_TIME_LIMIT:.0f} s")
    if done.returncode < 0:
        return Trial(engine, (), f"crashed with {signal.Signals(-done.returncode).name}")
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return Trial(engine, (), lines[-1])
    return Trial(engine, tuple(json.loads(done.stdout.splitlines()[-1])))


def _path() -> dict[str, str]:
    # The process should find what this one has found, however that was arranged.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


@contextmanager
def using(engine: str) -> Iterator[None]:
    """Make `engine` PyTorch's quantized engine for the length of a block."""
    previous = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        yield
    finally:
        torch.backends.quantized.engine = previous


def dynamic_int8(model: nn.Module, engine: str) -> nn.Module:
    """A copy of `model` whose linear layers are PyTorch's dynamically quantized int8 ones.

    Weights get a scale per output channel, as lowbit's do. That is as fast as PyTorch's
    default of one scale per weight, and closer to the float model.
    """
    with using(engine), warnings.catch_warnings():
        for deprecated in ("torch.ao.quantization is", "TypedStorage is", "torch.quantize_per_"):
            warnings.filterwarnings("ignore", message=f"{deprecated}.*deprecated")
        scheme = {nn.Linear: per_channel_dynamic_qconfig}
        return torch.ao.quantization.quantize_dynamic(model, scheme, dtype=torch.qint8)


def _trial(engine: str, layers: list[list[int]], rows: list[int], threads: int) -> list[float]:
    torch.set_num_threads(threads)
    stacks = [
        (dynamic_int8(nn.Sequential(nn.Linear(k, n)), engine), k, count) for k, n, count in layers
    ]
    totals = []
    for m in rows:
        inputs = [torch.randn(m, k) for _, k, _ in stacks]
        rounds = []
        for _ in range(_REPEATS):
            begin = time.perf_counter()
            for (layer, _, count), x in zip(stacks, inputs, strict=True):
                for _ in range(count):
                    layer(x)
            rounds.append(time.perf_counter() - begin)
        totals.append(statistics.median(rounds))
    return totals


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps(_trial(**json.loads(sys.argv[1]))))
