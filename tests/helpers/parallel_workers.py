"""What the processes of tests/torch/test_parallel.py do; spawned, so in a module of its own."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lowbit.torch import (
    Int4DynamicConfig,
    Int4WeightOnlyConfig,
    Int8DynamicConfig,
    all_reduce,
    load,
    quantize_,
    save,
)
from lowbit.torch.all_reduce import all_reduced
from lowbit.torch.parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    load_parallel,
    parallelize,
)

PLAN = {"blocks.*.up": "column", "*.down": "row", "head": "column+gather", "entry": "scatter+row"}
CONFIGS = (
    None, Int4WeightOnlyConfig(32), Int4WeightOnlyConfig(None, symmetric_weight=True),
    Int4WeightOnlyConfig(32, method="hqq"), Int8DynamicConfig(), Int4DynamicConfig(32),
)  # fmt: skip


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(96, 192), nn.Linear(192, 96)

    def forward(self, x: Any) -> Any:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.norm = nn.Linear(192, 96, bias=False), nn.LayerNorm(96)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(96, 126)

    def forward(self, x: Any) -> Any:
        x = self.norm(self.entry(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(config: Any) -> Model:
    torch.manual_seed(0)
    model = Model().eval()
    return model if config is None else quantize_(model, config)


def raised(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except (ValueError, TypeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def work(rank: int, world: int, folder: Path, queue: Any) -> None:
    """Put what went wrong into a queue; "": nothing."""
    said = ""
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world)
    try:
        torch.set_num_threads(1)
        with torch.no_grad():
            for index, config in enumerate(CONFIGS):
                compared(rank, world, folder / f"{index}.safetensors", config)
            refused(world)
            unfitting(world, folder / "0.safetensors")
    except BaseException:
        said = traceback.format_exc()
    finally:
        queue.put(said)
        dist.destroy_process_group()


def compared(rank: int, world: int, path: Path, config: Any) -> None:
    """Parts against the whole model; those of a file are the same."""
    mesh, whole = init_device_mesh("cpu", (world,)), made(config)
    x = torch.randn(5, 192, generator=torch.Generator().manual_seed(1))
    want = whole(x)
    model = parallelize(made(config), mesh, PLAN)
    got = model(x)
    dynamic = config is not None and config.activations != "float"
    error = float((got - want).norm() / want.norm())
    assert error < (0.03 if dynamic else 1e-5), (config, error)
    block: Any = model.blocks[0]
    assert type(block.up) is ColumnParallelLinear
    assert type(block.down) is RowParallelLinear
    assert tuple(block.up.weight.shape) == (192 // world, 96)
    assert tuple(block.down.weight.shape) == (96, 192 // world)
    if rank == 0:
        save(whole, path)
    dist.barrier()
    for device in ("cpu", "meta"):
        with torch.device(device):
            loaded = Model()
        load_parallel(loaded, path, mesh, PLAN, verify=device == "cpu")
        assert torch.equal(loaded.eval()(x), got), config
    again = load(made(None), path)
    assert torch.equal(again(x), want)
    for name, weight in loaded.state_dict().items():
        assert not weight.is_meta, name


def refused(world: int) -> None:
    mesh = init_device_mesh("cpu", (world,))
    model = made(Int4WeightOnlyConfig(128))
    before = dict(model.named_modules())
    said = raised(parallelize, model, mesh, PLAN)
    assert "layer 'entry': columns 0 to" in said, said
    assert "where groups of 128 do" in said
    assert dict(model.named_modules()) == before
    for plan, message in (
        ({"blocks.0": "row"}, "TypeError: layer 'blocks.0' is a Block"),
        ({"none": "row"}, "ValueError: no layer is called 'none'"),
        ({"head": "rows"}, "ValueError: style 'rows' is unknown"),
    ):
        assert message in raised(parallelize, made(None), mesh, plan)
    odd = nn.Linear(7, 7)
    assert "7 cannot be cut evenly" in raised(ColumnParallelLinear.of, odd, mesh)
    layer = RowParallelLinear.of(nn.Linear(12, 4), mesh, True)
    with torch.enable_grad():
        x = torch.ones(2, 12, requires_grad=True)
        assert "pass no gradients" in raised(layer, x)


def unfitting(world: int, path: Path) -> None:
    """A file of another model leaves this one as it is."""
    mesh, model = init_device_mesh("cpu", (world,)), Model()
    model.norm = nn.LayerNorm(95)
    before = dict(model.named_modules())
    assert "does not fit this model" in raised(load_parallel, model, path, mesh, PLAN)
    assert dict(model.named_modules()) == before


def sums(rank: int, store: Path) -> None:
    """Of GPUs: the sums of shared memory are NCCL's, also in a graph, and for what it does not
    take."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", f"file://{store}", rank=rank, world_size=2)
    group, random = dist.group.WORLD, torch.Generator("cuda").manual_seed(rank)
    assert group is not None
    cases = ((16, 4096, torch.bfloat16), (1, 8, torch.float32), (3, 5, torch.bfloat16),
             (64, 4096, torch.float32), (2, 64, torch.float16))  # fmt: skip
    for rows, columns, dtype in cases:
        y = torch.randn(rows, columns, device="cuda", generator=random).to(dtype)
        expected = y.clone()
        dist.all_reduce(expected, group=group)
        for _ in range(3):
            assert torch.equal(all_reduced(y.clone(), group), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = all_reduced(y.clone(), group)
        for _ in range(3):
            graph.replay()
            assert torch.equal(z, expected)
        del graph  # NCCL waits for graphs that hold its sums before a group is gone
    assert any(one is not None for one in all_reduce._buffers.values())
    dist.destroy_process_group()
