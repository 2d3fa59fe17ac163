"""Many rows in a few figures."""

from __future__ import annotations

import pytest

from lowbit_lab.bench.core.record import Row, Spread
from lowbit_lab.bench.core.table import summaries
from lowbit_lab.bench.suites.matmul.problem import parse_shape


def row(shape: str, name: str, ratio: float | None, **changes: object) -> Row:
    """A row of lowbit (no ratio) or of a peer."""
    fields: dict[str, object] = {
        "operation": "matmul",
        "work": "",
        "case": shape,
        "sizes": parse_shape(shape),
        "dtypes": "u8:s8:s32",
        "threads": 1,
        "implementation": name,
        "kind": "ours" if ratio is None else "peer",
        "weights": "warm",
        "library": name,
        "version": "1",
        "note": "",
        "seconds": Spread(1.0, 1.0, 1.0),
        "cpu_seconds": 1.0,
        "noise": None,
        "rounds": 3,
        "calls": 1,
        "operations": 1,
        "bytes": 1,
        "error": 0.0,
        "ratios": {} if ratio is None else {"lowbit": Spread(ratio / 2, ratio, 2 * ratio)},
        "best_peer": ratio is not None,
        **changes,
    }
    return Row(**fields)  # type: ignore[arg-type]


def test_geometric_mean_and_worst_row() -> None:
    rows = [
        row("8x8:8x8", "lowbit", None),
        row("8x8:8x8", "fast", 4.0),
        row("8x8:8x8", "slow", 100.0, best_peer=False),
        row("9x8:8x8", "lowbit", None),
        row("9x8:8x8", "other", 0.5),
    ]
    (one,) = summaries(rows)
    assert one["geometric_mean"] == pytest.approx(2**0.5)
    assert (one["worst"], one["worst_peer"]) == (0.5, "other")
    assert one["worst_case"] == "9x8:8x8 u8:s8:s32 warm"
    assert one["rows"] == 2
    assert one["large_peak_share"] is None
    assert one["read_share"] is None


def test_tenth_percentile_and_rows_where_a_peer_leads() -> None:
    ratios = [0.5, 0.9, *(1.0 + i / 10 for i in range(9))]
    rows = [row(f"{m}x8:8x8", "peer", ratio) for m, ratio in enumerate(ratios, start=1)]
    # Faster than the peer, but no product; nor does it say that it were the best of them.
    rows += [row("9x8:8x8", "plain read", 0.1, kind="limit", best_peer=False)]
    (one,) = summaries(rows)
    assert one["p10"] == pytest.approx(0.9)
    assert (one["behind"], one["rows"], one["worst_peer"]) == (2, 11, "peer")


def test_thread_counts_stand_alone_and_the_rest_is_summed_up() -> None:
    rows = []
    for threads in (1, 2):
        for dtypes in ("u8:s8:f32", "u8:s8:u8"):
            fields = {"threads": threads, "dtypes": dtypes}
            rows.append(row("8x8:8x8", "lowbit", None, **fields))
            rows.append(row("8x8:8x8", "peer", float(threads), **fields))
    found = summaries(rows)
    assert [(one["threads"], one["dtypes"], one["geometric_mean"]) for one in found] == [
        (1, "u8:s8:f32", 1.0),
        (1, "u8:s8:u8", 1.0),
        (1, "all", 1.0),
        (2, "u8:s8:f32", 2.0),
        (2, "u8:s8:u8", 2.0),
        (2, "all", pytest.approx(2.0)),
    ]


def test_shares_are_of_lowbit_and_the_least() -> None:
    big, wide = "1024x1024:1024x2048", "1024x1023:1023x2048"
    read = Spread(0.1, 0.8, 0.9)
    rows = [
        row(big, "lowbit", None, peak_share=0.7),
        row(big, "peer", 1.0, peak_share=0.1),
        row("2048x1024:1024x1024", "lowbit", None, peak_share=0.6),
        row(wide, "lowbit", None, peak_share=0.2),
        row("1x8:8x8", "lowbit", None, peak_share=0.3, limit_share=read),
    ]
    (one,) = summaries(rows)
    assert one["large_peak_share"] == 0.6
    assert one["read_share"] == 0.8


def test_without_peers_there_is_nothing_to_sum_up() -> None:
    assert not list(summaries([row("8x8:8x8", "lowbit", None)]))
