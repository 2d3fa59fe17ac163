"""Without Triton and jaxtyping (the extra "lab") the checker's tests are left out."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = (
    []
    if find_spec("triton") and find_spec("jaxtyping")
    else [
        "test_check_*",
        "test_known_*",
        "test_learn*",
        "test_notebooks*",
        "test_prove*",
        "test_puzzles*",
        "test_view*",
        "test_watch*",
    ]
)
