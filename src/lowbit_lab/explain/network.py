"""A network measured: operators of PyTorch, layers of lowbit, before and after quantization.

A layer's limit is the larger of two times (Williams, Waterman and Patterson, "Roofline: an
insightful visual performance model", 2009): its multiply-adds at the peak of what it computes in,
and the bytes of its operands and result, each once, from the nearest cache that holds them all.
Peaks and rates are measured in the same call. Of multiply-adds by Winograd's algorithm a quarter is
made, of words, at half the peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from lowbit import isa
from lowbit.graph import Graph, NodeTime, Session
from lowbit.graph.graph import Node, Tensor
from lowbit.graph.passes.infer import facts
from lowbit.jit.threads import max_threads
from lowbit.kernels.cpu.convolution.winograd import winograd
from lowbit.kernels.cpu.convolution.winograd_tiles import SHARE_OF_PRODUCTS
from lowbit.models.model import Array, Run
from lowbit.models.quantize import Method, quantized_graph
from lowbit.models.source import RANDOM, Source, compiled, find, random_inputs
from lowbit.models.work import multiply_adds
from lowbit.numerics import QTensor
from lowbit.numerics.formats import dtype_of
from lowbit.registry.extras import versions
from lowbit.report.charts import bars
from lowbit.report.page import Figure
from lowbit.report.text import format_seconds, new_table
from lowbit_lab.bench.core import peak
from lowbit_lab.bench.core.charts import roofline
from lowbit_lab.bench.core.peak import Ceiling
from lowbit_lab.bench.core.table import format_known, limits_line, thread_text
from lowbit_lab.trace.operators import Operator, of_torch, operators_table

_RUNS = 10
_WORDS = 2  # times as long take products of words
_STEADY = 0.5  # a larger spread is no measurement


class Layer(msgspec.Struct, frozen=True):
    """A node of a network as it runs. seconds: the median. computes: in what, "" where it
    multiplies no matrices. bytes: of operands and result, each once; level: the nearest cache that
    holds them, or "memory". limit_seconds, limit: the larger of the times by "compute" and
    "memory". spread: as of NodeTime. doubt: why the time was not measured well, "" if it was."""

    name: str
    op: str
    kernels: tuple[str, ...]
    seconds: float
    share: float
    multiply_adds: int
    computes: str
    bytes: int
    level: str
    limit_seconds: float
    limit: str
    spread: float = 0.0
    doubt: str = ""

    @property
    def reached(self) -> float | None:
        """The limit as a share of the time; None where the limit was not measured well."""
        return peak.share(self.limit_seconds / self.seconds) if self.seconds else None


class Kind(msgspec.Struct, frozen=True):
    """All layers of one operator that compute in one dtype: how many, their time, and their shares
    of the time and of the multiply-adds; doubtful: how many were not measured well."""

    op: str
    computes: str
    calls: int
    seconds: float
    mean_seconds: float
    share: float
    multiply_adds: int
    operation_share: float
    doubtful: int = 0


class Side(msgspec.Struct, frozen=True):
    """A network as lowbit runs it. seconds: all layers together. untimed: why there are none."""

    name: str
    seconds: float
    kinds: tuple[Kind, ...]
    layers: tuple[Layer, ...]
    untimed: str = ""

    @property
    def doubtful_share(self) -> float:
        """The share of the time in layers that were not measured well."""
        return sum(layer.share for layer in self.layers if layer.doubt)


class Profile(msgspec.Struct, frozen=True):
    """All of it. operators: PyTorch's in a run, of a module. sides: before and after
    quantization."""

    name: str
    cpu: str
    isa: str
    threads: int
    samples: int
    versions: dict[str, str]
    ceilings: tuple[Ceiling, ...]
    operators: tuple[Operator, ...]
    sides: tuple[Side, ...]

    def to_json(self) -> str:
        """Everything as JSON text."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode()


