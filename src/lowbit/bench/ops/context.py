"""Where a run on a GPU happens."""

from __future__ import annotations

import importlib
import platform
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

import lowbit
from lowbit.bench.context import commit
from lowbit.registry.extras import installed

_LIBRARIES = ("torch", "triton", "numpy")


def gather(seed: int, noise: float, seconds: float) -> dict[str, Any]:
    """The GPU, its clocks and power as they are now (where nvidia-ml-py is installed), versions,
    commit, and how the run is made."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    versions = {name: metadata.version(name) for name in _LIBRARIES}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        "now": _state(),
        "versions": {
            "python": platform.python_version(),
            "lowbit": lowbit.__version__,
            **versions,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        },
        "commit": commit(),
        "seed": seed,
        "distribution": "normal, mean 0, deviation 1",
        "noise_limit": noise,
        "time_limit_seconds": seconds,
    }


def _state() -> dict[str, Any]:
    """Driver, clocks in MHz, power in W; empty without nvidia-ml-py."""
    if not installed("pynvml"):
        return {}
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    try:
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        device = nvml.nvmlDeviceGetHandleByUUID(uuid)
        return {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "sm_clock": nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
            "memory_clock": nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM),
            "power": nvml.nvmlDeviceGetPowerUsage(device) / 1000,
            "power_limit": nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1000,
        }
    except nvml.NVMLError as error:
        return {"unknown": str(error)}
    finally:
        nvml.nvmlShutdown()
