"""What `make docs` does besides mkdocs: hooks, named in mkdocs.yml.

- The navigation is docs/README.md: each heading with a list of pages is a section, in its order. A
  new page is in one list only.
- Pages link to files outside of docs/, sources and tests mostly. The site gets a page for each of
  these files, so that no link leads out of it.
- The commands of the command line are put into reference/cli.md, and into other pages of the
  reference the public names of a package that they do not have yet.
- The rows in which a peer is ahead are put below the figures of docs/behind.md.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
_COMMANDS = "<!-- the commands: tools/site.py -->"
_EVERY_ROW = "<!-- every row: tools/site.py -->"
_RECORD = re.compile(r"\]\((records/[^)]*)\)")
_REST = re.compile(r"<!-- the rest of ([\w.]+) -->")
_LANGUAGES = {".py": "python", ".json": "json", ".md": "markdown", ".toml": "toml"}


def sections(index: str) -> list[tuple[str, list[str]]]:
    """The headings of the index that have pages below them, and these, by their paths."""
    found: list[tuple[str, list[str]]] = []
    for line in index.splitlines():
        if line.startswith("## "):
            found.append((line[3:], []))
        elif found and line.startswith("- [") and (link := _LINK.search(line)):
            found[-1][1].append(link[1])
    return [(title, pages) for title, pages in found if pages]


def on_config(config: Any) -> Any:
    nav: list[Any] = [{"Home": "README.md"}]
    for title, pages in sections((DOCS / "README.md").read_text(encoding="utf-8")):
        entries: list[str] = []
        for page in pages:
            entries.append(page)
            if page.endswith("/README.md"):  # a folder, whose index stands for all of it
                others = sorted((DOCS / page).parent.glob("[!R]*.md"))
                entries += [one.relative_to(DOCS).as_posix() for one in others]
        nav.append({title: entries})
    config.nav = nav
    return config


def _outside(source: str, target: str) -> str | None:
    """The path from the root of what a page links to, if it is there and not in docs/."""
    if "://" in target or target.startswith("#"):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), target))
    return path if not path.startswith("docs/") and (ROOT / path).exists() else None


def _shown(path: str) -> str:
    """A page with a file, or with the names in a folder."""
    found = ROOT / path
    if found.is_dir():
        body = "\n".join(sorted(one.name for one in found.iterdir() if one.name[0] not in "._"))
        language = "text"
    else:
        body, language = found.read_text(encoding="utf-8"), _LANGUAGES.get(found.suffix, "text")
    fence = "`" * 6
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n{fence}{language}\n{body}\n{fence}\n"


def _address(path: str) -> str:
    return f"source/{path}.md"


def on_files(files: Any, config: Any) -> Any:
    wanted: set[str] = set()
    for one in files.documentation_pages():
        for target, _ in _LINK.findall(one.content_string):
            if path := _outside(one.src_uri, target):
                wanted.add(path)
    for path in sorted(wanted):
        made = File.generated(config, _address(path), content=_shown(path))
        made.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(made)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    source = page.file.src_uri
    if source.startswith("source/"):
        return markdown
    if source == "reference/cli.md":
        markdown = markdown.replace(_COMMANDS, commands())
    if _EVERY_ROW in markdown:
        markdown = markdown.replace(_EVERY_ROW, behind(_RECORD.findall(markdown)))
    markdown = _REST.sub(lambda match: rest(match[1], markdown), markdown)

    def led(match: re.Match[str]) -> str:
        path = _outside(source, match[1])
        if path is None:
            return match[0]
        return f"]({posixpath.relpath(_address(path), posixpath.dirname(source))})"

    return _LINK.sub(led, markdown)


def behind(links: list[str]) -> str:
    """The rows of these records in which a peer is ahead."""
    from lowbit_lab.bench.core.compare import read, rows_behind

    return rows_behind({link: read(DOCS / link) for link in links})


def rest(package: str, page: str) -> str:
    """The public names of a package that a page does not have, for mkdocstrings."""
    tree = ast.parse(ROOT.joinpath("src", *package.split("."), "__init__.py").read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = (f"{package}.{name}" for name in ast.literal_eval(node.value) if name[0] != "_")
            return "\n".join(f"::: {name}" for name in names if f"::: {name}\n" not in page)
    raise ValueError(f"{package} has no __all__")


def commands() -> str:
    """Every command of the command line: what it does, how it is called, its options."""
    import typer

    from lowbit.cli import app

    def told(command: Any, words: str) -> list[str]:
        context = typer.Context(command, info_name=words)
        lines = [f"## {words}", command.help or "", f"    {command.get_usage(context)[7:]}"]
        rows = [
            ("`" + ", ".join(one.opts) + "`", " ".join(one.help.split()))
            for one in command.get_params(context)
            if getattr(one, "help", None) and one.name != "help"
        ]
        if rows:
            lines.append(
                "| option | what it says |\n|---|---|\n"
                + "\n".join(f"| {a} | {b} |" for a, b in rows)
            )
        for name in getattr(command, "list_commands", lambda _: [])(context):
            lines += told(command.get_command(context, name), f"{words} {name}")
        return lines

    return "\n\n".join(told(typer.main.get_command(app), "lowbit"))