def profile(
    what: str, *, config: str | None = "static", data: str | None = None, threads: int | None = None
) -> Profile:
    """Profile a network on one sample.

    what: as `find` of models/source.py takes it, or a folder that `lowbit quantize` wrote, or
    a file of `lowbit.graph.save`, which is quantized already. config: "static", "dynamic" or
    "int4", None to leave it as it is. data: to calibrate with; random if nobody says. ValueError:
    there is no such thing, or threads below 1.
    """
    count = max_threads() if threads is None else threads
    if count < 1:
        raise ValueError(f"threads is {threads}; it must be at least 1")
    method = None if config is None else Method(config=config)
    used = isa.active().name
    ceilings = {dtype: peak.measure(used, count, dtype=dtype) for dtype in ("int8", "float32")}
    operators: tuple[Operator, ...] = ()
    path = Path(what)
    if path.is_dir() or path.suffix == ".safetensors":
        graph = compiled(path)
        sample = random_inputs(graph)
        graphs = {"as compiled": graph}
        name = path.name
    else:
        source = find(what, data or RANDOM)
        name, sample = source.name, _one(source)
        operators = _operators(source.run, sample, count)
        graphs = {"float32": source.graph}
        if method is not None:
            made, _ = quantized_graph(source.graph, source.batches, method, compute=source.compute)
            graphs[f"quantized, {config}"] = made
    return Profile(
        name=name,
        cpu=isa.report()["cpu"],
        isa=used,
        threads=count,
        samples=len(next(iter(sample.values()))),
        versions=versions(),
        ceilings=tuple(ceilings.values()),
        operators=operators,
        sides=tuple(_side(name, graph, sample, ceilings) for name, graph in graphs.items()),
    )


def _one(source: Source) -> dict[str, Array]:
    """The first sample, where a run chooses how many there are."""
    fixed = not isinstance(source.graph.tensors[source.graph.inputs[0]].shape[0], str)
    return {name: one if fixed else one[:1] for name, one in source.sample.items()}


def _operators(run: Run, sample: Mapping[str, Array], threads: int) -> tuple[Operator, ...]:
    """Of a network that PyTorch runs, by its own profiler; of another, none."""
    if isinstance(run, Session):
        return ()
    import torch

    def several() -> None:
        for _ in range(_RUNS):
            run(*sample.values())

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        run(*sample.values())
        return tuple(of_torch(several, _RUNS))
    finally:
        torch.set_num_threads(before)


def _side(
    name: str, graph: Graph, sample: Mapping[str, Array], ceilings: Mapping[str, Ceiling]
) -> Side:
    threads = ceilings["int8"].threads
    session = Session(graph, threads=threads)
    try:
        times = {one.node: one for one in session.profile(**sample, runs=_RUNS)}
    except NotImplementedError as error:
        return Side(name, 0.0, (), (), str(error).splitlines()[0])
    total = sum(one.seconds for one in times.values())
    work = {one.name: one for one in _work(graph, sample)}
    layers = []
    for node, timed in times.items():
        _, op, macs, computes, nbytes = work.get(node, _Work(node, "copy", 0, "", 0))
        ceiling = ceilings[computes or "float32"]
        level = peak.level(nbytes, threads)
        compute, memory = 2e-9 * macs / ceiling.gops, 1e-9 * nbytes / ceiling.read_gbs[level]
        if winograd.name in timed.kernels:
            compute *= SHARE_OF_PRODUCTS * _WORDS
        layers.append(
            Layer(
                node,
                op,
                tuple(dict.fromkeys(timed.kernels)),
                timed.seconds,
                timed.seconds / total if total else 0.0,
                macs,
                computes,
                nbytes,
                level,
                max(compute, memory),
                "compute" if compute >= memory else "memory",
                timed.spread,
                _doubt(timed, max(compute, memory)),
            )
        )
    return Side(name, total, _kinds(layers), tuple(layers))


def _doubt(timed: NodeTime, limit_seconds: float) -> str:
    """Why a time cannot be trusted; "" if it can."""
    if timed.seconds <= 0:
        return "no time was seen to pass"
    if peak.share(limit_seconds / timed.seconds) is None:
        return "it is faster than its measured limit"
    if timed.spread > _STEADY:
        return f"its runs differ by {timed.spread:.0%} of their median"
    return ""


class _Work(NamedTuple):
    """What a node has to do: as the fields of a layer."""

    name: str
    op: str
    multiply_adds: int
    computes: str
    nbytes: int


