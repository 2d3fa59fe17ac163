"""Linear layers that are cut among processes, by gloo on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import parallel_workers
import pytest
import torch
from torch import multiprocessing
from torch.multiprocessing.spawn import spawn

from lowbit.weights.format import WeightFormat


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_sums_of_gpus_that_read_each_other(tmp_path: Path) -> None:
    spawn(parallel_workers.sums, (tmp_path / "store",), nprocs=2)


@pytest.mark.deep
@pytest.mark.parametrize("world", [2, 3])
def test_processes_together_are_one(world: int, tmp_path: Path) -> None:
    """Results, files, and what is refused: see parallel_workers."""
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    arguments = [(rank, world, tmp_path, queue) for rank in range(world)]
    processes = [context.Process(target=parallel_workers.work, args=one) for one in arguments]
    for one in processes:
        one.start()
    said = [queue.get() for _ in processes]
    assert not "".join(said), "\n".join(said)
    for one in processes:
        one.join()


@pytest.mark.parametrize("form", [
    WeightFormat("int8"), WeightFormat("int4", 16), WeightFormat("uint4", 24),
    WeightFormat("uint4", None), WeightFormat("uint4", 16, method="hqq"),
])  # fmt: skip
def test_parts_of_a_weight_are_those_of_its_numbers(form: WeightFormat) -> None:
    weight = np.random.default_rng(0).standard_normal((6, 96), np.float32)
    record = form.quantize(weight)
    whole, arrays = record.dequantize(), form.to_stored(record)
    for axis, start, stop in ((0, 2, 5), (1, 48, 96), (1, 0, 48)):
        part = form.cut(arrays, (6, 96), axis, start, stop)
        shape = (stop - start, 96) if axis == 0 else (6, stop - start)
        made = form.from_stored(part, shape).dequantize()
        np.testing.assert_array_equal(made, whole.take(range(start, stop), axis))


@pytest.mark.parametrize(("form", "message"), [
    (WeightFormat("int4", 32), "groups of 32"), (WeightFormat("int4", None), "bytes of 2"),
])  # fmt: skip
def test_parts_end_where_groups_do(form: WeightFormat, message: str) -> None:
    arrays = form.to_stored(form.quantize(np.ones((2, 96), np.float32)))
    with pytest.raises(ValueError, match=message):
        form.cut(arrays, (2, 96), 1, 0, 33)
