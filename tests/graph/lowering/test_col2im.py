"""Windows that are summed where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lowered import formatted, ints, same
from nets import Net, random_inputs

from lowbit.graph.evaluate import evaluate


@pytest.mark.parametrize(("image", "block", "attributes", "windows"), [
    ((5, 6), (2, 3), {}, 16),
    ((7, 5), (3, 2), {"strides": (2, 3), "pads": (1, 0, 2, 1)}, 8),
    ((9,), (3,), {"dilations": (2,)}, 5),
    ((3, 4, 5), (1, 2, 2), {"strides": (1, 2, 1)}, 24),
])  # fmt: skip
def test_windows(image: Any, block: Any, attributes: dict[str, Any], windows: int) -> None:
    net = Net()
    x = net.input("batch", 3 * int(np.prod(block)), windows)
    y = net("Col2Im", x, net.constant(ints(*image)), net.constant(ints(*block)), **attributes)
    for batch in (0, 1, 2):
        graph = net.graph(y).bound({"batch": batch})
        same(graph, random_inputs(graph))


def test_formats_and_what_does_not_fit() -> None:
    net = Net()
    x = net.input(2, 12, 16)
    formatted(net, net("Col2Im", x, net.constant(ints(5, 5)), net.constant(ints(2, 2))), 1)
    net = Net()
    net("Col2Im", net.input(2, 12, 15), net.constant(ints(5, 5)), net.constant(ints(2, 2)))
    with pytest.raises(ValueError, match=r"expected \[N, C times 4, 16\] of windows"):
        evaluate(net.graph(), {"x0": np.zeros((2, 12, 15), np.float32)})