def _work(graph: Graph, sample: Mapping[str, Array]) -> Iterator[_Work]:
    """Of each node of the graph, for inputs like these."""
    sizes = {
        size: have
        for name in graph.inputs
        for size, have in zip(graph.tensors[name].shape, sample[name].shape, strict=True)
        if isinstance(size, str)
    }
    bound = graph.bound(sizes)
    tensors, counts = facts(bound)[0], multiply_adds(bound)
    parts: dict[str, list[tuple[str, int, str, int]]] = {}
    for node in bound.nodes:
        macs = counts.get(node.outputs[0], 0)
        computes = _computes(node, bound, tensors) if macs else ""
        # Of a table only what is taken is read.
        read = (*node.inputs[1:], *node.outputs) if node.op == "Gather" else node.inputs
        names = [*dict.fromkeys(filter(None, read)), *filter(None, node.outputs)]
        nbytes = sum(_nbytes(bound, tensors[one], one) for one in names)
        parts.setdefault(node.name or node.outputs[0], []).append((node.op, macs, computes, nbytes))
    for name, several in parts.items():
        op, _, computes, _ = max(several, key=lambda one: (one[1], one[3]))
        yield _Work(name, op, sum(x[1] for x in several), computes, sum(x[3] for x in several))


def _computes(node: Node, graph: Graph, tensors: Mapping[str, Tensor]) -> str:
    quantized = tensors[node.inputs[0]].scale is not None
    return "int8" if quantized or _weight_bits(graph, node) == 8 else "float32"


def _weight_bits(graph: Graph, node: Node) -> int:
    weight = graph.constants.get(node.inputs[1])
    return weight.format.bits if isinstance(weight, QTensor) else 32


def _nbytes(graph: Graph, tensor: Tensor, name: str) -> int:
    constant = graph.constants.get(name)
    if isinstance(constant, QTensor):
        return constant.values.size * constant.format.bits // 8 + constant.scale.nbytes
    if constant is not None:
        return constant.nbytes
    size = dtype_of(tensor.dtype).itemsize
    for one in tensor.sizes:
        size *= one
    return size


def _kinds(layers: Sequence[Layer]) -> tuple[Kind, ...]:
    """By operator and what it computes in, the slowest first."""
    groups: dict[tuple[str, str], list[Layer]] = {}
    for one in layers:
        groups.setdefault((one.op, one.computes), []).append(one)
    macs = sum(one.multiply_adds for one in layers) or 1
    made = []
    for (op, computes), several in groups.items():
        seconds, own = (sum(x.seconds for x in several), sum(x.multiply_adds for x in several))
        mean, share = seconds / len(several), sum(x.share for x in several)
        doubtful = sum(bool(layer.doubt) for layer in several)
        kind = Kind(op, computes, len(several), seconds, mean, share, own, own / macs, doubtful)
        made.append(kind)
    return tuple(sorted(made, key=lambda one: -one.seconds))


def figures_of(profile: Profile) -> Sequence[dict[str, Any]]:
    """The layers with multiply-adds as points of a roofline."""
    return [
        {
            "name": f"{one.op}, {side.name}",
            "intensity": 2 * one.multiply_adds / max(1, one.bytes),
            "gops": 2e-9 * one.multiply_adds / one.seconds,
        }
        for side in profile.sides
        for one in side.layers
        if one.multiply_adds and not one.doubt
    ]


# A profile as text, and its charts.

_MOST_OPERATORS = 20
_DOUBTFUL = "?"  # marks what was not measured well
_LITTLE = 0.1  # of the time: a ratio may hold in spite of it


