"""Files that cannot be read are refused before anything runs, and it is said why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowbit.graph import Session, unroll
from lowbit.graph.evaluate import evaluate
from lowbit.graph.onnx import from_onnx
from lowbit.graph.passes import fold, simplified
from lowbit.registry import extras

onnx = pytest.importorskip("onnx")

Shape = Sequence[int | str]


def model(
    *nodes: tuple[str, Sequence[str], Sequence[str], Mapping[str, Any]],
    inputs: Mapping[str, Shape] | None = None,
    constants: Mapping[str, Any] | None = None,
    output: str = "y",
    opset: int = 21,
) -> Any:
    helper = onnx.helper
    made = [helper.make_node(op, read, write, **more) for op, read, write, more in nodes]
    given = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (inputs or {"x": (2, 3)}).items()
    ]
    known = [onnx.numpy_helper.from_array(one, name) for name, one in (constants or {}).items()]
    results = [onnx.ValueInfoProto(name=output)]
    graph = helper.make_graph(made, "g", given, results, known)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def relu(**more: Any) -> Any:
    return model(("Relu", ["x"], ["y"], {}), **more)


def test_all_unknown_operators_are_named_at_once() -> None:
    one = model(
        ("Fancy", ["x"], ["a"], {"domain": "com.example"}),
        ("Unique", ["a"], ["b"], {}),
        ("Unique", ["b"], ["y"], {}),
    )
    with pytest.raises(NotImplementedError, match=r"Unique \(2\), com.example.Fancy \(1\)\. exp"):
        from_onnx(one)
    with pytest.raises(NotImplementedError, match=r"Linear \(1\)"):
        from_onnx(model(("Linear", ["x", "x"], ["y"], {})))


def test_nodes_of_training_are_refused() -> None:
    ratio, on = np.float32(0.5), np.bool_(True)
    dropped = ("Dropout", ["x", "r", "on"], ["y"], {})
    with pytest.raises(NotImplementedError, match="in training mode"):
        from_onnx(model(dropped, constants={"r": ratio, "on": on}))
    with pytest.raises(NotImplementedError, match="or can be, in training mode"):
        from_onnx(model(dropped, inputs={"x": (2, 3), "on": ()}, constants={"r": ratio}))
    assert from_onnx(model(dropped, constants={"r": ratio, "on": np.bool_(False)})).nodes


def test_second_outputs_are_refused_where_they_are_read() -> None:
    masked = ("Dropout", ["x"], ["a", "mask"], {})
    graph = from_onnx(model(masked, ("Relu", ["a"], ["y"], {})))
    assert [node.op for node in graph.nodes] == ["Relu"]
    with pytest.raises(NotImplementedError, match="asked for mask"):
        from_onnx(model(masked, ("Cast", ["mask"], ["y"], {"to": 1})))
    pooled = ("MaxPool", ["x"], ["a", "y"], {"kernel_shape": [2]})
    with pytest.raises(NotImplementedError, match="first output of MaxPool"):
        from_onnx(model(pooled, inputs={"x": (1, 2, 4)}))


def test_what_onnx_defines_by_others_is_written_out() -> None:
    more = {"q_num_heads": 1, "kv_num_heads": 1, "softcap": 2.0}
    one = model(("Attention", ["x", "x", "x"], ["y"], more), inputs={"x": (1, 2, 3)}, opset=23)
    assert {"MatMul", "Softmax", "Tanh"} <= {node.op for node in from_onnx(one).nodes}
    assert not {"Attention"} & {node.op for node in from_onnx(one).nodes}


def test_bfloat16_is_refused_where_nodes_read_it() -> None:
    """What they make would have to be rounded to it. Constants that are cast are none to them."""
    bfloat16, float32 = onnx.TensorProto.BFLOAT16, onnx.TensorProto.FLOAT
    there, back = {"to": bfloat16}, {"to": float32}
    cast = ("Cast", ["x"], ["a"], there)
    squared = ("Mul", ["a", "a"], ["b"], {})
    with pytest.raises(NotImplementedError, match=r"of bfloat16, as 'a' would be: export"):
        from_onnx(model(cast, squared, ("Cast", ["b"], ["y"], back)))
    one = model(("Relu", ["x"], ["y"], {}))
    one.graph.input[0].type.tensor_type.elem_type = bfloat16
    with pytest.raises(NotImplementedError, match=r"of bfloat16, as 'x' would be"):
        from_onnx(one)
    weight = np.array([1.1, 2.2, 3.3], np.float32).astype(ml_dtypes.bfloat16)
    scaled = ("Mul", ["x", "w"], ["y"], {})
    with pytest.raises(NotImplementedError, match=r"of bfloat16, as 'w' would be"):
        from_onnx(model(scaled, constants={"w": weight}))
    read = ("Cast", ["w"], ["v"], back), ("Mul", ["x", "v"], ["y"], {})
    graph = from_onnx(model(*read, constants={"w": weight}))
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(evaluate(graph, {"x": x})["y"], x * weight.astype(np.float32))
    rounded = Session(from_onnx(model(cast, ("Cast", ["a"], ["y"], back))), threads=1)(x * 1.001)
    np.testing.assert_array_equal(rounded, x)
    last = from_onnx(model(("Cast", ["x"], ["y"], there)))
    assert Session(last, threads=1)(x).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("op", ["If", "Loop", "Scan"])
def test_control_flow_is_refused(op: str) -> None:
    body = relu().graph
    one = model((op, ["x"], ["y"], {"body": body}))
    with pytest.raises(NotImplementedError, match=f"{op} decides on data what is computed"):
        from_onnx(one)


SQUARE = np.array([1 << 20, 1 << 20])
ONE = np.ones((1, 1), np.float32)
WIDE = np.ones((1, 1 << 16), np.float32)
MANY = (np.int64(0), np.int64(1 << 40), np.int64(1))


@pytest.mark.parametrize(
    ("op", "constants"),
    [
        ("ConstantOfShape", [SQUARE]),
        ("Range", MANY),
        ("OneHot", [MANY[0], MANY[1], WIDE[0, :2]]),
    ],
)
def test_constants_that_take_terabytes_are_refused(op: str, constants: Sequence[Any]) -> None:
    """What no kernel makes: a file of a few bytes asks for it."""
    named = dict(zip("abc", constants, strict=False))
    nodes = [(op, [*named], ["d"], {}), ("Cast", ["d"], ["e"], {"to": 1})]
    whole = model(*nodes, ("Add", ["e", "x"], ["y"], {}), inputs={"x": (1,)}, constants=named)
    with pytest.raises(ValueError, match=f"{op} .* bytes of nothing but constants"):
        from_onnx(whole)


@pytest.mark.parametrize(
    ("op", "inputs", "constants"),
    [
        ("Tile", ["a", "s"], {"a": ONE, "s": SQUARE}),
        ("Expand", ["a", "s"], {"a": ONE, "s": SQUARE}),
        ("Add", ["a", "s"], {"a": WIDE, "s": WIDE.T}),
        ("MatMul", ["s", "a"], {"a": WIDE, "s": WIDE.T}),
        ("Gather", ["a", "s"], {"a": WIDE, "s": np.zeros(1 << 16, np.int64)}),
        ("Pad", ["a", "s"], {"a": ONE, "s": np.array([0, 0, 1 << 20, 1 << 20])}),
    ],
)
def test_large_constants_are_left_to_kernels(
    op: str, inputs: Sequence[str], constants: Mapping[str, Any]
) -> None:
    whole = model(
        (op, inputs, ["c"], {}), ("Add", ["c", "x"], ["y"], {}),
        inputs={"x": (1, 1)}, constants=constants,
    )  # fmt: skip
    graph = from_onnx(whole)
    assert [node.op for node in graph.nodes] == [op, "Add"]
    assert sum(one.nbytes for one in graph.constants.values()) < 1 << 20


def test_constants_that_grow_from_node_to_node_have_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fold, "_FOLDED_BYTES", 1 << 16)
    doubled = [("Concat", [f"c{i}"] * 2, [f"c{i + 1}"], {"axis": 0}) for i in range(30)]
    last = ("Add", ["c30", "x"], ["y"], {})
    graph = from_onnx(
        model(*doubled, last, inputs={"x": (1,)}, constants={"c0": np.ones(8, np.float32)})
    )
    assert sum(one.nbytes for one in graph.constants.values()) <= 1 << 17
    assert [node.op for node in graph.nodes][-2:] == ["Concat", "Add"]
    shape = np.array([1 << 13])
    filled = [
        ("ConstantOfShape", ["s"], [f"c{i}"], {"value": onnx.numpy_helper.from_array(shape + i)})
        for i in range(40)
    ]
    joined = ("Concat", [name for _, _, (name,), _ in filled], ["d"], {"axis": 0})
    whole = model(*filled, joined, ("Cast", ["d"], ["y"], {"to": 1}), constants={"s": shape})
    with pytest.raises(ValueError, match="are left of what they may take"):
        from_onnx(whole)


def test_functions_and_loops_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unroll, "MOST_NODES", 1000)
    helper, kind = onnx.helper, onnx.TensorProto
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("f", 1)]
    whole = model(("F9", ["x"], ["y"], {"domain": "f"}))
    whole.opset_import.append(opsets[1])
    for level in range(10):
        names = ["a", *map(str, range(9)), "b"]
        called = [
            helper.make_node(f"F{level - 1}" if level else "Neg", [read], [write],
                             domain="f" if level else "")
            for read, write in pairwise(names)
        ]  # fmt: skip
        whole.functions.append(helper.make_function("f", f"F{level}", "a", "b", called, opsets))
    with pytest.raises(ValueError, match="its functions are 10,000,000,000 nodes"):
        from_onnx(whole)
    whole.functions[0].node[0].op_type, whole.functions[0].node[0].domain = "F9", "f"
    with pytest.raises(ValueError, match="calls itself"):
        from_onnx(whole)

    def turn(nodes: Sequence[Any], name: str) -> Any:
        going = helper.make_node("Identity", ["go"], ["on"])
        inputs = [
            helper.make_tensor_value_info("i", kind.INT64, []),
            helper.make_tensor_value_info("go", kind.BOOL, []),
        ]
        outputs = [helper.make_tensor_value_info("on", kind.BOOL, [])]
        return helper.make_graph([going, *nodes], name, inputs, outputs)

    body = turn([], "0")
    for level in range(3):
        body = turn([helper.make_node("Loop", ["n", "t"], [], body=body)], str(level))
    looped = model(
        ("Loop", ["n", "t"], [], {"body": body}), ("Relu", ["x"], ["y"], {}),
        constants={"n": np.int64(4000), "t": np.True_},
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"its loops are more than .* export it without loops"):
        from_onnx(looped)


def test_shapes_that_do_not_fit_name_the_node() -> None:
    weight = np.zeros((4, 5, 3, 3), np.float32)
    node = ("Conv", ["x", "w"], ["y"], {"name": "stem"})
    one = model(node, inputs={"x": (1, 3, 8, 8)}, constants={"w": weight})
    with pytest.raises(ValueError, match=r"Conv 'stem' of inputs \[1, 3, 8, 8\], \[4, 5, 3, 3\]"):
        from_onnx(one)
    graph = from_onnx(model(node, inputs={"x": ("n", 5, 2, 2)}, constants={"w": weight}))
    with pytest.raises(ValueError, match=r"windows of \(3, 3\) are larger than the padded image"):
        simplified(graph.bound({"n": 2}))
    with pytest.raises(ValueError, match="'x' has the size 'n': give it a value"):
        graph.bound({})


def test_a_shape_that_depends_on_data_is_refused() -> None:
    one = model(
        ("Cast", ["x"], ["s"], {"to": 7}), ("Reshape", ["x", "s"], ["y"], {}), inputs={"x": (2,)}
    )
    with pytest.raises(ValueError, match="depends on the numbers of 's'"):
        from_onnx(one)


def test_a_circle_and_a_missing_value_are_refused() -> None:
    circle = model(("Add", ["x", "b"], ["a"], {}), ("Relu", ["a"], ["b"], {}), output="b")
    with pytest.raises(ValueError, match="reads 'b', which nothing before it makes"):
        from_onnx(circle)
    missing = model(("MatMul", ["x", "weight"], ["y"], {}))
    with pytest.raises(ValueError, match=r"reads 'weight'.*missing"):
        from_onnx(missing)
    with pytest.raises(ValueError, match="nothing makes the output 'z'"):
        from_onnx(relu(output="z"))


@pytest.mark.parametrize("opset", [9, 12, 24])
def test_other_opsets_are_refused(opset: int) -> None:
    with pytest.raises(ValueError, match=f"opset {opset} .* only 13 to 23"):
        from_onnx(relu(opset=opset))


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    weight = np.ones((3, 40), np.float32)
    whole = model(("MatMul", ["x", "w"], ["y"], {}), constants={"w": weight}).SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.onnx is no ONNX file, or was cut short"):
            from_onnx(path)
    with pytest.raises(ValueError, match="the model is no ONNX file"):
        from_onnx(b"Lorem ipsum")
    with pytest.raises(FileNotFoundError):
        from_onnx(tmp_path / "none.onnx")


def external(location: str, **more: Any) -> Any:
    """A product with a weight in another file."""
    one = model(("MatMul", ["x", "w"], ["y"], {}), constants={"w": np.zeros((3, 4), np.float32)})
    tensor = one.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=str(value))
    return one


def test_data_beside_the_file_is_read(tmp_path: Path) -> None:
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    (tmp_path / "w.bin").write_bytes(b"12345678" + weight.tobytes())
    path, x = tmp_path / "m.onnx", np.ones((2, 3), np.float32)
    onnx.save(external("w.bin", offset=8, length=48), path)
    np.testing.assert_array_equal(evaluate(from_onnx(str(path)), {"x": x})["y"], x @ weight)
    onnx.save(external("w.bin", offset=16, length=48), path)
    with pytest.raises(ValueError, match=r"w\.bin was cut short"):
        from_onnx(path)
    onnx.save(external("w.bin", offset=8, length=40), path)
    with pytest.raises(ValueError, match="the data of 'w' is damaged"):
        from_onnx(path)
    for wrong in ({"offset": -5}, {"offset": "abc"}, {"length": -1}):
        onnx.save(external("w.bin", **wrong), path)
        with pytest.raises(ValueError, match="is at no place in a file"):
            from_onnx(path)
    onnx.save(external("w.bin", length=10**12), path)
    with pytest.raises(ValueError, match=r"w\.bin was cut short"):
        from_onnx(path)
    onnx.save(external("absent.bin"), path)
    with pytest.raises(FileNotFoundError):
        from_onnx(path)
    with pytest.raises(ValueError, match="pass the path"):
        from_onnx(external("w.bin"))


@pytest.mark.parametrize("location", ["../secret", "{absolute}", "link", "a/../../secret"])
def test_data_outside_of_the_folder_is_refused(tmp_path: Path, location: str) -> None:
    secret, folder = tmp_path / "secret", tmp_path / "models"
    secret.write_bytes(bytes(48))
    folder.mkdir()
    (folder / "link").symlink_to(secret)
    path = folder / "m.onnx"
    onnx.save(external(location.format(absolute=secret)), path)
    with pytest.raises(ValueError, match="outside of the ONNX file's folder: this is refused"):
        from_onnx(path)


def test_operators_of_onnx_runtimes_that_are_wrong_are_named() -> None:
    for inputs, attributes in ((["x"], {}), (["x"] * 9, {"alpha": [1.0, 2.0]})):
        one = model(("QGemm", inputs, ["y"], attributes), inputs={"x": (2, 3)})
        one.graph.node[0].domain = "com.microsoft"
        with pytest.raises(ValueError, match="QGemm 'y': inputs or attributes are wrong"):
            from_onnx(one)


def test_a_damaged_file_is_read_or_refused() -> None:
    """Whatever bytes are changed, the errors are those that the page names."""
    weight = np.ones((4, 3, 3, 3), np.float32)
    vectors = {name: np.ones(4, np.float32) for name in "abcd"}
    whole = model(
        ("Conv", ["x", "w"], ["h"], {"pads": [1, 1, 1, 1]}),
        ("BatchNormalization", ["h", *"abcd"], ["i"], {}),
        ("MaxPool", ["i"], ["y"], {"kernel_shape": [2, 2], "strides": [2, 2]}),
        inputs={"x": ("n", 3, 8, 8)}, constants={"w": weight, **vectors},
    ).SerializeToString()  # fmt: skip
    rng = np.random.default_rng(5)
    refused = 0
    for _ in range(500):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=3):
            damaged[place] = rng.integers(256)
        try:
            from_onnx(bytes(damaged))
        except (ValueError, NotImplementedError):
            refused += 1
    assert 50 < refused < 450


def test_other_kinds_of_values_are_refused() -> None:
    one = relu()
    one.graph.input[0].type.CopyFrom(onnx.helper.make_sequence_type_proto(one.graph.input[0].type))
    with pytest.raises(NotImplementedError, match="'x' is no tensor"):
        from_onnx(one)
    one = relu()
    one.graph.input[0].type.tensor_type.ClearField("shape")
    with pytest.raises(ValueError, match="'x' has no shape"):
        from_onnx(one)


def test_functions_of_a_file_are_written_out() -> None:
    helper = onnx.helper
    body = [helper.make_node("Relu", ["a"], ["b"]), helper.make_node("Add", ["a", "b"], ["c"])]
    opsets = [helper.make_opsetid("", 21)]
    function = helper.make_function("own", "Twice", ["a"], ["c"], body, opsets)
    one = model(("Twice", ["x"], ["y"], {"domain": "own"}))
    one.functions.append(function)
    one.opset_import.append(helper.make_opsetid("own", 1))
    x = np.array([[-1, 2, 3]], np.float32)
    found = evaluate(from_onnx(one), {"x": x})
    np.testing.assert_array_equal(found["y"], x + np.maximum(x, 0))


def test_without_onnx_it_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "installed", lambda module: module != "onnx")
    with pytest.raises(ModuleNotFoundError, match=r"needs onnx; in a clone .* '\.\[onnx\]'"):
        from_onnx("any.onnx")
