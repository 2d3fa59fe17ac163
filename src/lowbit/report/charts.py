"""Charts that several kinds of result have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowbit.registry.extras import require

_WIDTH, _HEIGHT = 640, 300


def altair_chart(values: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    """The module, and a chart of these values."""
    require("a chart", "lab", "altair")
    import altair

    values = [dict(one) for one in values]
    return altair, altair.Chart(altair.Data(values=values)).properties(width=_WIDTH, height=_HEIGHT)


def bars(
    values: Sequence[Mapping[str, Any]], name: str, value: str, title: str, by: str = ""
) -> Any:
    """A bar for each value, from above, as long as its logarithm or, with `by`, stacked."""
    alt, chart = altair_chart(values)
    scale = alt.Scale(zero=True) if by else alt.Scale(type="log")
    length = alt.X(f"{value}:Q", title=title, scale=scale)
    encoded = {"x": length, "y": alt.Y(f"{name}:N", sort=None, title=None)}
    if by:
        encoded["color"] = alt.Color(f"{by}:N", title=by, sort=None)
    else:
        encoded["x2"] = alt.datum(min(float(one[value]) for one in values) / 2)
    return chart.mark_bar().encode(**encoded).properties(height=alt.Step(22))
