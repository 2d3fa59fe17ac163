"""Registry: names, errors, and the import loop."""

from pathlib import Path

import pytest

from lowbit.registry import Registry


def test_things_are_found_by_name() -> None:
    shapes: Registry[type] = Registry("shape")

    @shapes.register("square")
    class Square: ...

    assert shapes.get("square") is Square
    assert shapes.names() == ("square",)
    assert list(shapes) == [Square]
    assert len(shapes) == 1


def test_an_unknown_name_lists_the_known_ones() -> None:
    shapes: Registry[int] = Registry("shape")
    shapes.add("square", 4)
    with pytest.raises(ValueError, match="no shape is called 'circle'; known: square"):
        shapes.get("circle")


def test_the_nearest_name_is_told() -> None:
    shapes: Registry[str] = Registry("shape")
    shapes.add("square", "four")
    shapes.add("circle", "none")
    with pytest.raises(
        ValueError, match=r"'sqare' \(did you mean 'square'\?\); known: square, cir"
    ):
        shapes.get("sqare")


def test_a_name_is_given_once() -> None:
    shapes: Registry[int] = Registry("shape")
    shapes.add("square", 4)
    with pytest.raises(ValueError, match="already"):
        shapes.add("square", 5)


def test_every_module_below_a_package_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "things_of_a_test" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / "__init__.py").write_text(
        "from lowbit.registry import Registry\nthings = Registry('thing', 'things_of_a_test')\n"
    )
    (inner / "__init__.py").write_text("")
    (inner / "deep.py").write_text("from things_of_a_test import things\nthings.add('deep', 1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    from things_of_a_test import things  # pyright: ignore[reportMissingImports]

    assert things.names() == ("deep",)
