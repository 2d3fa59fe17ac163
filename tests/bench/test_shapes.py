"""Sets of shapes: the shapes that the layers have."""

from __future__ import annotations

import math

import pytest

from lowbit_lab.bench.suites.matmul import Matmul
from lowbit_lab.bench.suites.matmul.problem import RANDOM, SHAPES, NamedShape, product, works_of


@pytest.mark.parametrize("name", SHAPES)
def test_every_product_of_a_suite_can_run(name: str) -> None:
    works = works_of(name)
    assert works
    assert len({work.shape for work in works}) == len(works)
    for work in works:
        assert product(work.shape, "u8:s8:u8").sizes == {"M": work.m, "K": work.k, "N": work.n}


def test_all_is_everything() -> None:
    shapes = {work.shape for work in works_of("all")}
    for name in set(SHAPES) - {RANDOM}:
        assert {work.shape for work in works_of(name)} <= shapes


def test_resnet34_adds_up() -> None:
    """The multiply-adds of ResNet-34 on 224x224, layer by layer, are the 3.6e9 of its paper."""
    by_name = {work.name: work for work in works_of("resnet34")}
    times = {"conv1": 1, "fc": 1, "layer1 conv": 6}
    for number, blocks in ((2, 4), (3, 6), (4, 3)):
        times[f"layer{number}.0.conv1"] = times[f"layer{number}.0.downsample"] = 1
        times[f"layer{number} conv"] = 2 * blocks - 1
    total = 0
    for name, count in times.items():
        work = by_name.pop(f"resnet34: {name}")
        total += count * work.m * work.n * work.k
    assert not by_name
    assert 3.6e9 < total < 3.7e9


def test_vit_b16_has_its_parameters() -> None:
    """Weights of 12 layers, of the patches and of the head: 86 million, as its paper says."""
    by_name = {work.name.removeprefix("vit_b16: "): work for work in works_of("vit_b16")}
    weights = {name: work.k * work.n for name, work in by_name.items()}
    layer = sum(weights[name] for name in ("qkv", "proj", "mlp up", "mlp down"))
    assert 85e6 < 12 * layer + weights["patches"] + weights["head"] < 87e6


def test_random_shapes_follow_from_the_seed() -> None:
    several = works_of(RANDOM, seed=3, count=40)
    assert len({work.shape for work in several}) == 40
    assert works_of(RANDOM, seed=3, count=7) == several[:7]
    assert works_of(RANDOM, seed=4, count=40) != several
    assert works_of(RANDOM) == works_of(RANDOM, seed=0, count=100)
    assert [one.name for one in Matmul(suite=RANDOM, count=2).cases(3)] == [
        work.shape for work in several[:2]
    ] * 2
    with pytest.raises(ValueError, match="count is 0; it must be at least 1"):
        works_of(RANDOM, count=0)


def test_random_shapes_are_log_uniform_within_their_bounds() -> None:
    def halves(works: tuple[NamedShape, ...], size: str) -> float:
        """The share below 128 = sqrt(16384)."""
        return sum(getattr(work, size) < 128 for work in works) / len(works)

    works = works_of(RANDOM, count=4000)
    for work in works:
        assert 1 <= min(work.m, work.n, work.k) <= max(work.m, work.n, work.k) <= 16384
        assert work.m * work.n * work.k <= 2**33
        assert work.m * work.k + work.k * work.n + 4 * work.m * work.n <= 2**27
    assert max(max(work.m, work.n, work.k) for work in works) > 16000
    assert min(math.prod((work.m, work.n, work.k)) for work in works) < 100
    # A little more than half, since what is left out is large.
    assert all(0.48 < halves(works, size) < 0.56 for size in "mnk")


def test_unknown_suite_is_told() -> None:
    with pytest.raises(ValueError, match="known are seed, resnet34"):
        works_of("alexnet")
