"""The table of instruction sets: levels, their chains of fall-backs, extensions."""

from __future__ import annotations

import itertools

import pytest

from lowbit.isa import GENERIC, SETS, TABLE, active, available, chain
from lowbit.isa.amx import AMX_BF16


def test_every_chain_ends_with_what_any_machine_runs() -> None:
    for one in TABLE:
        below = chain(one)
        assert below[0] is one
        assert below[-1] is GENERIC
        for upper, lower in itertools.pairwise(below):
            assert upper.fallback == lower.name
            assert not lower.extension
            features = set(lower.features) - {"amx-int8"}  # a tile's bfloat16 needs no bytes
            assert features <= set(upper.features)


def test_levels_stand_above_what_they_fall_back_to() -> None:
    order = list(SETS)
    assert order[-1] == "generic"
    for name, one in SETS.items():
        for below in chain(one)[1:]:
            assert order.index(name) < order.index(below.name)


def test_an_extension_is_no_level() -> None:
    extensions = [one for one in TABLE if one.extension]
    assert {one.name for one in extensions} == set(TABLE.names()) - SETS.keys()
    assert AMX_BF16 in extensions
    for one in extensions:
        assert one.name not in available()
        with pytest.raises(ValueError, match="no instruction set is called"):
            active(one.name)


def test_extensions_serve_at_the_level_below_where_the_machine_has_them() -> None:
    for level in SETS.values():
        sets = chain(level, extensions=True)
        assert tuple(one for one in sets if not one.extension) == chain(level)
        wanted = {
            one.name for one in TABLE
            if one.extension and not one.missing() and TABLE.get(one.fallback or "") in chain(level)
        }  # fmt: skip
        assert {one.name for one in sets if one.extension} == wanted
        for one in sets:
            if one.extension:
                assert sets[sets.index(one) + 1].name == one.fallback