def render(profile: Profile) -> RenderableType:
    """For a terminal."""
    samples = f"{profile.samples} sample{'s' if profile.samples != 1 else ''}"
    where = f"{profile.cpu}, {profile.isa}, {thread_text(profile.threads)}"
    parts: list[RenderableType] = [Text(profile.name, "bold"), Text(f"{samples} on {where}")]
    parts += map(limits_line, profile.ceilings)
    if profile.operators:
        shown, left = profile.operators[:_MOST_OPERATORS], profile.operators[_MOST_OPERATORS:]
        rest = f"{len(left)} more take {sum(one.share for one in left):.1%}" if left else ""
        table = operators_table("PyTorch's operators, before", shown)
        parts += [table, Text(rest, "dim")]
    for side in profile.sides:
        if side.untimed:
            parts.append(Text(f"{side.name}: not timed: {side.untimed}"))
        else:
            parts += [_kinds_table(side), _layers_table(side), *_doubts(side)]
    if len(profile.sides) == 2 and all(side.seconds for side in profile.sides):
        before, after = profile.sides
        ratio = before.seconds / after.seconds
        doubtful = max(before.doubtful_share, after.doubtful_share) > _LITTLE
        mark = f" {_DOUBTFUL}" if doubtful else ""
        parts.append(
            Text(f"{after.name}: {ratio:.2f} times as fast as {before.name}{mark}", "bold")
        )
    note = "limit: the larger of the times by compute, at the measured peak of what the layer "
    note += "computes in, and by memory, its bytes at the read rate of the cache that holds them. "
    note += "winograd makes a quarter of the multiply-adds, of words."
    return Group(*parts, Text(note, "dim"))


def _kinds_table(side: Side) -> RenderableType:
    columns = [("operator", False), ("in", False), ("calls", True), ("time", True)]
    columns += [("mean", True), ("share of time", True), ("share of multiply-adds", True)]
    made = new_table(f"{side.name}: {format_seconds(side.seconds)} in all", columns)
    for one in side.kinds:
        operations = f"{one.operation_share:.1%}" if one.multiply_adds else ""
        times = _marked(one.seconds, one.doubtful), format_seconds(one.mean_seconds)
        times = *times, f"{one.share:.1%}"
        made.add_row(one.op, one.computes, str(one.calls), *times, operations)
    return made


def _marked(seconds: float, doubtful: object) -> str:
    return f"{format_seconds(seconds)} {_DOUBTFUL}" if doubtful else format_seconds(seconds)


def _doubts(side: Side) -> Iterator[RenderableType]:
    """A sentence of the layers that were not measured well, and why."""
    doubtful = [layer for layer in side.layers if layer.doubt]
    if doubtful:
        worst = max(doubtful, key=lambda layer: layer.seconds)
        count = (
            f"{len(doubtful)} of {len(side.layers)} layers, {side.doubtful_share:.1%} of the time"
        )
        yield Text(
            f"Not measured well, marked {_DOUBTFUL}: {count}; {worst.name}: {worst.doubt}. "
            "Other processes may use the cores: measure again when they are idle, or with fewer "
            "--threads.",
            "bold",
        )


def _layers_table(side: Side) -> RenderableType:
    columns = [("layer", False), ("operator", False), ("kernels", False), ("time", True)]
    columns += [("share", True), ("GOP/s", True), ("limit", True), ("by", False)]
    made = new_table(f"{side.name}: layers", [*columns, ("of the limit", True)])
    for one in side.layers:
        timed = one.multiply_adds and one.seconds > 0
        speed = f"{2e-9 * one.multiply_adds / one.seconds:.1f}" if timed else ""
        by = f"{one.limit}, {one.computes or one.level}" if one.limit == "compute" else one.level
        made.add_row(
            *(one.name, one.op, ", ".join(one.kernels), _marked(one.seconds, one.doubt)),
            *(f"{one.share:.1%}", speed),
            *((format_seconds(one.limit_seconds), by) if one.bytes else ("", "")),
            format_known(one.reached) if one.bytes else "",
        )
    return made


def figures(profile: Profile) -> Iterator[Figure]:
    """The roofline of all layers with multiply-adds, and where the time goes."""
    points = figures_of(profile)
    if points:
        peaks = {f"{one.dtype} peak": one.gops for one in profile.ceilings}
        drawn = roofline(points, peaks, profile.ceilings[0].read_gbs)
        yield Figure(drawn, "Each layer against the limits measured in the same call.")
    values = [
        {"side": side.name, "ms": 1e3 * one.seconds, "operator": f"{one.op} {one.computes}".strip()}
        for side in profile.sides
        for one in side.kinds
    ]
    if values:
        split = bars(values, "side", "ms", "milliseconds", "operator")
        yield Figure(split, "Time split by operator and what it computes in.")
