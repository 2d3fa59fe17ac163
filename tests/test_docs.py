"""The README and the pages of docs/: their code runs and prints what they say; links lead on."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs" / "reference").glob("*.md"))
# A python block, and the text block right behind it, which is what it prints.
_BLOCK = re.compile(
    r"^```python\n(.*?)^```$(?:\n\n^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """Code, the line of its page that it begins on, and what it should print."""

    code: str
    line: int
    printed: str


def _blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match[1], text.count("\n", 0, match.start(1)), match[2] or "")
        for match in _BLOCK.finditer(text)
    ]


@pytest.mark.deep("check.md", "networks.md", "search.md", "start-arrays.md", "torch.md")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if _blocks(page)], ids=lambda page: page.name
)
def test_code_prints_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = _blocks(page)
    if any("torch" in block.code for block in blocks):
        pytest.importorskip("torch")
        pytest.importorskip("safetensors")
    if any("onnx" in block.code for block in blocks):
        pytest.importorskip("onnx")
    x86 = llvm.get_process_triple().startswith("x86_64")
    if not x86 and any(".assembly(" in block.code for block in blocks):
        pytest.skip("the page looks at x86 code, which LLVM here does not generate")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Blank lines in front, so that a traceback names the line of the page.
            source = "\n" * block.line + block.code
            exec(compile(source, str(page), "exec", dont_inherit=True), names)
        assert printed.getvalue() == block.printed, f"{page.name}, line {block.line + 1}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = _LINK.findall(page.read_text(encoding="utf-8"))
    local = [target.partition("#")[0] for target in targets if "://" not in target]
    assert local, f"{page.name} should lead on to at least one other file"
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing, f"{page.name} links to {missing}"


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        path = page.relative_to(ROOT / "docs").as_posix()
        assert path == "README.md" or f"]({path})" in index, path


# A command in backticks, in an indented block, or in a block of the shell.
_COMMAND = re.compile(
    r"(?:`|^ {4}(?:.venv/bin/)?|^\$ )lowbit ((?:[a-z][a-z0-9_-]* ?)+)[^`\n]*", re.MULTILINE
)
_SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _in_shells(text: str) -> str:
    """A page whose blocks of the shell have a prompt in front of each line."""
    return _SHELL.sub(lambda block: re.sub(r"^", "$ ", block[1], flags=re.MULTILINE), text)


def test_every_command_that_is_named_exists() -> None:
    typer = pytest.importorskip("typer")
    from lowbit.cli import app

    root = typer.main.get_command(app)
    seen = 0
    for page in PAGES:
        for match in _COMMAND.finditer(_in_shells(page.read_text(encoding="utf-8"))):
            command, words = root, match[1].split()
            while words and hasattr(command, "get_command"):
                _, found, words = command.resolve_command(typer.Context(command), words)
                assert found is not None, f"{page.name}: {match[0]}"
                command, seen = found, seen + 1
            known = {
                option for one in command.params for option in (*one.opts, *one.secondary_opts)
            }
            used = set(re.findall(r"(?<!\S)--[a-z-]+", match[0].partition("#")[0]))
            assert used <= known | {"--help"}, f"{page.name}: {match[0]}"
    assert seen > 100


def test_every_make_target_that_is_named_exists() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        text = _in_shells(page.read_text(encoding="utf-8"))
        named = re.findall(r"(?:`|^ {4}|^\$ )make ([a-z-]+)", text, re.MULTILINE)
        assert set(named) <= known, page.name
