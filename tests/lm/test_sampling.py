"""Sampling beside plain definitions that sort everything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lowbit.lm.sampling import Sampler, Sampling


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def probabilities(logits: np.ndarray, how: Sampling, ids: list[int]) -> np.ndarray:
    """Of each token, by the definition: float64 [V]."""
    values = logits.astype(np.float64)
    for id in set(ids[len(ids) - how.last :]) if how.last else ():
        values[id] = (
            values[id] / how.repeat_penalty if values[id] > 0 else values[id] * how.repeat_penalty
        )
    order = np.argsort(-values, kind="stable")
    if how.top_k:
        order = order[: how.top_k]
    weights = np.exp(values[order] - values[order[0]])
    weights /= weights.sum()
    kept = np.cumsum(weights) - weights < how.top_p
    kept &= weights >= how.min_p * weights[0]
    found = np.zeros(len(values))
    found[order[kept]] = np.exp((values[order[kept]] - values[order[0]]) / how.temperature)
    return found / found.sum()


@pytest.mark.deep("{'top_p': 0.999}-3000")
@pytest.mark.parametrize("vocabulary", [1, 2, 50, 3000])
@pytest.mark.parametrize(
    "fields",
    [
        {}, {"top_k": 5}, {"top_k": 10_000}, {"top_p": 0.7}, {"top_p": 0.999}, {"min_p": 0.1},
        {"min_p": 1.0}, {"temperature": 0.3}, {"repeat_penalty": 1.5}, {"repeat_penalty": 0.5},
        {"repeat_penalty": 2.0, "last": 2}, {"repeat_penalty": 2.0, "last": 0},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "repeat_penalty": 1.2, "temperature": 0.7},
    ],
    ids=str,
)  # fmt: skip
def test_tokens_are_drawn_as_defined(vocabulary: int, fields: dict[str, Any]) -> None:
    random = np.random.default_rng(vocabulary)
    logits = random.normal(0, 2, vocabulary).astype(np.float32)
    before = logits.copy()
    ids = random.integers(0, vocabulary, 5).tolist()
    how = Sampling(**{"temperature": 1.0, "seed": 3, **fields})
    expected = probabilities(logits, how, ids)
    sampler, draws = Sampler(how), 4000
    picked = [sampler.pick(logits, ids) for _ in range(draws)]
    assert np.array_equal(logits, before)
    counts = np.bincount(picked, minlength=vocabulary)
    assert not counts[expected == 0].any()
    spread = np.sqrt(expected * (1 - expected) * draws)
    assert (np.abs(counts - expected * draws) <= 6 * spread + 4).all()


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "top_k": 1}, {"repeat_penalty": 3.0}])
def test_greedy_takes_the_likeliest(fields: dict[str, Any]) -> None:
    sampler = Sampler(Sampling(**fields))
    logits = floats(-1, 2, 3, -0.5)
    assert sampler.pick(logits, []) == 2
    assert sampler.pick(logits, [0, 2]) == (1 if "repeat_penalty" in fields else 2)
    assert sampler.pick(floats(-1, -2), [0]) == (1 if "repeat_penalty" in fields else 0)


@pytest.mark.deep
def test_the_likeliest_of_262144_are_found_without_sorting_all() -> None:
    random = np.random.default_rng(0)
    for top_p, spread in ((0.9, 0.01), (0.5, 3.0), (0.95, 8.0)):
        logits = random.normal(0, spread, 262_144).astype(np.float32)
        how = Sampling(temperature=1.0, top_p=top_p, seed=1)
        expected = probabilities(logits, how, [])
        sampler = Sampler(how)
        assert all(expected[sampler.pick(logits, [])] > 0 for _ in range(20))


def test_a_seed_gives_the_same_tokens() -> None:
    logits = np.random.default_rng(0).normal(0, 1, 1000).astype(np.float32)
    runs = [
        [sampler.pick(logits, []) for _ in range(20)]
        for sampler in (Sampler(Sampling(temperature=1.0, seed=seed)) for seed in (1, 1, 2, None))
    ]
    assert runs[0] == runs[1]
    assert len({tuple(run) for run in runs}) == 3


def test_a_temperature_near_zero_is_greedy_and_logits_may_be_minus_infinity() -> None:
    sampler = Sampler(Sampling(temperature=1e-300, seed=0))
    logits = floats(0, 1, -np.inf, 0.5)
    assert {sampler.pick(logits, [2]) for _ in range(20)} == {1}
    hot = Sampler(Sampling(temperature=5.0, repeat_penalty=1.1, seed=0))
    assert {hot.pick(logits, [2]) for _ in range(200)} == {0, 1, 3}


@pytest.mark.parametrize("logits", [[1, np.nan], [np.inf, 1], [-np.inf, -np.inf]])
def test_logits_that_are_no_numbers_are_told(logits: list[float]) -> None:
    with pytest.raises(ValueError, match=r"the logit of token \d is "):
        Sampler(Sampling(temperature=1.0)).pick(floats(*logits), [])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")),
        ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.5),
        ("repeat_penalty", 0.0), ("repeat_penalty", float("nan")), ("seed", -1), ("last", -1),
    ],
)  # fmt: skip
def test_fields_are_checked(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} is {value}; it must be "):
        Sampling(**{field: value})
