"""Products of groups of rows."""

from __future__ import annotations

from lowbit.graph.graph import Node, Tensor
from lowbit.graph.lower import Lowering, lowerings
from lowbit.graph.lowering.elementwise import converted, plain
from lowbit.graph.lowering.shapes import settled
from lowbit.kernels.cpu.tensors.grouped import grouped_product


@lowerings.register("GroupedMatMul")
def _grouped(lowering: Lowering, node: Node) -> None:
    x, weight, ends = (lowering.view(name) for name in node.inputs)
    x, weight = (converted(lowering, one, Tensor("float32", one.shape)) for one in (x, weight))
    if ends.tensor.dtype not in ("int32", "int64"):
        raise NotImplementedError(f"ends are int32 or int64, not {ends.tensor.dtype}")
    ends = plain(lowering, ends)
    groups, depth, n = weight.shape
    out = lowering.fresh(Tensor("float32", (x.shape[0], n)))
    indices = "s32" if ends.tensor.dtype == "int32" else "s64"
    lowering.add(grouped_product.program(lowering.isa, indices=indices), {
        "out": out.place, "x": x.place, "weight": weight.place, "ends": ends.place,
        "rows": x.shape[0], "groups": groups, "k_size": depth, "n": n,
    })  # fmt: skip
    settled(lowering, node, out)
