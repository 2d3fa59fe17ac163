"""Recurrent layers compute what ONNX Runtime computes."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nets import Net, random_inputs, with_formats

from lowbit.graph import Session, load, save
from lowbit.graph.evaluate import evaluate
from lowbit.graph.onnx import from_onnx
from lowbit.isa import available

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
STEPS, BATCH, K, HIDDEN = 5, 3, 6, 4
F = np.float32
VARIANTS: list[tuple[str, dict[str, Any], str]] = [
    ("RNN", {"activations": ["Relu"], "clip": 0.4}, "BLH"),
    ("RNN", {"activations": ["Affine"], "activation_alpha": [0.5], "activation_beta": [0.1]}, "B"),
    ("RNN", {"direction": "bidirectional", "activations": ["LeakyRelu", "ScaledTanh"],
             "activation_alpha": [0.2, 0.7], "activation_beta": [1.3]}, "B"),
    ("GRU", {}, "BLH"),
    ("GRU", {"linear_before_reset": 1, "direction": "bidirectional"}, "BLH"),
    ("GRU", {"linear_before_reset": 1, "direction": "reverse", "clip": 0.3}, "B"),
    ("GRU", {"activations": ["HardSigmoid", "Softsign"]}, "BH"),
    ("LSTM", {"direction": "bidirectional"}, "BLHCP"),
    ("LSTM", {"direction": "reverse"}, "LHC"),
    ("LSTM", {"clip": 0.3}, "B"),
    ("LSTM", {"input_forget": 1}, "BHC"),
    ("LSTM", {"activations": ["Sigmoid", "Relu", "Tanh"]}, "BP"),
]  # fmt: skip
"""Operator, attributes, and the inputs behind R: bias, lengths, initial h and c, peepholes."""


def network(
    op: str, attributes: dict[str, Any], more: str, constant: bool, shape: Any = (STEPS, BATCH, K)
) -> tuple[Any, dict[str, np.ndarray]]:
    """A layer, with its weights as constants or as inputs, and inputs for it."""
    rng = np.random.default_rng(len(more))
    both = 2 if attributes.get("direction") == "bidirectional" else 1
    rows, (steps, batch, _) = GATES[op] * HIDDEN, (STEPS, BATCH, K)
    arrays = {
        "x": rng.normal(size=(steps, batch, K)), "w": rng.normal(size=(both, rows, K)) / 2,
        "r": rng.normal(size=(both, rows, HIDDEN)) / 2,
        "B": rng.normal(size=(both, 2 * rows)) if "B" in more else None,
        "L": np.array([5, 1, 3]) if "L" in more else None,
        "H": rng.normal(size=(both, batch, HIDDEN)) if "H" in more else None,
        "C": rng.normal(size=(both, batch, HIDDEN)) if "C" in more else None,
        "P": rng.normal(size=(both, 3 * HIDDEN)) if "P" in more else None,
    }  # fmt: skip
    given = {k: v.astype(np.int32 if k == "L" else F) for k, v in arrays.items() if v is not None}
    names = [k if k in given else "" for k in arrays][: 6 if op != "LSTM" else 8]
    known = {k: given.pop(k) for k in tuple(given) if constant and k in "wrBP"}
    values = [
        onnx.helper.make_tensor_value_info(
            k, onnx.TensorProto.INT32 if k == "L" else onnx.TensorProto.FLOAT,
            shape if k == "x" else v.shape,
        )
        for k, v in given.items()
    ]  # fmt: skip
    outputs = ["y", "h", "c"] if op == "LSTM" else ["y", "h"]
    node = onnx.helper.make_node(op, names, outputs, hidden_size=HIDDEN, **attributes)
    graph = onnx.helper.make_graph(
        [node], "layer", values, [onnx.ValueInfoProto(name=one) for one in outputs],
        [onnx.numpy_helper.from_array(one, name) for name, one in known.items()],
    )  # fmt: skip
    opset = onnx.helper.make_opsetid("", 21)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=10), given


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize(("op", "attributes", "more"), VARIANTS)
def test_a_recurrent_layer(op: str, attributes: dict[str, Any], more: str, constant: bool) -> None:
    model, inputs = network(op, attributes, more, constant)
    theirs = onnxruntime.InferenceSession(model.SerializeToString())
    names = [one.name for one in theirs.get_outputs()]
    expected = dict(zip(names, theirs.run(None, inputs), strict=True))
    graph = from_onnx(model)
    for made in (evaluate(graph, inputs), Session(graph, threads=1).run(**inputs)):
        for name, one in expected.items():
            np.testing.assert_allclose(made[name], one, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.deep("avx2", "avx512", "avx2_vnni", "amx*")
@pytest.mark.parametrize("isa", available())
def test_other_lengths_and_a_file(isa: str, tmp_path: Path) -> None:
    model, _ = network("LSTM", {"direction": "bidirectional"}, "B", True, ("steps", "batch", K))
    theirs = onnxruntime.InferenceSession(model.SerializeToString())
    save(from_onnx(model), tmp_path / "network")
    session = Session(load(tmp_path / "network"), threads=2, isa=isa)
    for steps, batch in ((1, 1), (7, 2), (4, 17)):
        x = np.random.default_rng(steps).normal(size=(steps, batch, K)).astype(F)
        for made, one in zip(session(x), theirs.run(None, {"x": x}), strict=True):
            np.testing.assert_allclose(made, one, rtol=1e-4, atol=1e-5)
    y, h, c = session(np.zeros((0, 2, K), F))
    assert (y.shape, h.shape, c.shape) == ((0, 2, 2, HIDDEN), (2, 2, HIDDEN), (2, 2, HIDDEN))
    assert not h.any()
    assert session.profile(np.zeros((2, 1, K), F), runs=1)


def test_shapes_and_activations_that_do_not_fit() -> None:
    def layer(**attributes: Any) -> Net:
        net = Net()
        x, w = net.input(2, 3, K), net.weight(1, 4 * HIDDEN, K, bits=None)
        net("LSTM", x, w, net.weight(1, 4 * HIDDEN, HIDDEN, bits=None), **attributes)
        return net

    x = np.zeros((2, 3, K), F)
    with pytest.raises(ValueError, match=r"LSTM 'v0'.*expected W \[2, 16, 6\]"):
        Session(layer(direction="bidirectional").graph())(x)
    with pytest.raises(ValueError, match="the activation 'Fancy' is unknown"):
        evaluate(layer(activations=("Fancy",)).graph(), {"x0": x})


@pytest.mark.deep("*-True")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_what_pytorch_exports(kind: str, dynamo: bool) -> None:
    torch = pytest.importorskip("torch")
    if dynamo:
        pytest.importorskip("onnxscript")
    torch.manual_seed(0)

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = getattr(torch.nn, kind)(
                K, HIDDEN, num_layers=2, batch_first=True, bidirectional=True
            )
            self.head = torch.nn.Linear(2 * HIDDEN, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.layers(x)[0][:, -1])

    network, x, file = Network().eval(), torch.randn(2, 5, K), io.BytesIO()
    torch.onnx.export(network, (x,), file, input_names=["x"], dynamo=dynamo, verbose=False)
    with torch.no_grad():
        expected = network(x).numpy()
    session = Session(from_onnx(file.getvalue()), threads=1)
    np.testing.assert_allclose(session(x.numpy()), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("op", GATES)
def test_a_layer_between_products_of_8_bits(op: str, dtype: str) -> None:
    net = Net()
    rows = GATES[op] * HIDDEN
    x = net("Linear", net.input(STEPS, BATCH, 7), net.weight(K, 7), net.bias(K))
    weights = net.weight(1, rows, K, bits=None), net.weight(1, rows, HIDDEN, bits=None)
    y = net("Reshape", net(op, x, *weights), net.constant(np.array([STEPS, BATCH, HIDDEN])))
    graph = net.graph(net("Linear", y, net.weight(9, HIDDEN), net.bias(9)))
    quantized = with_formats(graph, dtype=dtype)
    inputs = random_inputs(quantized)
    (expected,) = evaluate(quantized, inputs).values()
    made = Session(quantized, threads=1)(**inputs)
    assert np.abs(made - expected).max() <= 0.02 * np.abs(expected).max()
