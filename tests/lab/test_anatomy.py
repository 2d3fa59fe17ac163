"""The anatomy of a kernel: rows lead back to their lines, and the code is what runs."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("jaxtyping")

from lowbit import isa
from lowbit.jit import compile as compiler
from lowbit.lab.anatomy import mca, page
from lowbit.lab.anatomy.lines import lined_ir
from lowbit.lab.anatomy.named import anatomy_of
from lowbit.lab.product_kernels import product_kernels

SIZES = {"m": 33, "n": 40, "k_size": 70}


def _instructions(text: str) -> list[str]:
    rows = (re.sub(r"\s*#.*", "", row) for row in text.splitlines())
    return [row for row in rows if re.match(r"^\s+[a-z]", row)]


@pytest.mark.parametrize("name", ["generic", "avx2", "amx"])
def test_lines_do_not_change_the_code(name: str) -> None:
    if isa.named(name).is_foreign:
        pytest.skip("another architecture's")
    asked = product_kernels()[name].kernel
    static = asked.static(SIZES)
    lined = compiler.assembly(lined_ir(asked.kernel, isa.named(name), **static), isa.named(name))
    assert _instructions(lined) == _instructions(asked.kernel.assembly(isa.named(name), **static))


def test_a_product_and_its_page() -> None:
    found = anatomy_of("product:generic", "33x70:70x40", 90, time=False)
    assert [pane.title for pane in found.panes] == ["source", "LLVM IR, optimized", "assembly"]
    source = {at: text for text, at in found.panes[0].rows if at is not None}
    for pane in found.panes[1:]:
        linked = [at for _, at in pane.rows if at is not None]
        assert len(linked) > len(pane.rows) / 4
        assert set(linked) <= set(source)
    # What is known to multiply leads to a line that multiplies.
    products = {
        source[at] for text, at in found.panes[1].rows if at is not None and " mul " in text
    }
    assert any("*" in line for line in products)
    plain = json.loads(found.to_json())
    assert plain["kernel"] == "product:generic"
    made = page.page(found)
    assert "<script>" in made
    assert not re.search(r"(src|href)=\"(?!data:)", made)


def test_a_triton_kernel() -> None:
    pytest.importorskip("triton")
    found = anatomy_of("add_constant", "", 90)
    titles = [pane.title for pane in found.panes]
    assert titles[:4] == ["source", "TTIR", "TTGIR", "PTX"]
    source = {at: text for text, at in found.panes[0].rows if at is not None}
    loads = [(text, at) for pane in found.panes[1:4] for text, at in pane.rows if "load" in text]
    loads += [(text, at) for text, at in found.panes[3].rows if "ld.global" in text]
    assert loads
    assert all("tl.load" in source[at] for text, at in loads if at is not None)


def test_unknown_names_and_an_absent_llvm_mca(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no kernel product:none; there are"):
        anatomy_of("product:none", "1x1:1x1", 90)
    with pytest.raises(ValueError, match="is not understood"):
        anatomy_of("product:generic", "1x1", 90)
    monkeypatch.setattr(mca, "_tool", lambda: None)
    assert "apt-get install llvm-16" in mca.verdict(["nop"], isa.named("generic"))[0]


def test_a_copy_of_a_triton_kernel_is_shown_from_its_own_file(tmp_path: Path) -> None:
    """Triton's cache, which knows a kernel by its text and line, has the first file's."""
    pytest.importorskip("triton")
    from lowbit.kernels.triton.ahead import compile_ahead

    text = "import triton\n@triton.jit\ndef nothing(x):\n    tl.store(x, tl.load(x) + 1)\n"
    for name in ("one", "other"):
        path = tmp_path / f"{name}.py"
        path.write_text("import triton.language as tl\n" + text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert str(path) in compile_ahead(module.nothing, {"x": "*fp32"}, 80).stages["ttir"]
