"""What is said about this machine."""

from __future__ import annotations

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
