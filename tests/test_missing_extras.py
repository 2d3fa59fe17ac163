"""Test files are skipped where what an extra installs is missing, and fail where it is broken."""

from __future__ import annotations

from pathlib import Path

import missing_extras
import pytest

pytest_plugins = ("pytester",)

FILES = {
    "needs_directly": "import faiss\nVALUE = 1\ndef test(): pass\n",
    "needs_by_another": "from test_needs_directly import VALUE\ndef test(): pass\n",
    "needs_part": "import faiss.contrib.missing\ndef test(): pass\n",
    "asks": "import pytest\npytest.importorskip('faiss')\ndef test(): pass\n",
    "needs_nothing": "def test(): pass\n",
    "misspelt": "import fais\ndef test(): pass\n",
    "wrong_name": "from lowbit import no_such_function\ndef test(): pass\n",
}
BLOCK = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "faiss":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.modules.pop("faiss", None)
sys.meta_path.insert(0, Finder())
"""


def test_files_without_their_extra_are_skipped(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    helpers = Path(missing_extras.__file__).parent
    pytester.makeini(f"[pytest]\npythonpath = {helpers} .\naddopts = -p missing_extras")
    pytester.makeconftest(BLOCK)
    pytester.makepyfile(**{f"test_{name}": text for name, text in FILES.items()})
    monkeypatch.setattr("sys.meta_path", __import__("sys").meta_path[:])
    outcome = pytester.runpytest_inprocess("-rs", "--continue-on-collection-errors")
    outcome.assert_outcomes(passed=1, skipped=4, errors=2)
    outcome.stdout.fnmatch_lines(["*No module named 'fais'*", "*faiss is not installed*"])
