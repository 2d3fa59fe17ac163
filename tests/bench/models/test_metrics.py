"""Means, their standard errors, and ratios of signal to noise."""

from __future__ import annotations

import numpy as np
import pytest

from lowbit.models.model import Metric, classified, mean, sqnr


def test_the_standard_error_of_a_share() -> None:
    found = mean([True] * 90 + [False] * 10)
    assert (found.value, found.count) == (0.9, 100)
    assert found.error == pytest.approx(np.sqrt(0.9 * 0.1 / 99))
    assert str(found) == "0.9 ± 0.03"


def test_clusters_count_once() -> None:
    values = np.repeat([0.0, 1.0, 1.0, 0.0, 1.0], 20)
    apart, together = mean(values), mean(values, np.repeat(np.arange(5), 20))
    assert apart.value == together.value == 0.6
    # Twenty equal samples tell no more than one.
    assert together.error == pytest.approx(mean([0.0, 1.0, 1.0, 0.0, 1.0]).error)
    assert together.error > 4 * apart.error


def test_few_samples() -> None:
    assert np.isnan(mean([0.5]).error)
    with pytest.raises(ValueError, match="no samples"):
        mean([])


def test_the_error_covers_the_truth() -> None:
    random = np.random.default_rng(0)
    found = [mean(random.random(50) < 0.7) for _ in range(2000)]
    near = np.mean([abs(one.value - 0.7) < 2 * one.error for one in found])
    assert 0.92 < near < 0.98


def test_signal_to_noise() -> None:
    reference = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    noisy = reference.copy()
    noisy[0] *= 1.1
    noisy[1] *= 1.01
    np.testing.assert_allclose(sqnr(noisy, reference)[:2], [20, 40], atol=1e-3)
    assert sqnr(noisy, reference)[2] == np.inf


def test_classes() -> None:
    scores = np.array([[1.0, 2, 0], [3, 2, 1], [0, 0, 1], [0, 5, 0]])
    reference = np.array([[1.0, 2, 0], [1, 2, 1], [0, 0, 1], [0, 5, 0]])
    found = classified(scores, np.array([1, 1, 2, 0]), reference)
    assert found["top1"] == Metric(0.5, pytest.approx(np.sqrt(0.25 / 3)), 4)  # pyright: ignore[reportArgumentType]
    assert found["agreement"].value == 0.75
    assert found["sqnr_db"].value == pytest.approx((3 * 200 + 10 * np.log10(6 / 4)) / 4)
    assert classified(scores, None, None) == {}
