"""What is said about this machine."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from lowbit import isa
from lowbit.isa import SETS, TABLE, host


def test_features_that_linux_lists_on_aarch64(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM does not report them there, so they are read from the system."""
    listed = "fp asimd evtstrm aes asimddp sve i8mm bf16"
    monkeypatch.setattr(host, "_cpuinfo", lambda field: listed if field == "Features" else "")
    monkeypatch.setattr(host.llvm, "get_host_cpu_features", lambda: {"neon": True, "sve": False})
    host.features.cache_clear()
    try:
        assert host.features() == {"neon", "dotprod", "i8mm"}
    finally:
        host.features.cache_clear()


def _answer(answers: dict[int, Any], others: Any, leaf: int, sub_leaf: int) -> Any:
    return answers.get(leaf, others)


@pytest.mark.skipif(not host.is_linux_x86(), reason="LLVM is asked for all features here")
def test_cpuid_agrees_with_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    known = host._from_cpuid()
    assert {name for name, has in known.items() if has} == host.features() & set(known)
    assert known.keys() >= {
        name for one in TABLE if one.architecture == "x86_64" for name in one.features
    }
    # A system that saves no vectors, and a CPU that answers leaf 7 with the last one it has.
    words = dict.fromkeys(("eax", "ebx", "ecx", "edx"), 0xFFFF_FFFF)
    unsaved = {**words, "ecx": ~(1 << 27) & 0xFFFF_FFFF}
    cases = [
        (7, unsaved, {"avx2": False, "bmi2": True}),
        (1, words, {"avx2": False, "bmi2": False}),
    ]
    for most, leaf_1, expected in cases:
        answers = {0: {**words, "eax": most}, 1: leaf_1}
        cpuid = partial(_answer, answers, words)
        monkeypatch.setattr(host, "_cpuid", partial(lambda cpuid: cpuid, cpuid))
        host._from_cpuid.cache_clear()
        found = host._from_cpuid()
        assert {name: found[name] for name in expected} == expected
        assert found["sse4.2"]
    host._from_cpuid.cache_clear()


def test_caches_are_plausible() -> None:
    sizes = host.caches()
    assert 8 << 10 <= sizes["L1d"] <= sizes["L2"]


def test_the_chain_ends_at_generic() -> None:
    for one in SETS.values():
        names = [s.name for s in isa.chain(one)]
        assert names[0] == one.name
        assert names[-1] == "generic"
        assert len(names) == len(set(names))


def test_the_best_set_comes_first() -> None:
    assert isa.available()[-1] == "generic"
    assert isa.active(isa.available()[0]).name == isa.available()[0]


def test_report_names_every_set() -> None:
    report = isa.report()
    names = [s["name"] for s in report["instruction_sets"]]
    assert names == [*SETS, *(one.name for one in TABLE if one.extension)]
    assert sum(s["used"] for s in report["instruction_sets"]) == 1
    assert all(bool(s["why"]) != s["available"] for s in report["instruction_sets"])
