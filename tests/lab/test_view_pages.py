"""The page of a view of what is wrong, and how much of it fits a screen."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton
import triton.language as tl
from chromium import BROWSED, Browser, browser, text
from shared_arrays import BARRIER

from lowbit.spec import exercises
from lowbit_lab import view
from lowbit_lab.views.run import view_file, view_named

__all__ = ["browser"]  # the fixture
pytestmark = BROWSED


def screen(browser: Browser) -> None:
    """A window of 1280 by 800, as many have."""
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=1280,
        height=800,
        deviceScaleFactor=1,
        mobile=False,
    )


@pytest.mark.parametrize("name", ["batched_matmul", "quantized_matmul"])
def test_the_tensors_of_a_product_fit_a_screen(browser: Browser, tmp_path: Path, name: str) -> None:
    page = view_named(name).save(tmp_path / "product.html")
    screen(browser)
    browser.open(page, "program=0&step=2")
    bottom = browser.run(
        "Math.max(...[...document.querySelectorAll('.tensor .plane')]"
        ".map(one => one.getBoundingClientRect().bottom))"
    )
    browser.call("Emulation.clearDeviceMetricsOverride")
    assert bottom <= 800


def test_numbers_stay_in_their_cells(browser: Browser, tmp_path: Path) -> None:
    screen(browser)
    browser.open(view_named("long_softmax").save(tmp_path / "softmax.html"), "program=1&step=2")
    wide = browser.run(
        "[...document.querySelectorAll('#detail .wide i, #registers .wide i')]"
        ".map(one => [one.textContent.length, one.scrollWidth - one.clientWidth])"
    )
    browser.call("Emulation.clearDeviceMetricsOverride")
    assert len(wide) >= 32
    assert all(length > 0 and beyond <= 0 for length, beyond in wide)


@triton.jit
def sums_without_the_first(x_ptr, z_ptr, N0, T, B0: tl.constexpr, B1: tl.constexpr):
    i = tl.program_id(0)
    total = 0.0
    for start in range(0, T, B1):
        j = start + tl.arange(0, B1)
        x = tl.load(x_ptr + i * T + j, mask=j < T, other=0.0)
        total = tl.where(i == 1, 0.0, total) + tl.sum(x, axis=0)
    tl.store(z_ptr + i, total)


def test_a_wrong_element_is_red_and_beside_what_was_expected(
    browser: Browser, tmp_path: Path
) -> None:
    sizes = {"N0": 3, "T": 40}
    seen = view(sums_without_the_first, exercises.long_sum, grid=lambda m: m["N0"], sizes=sizes)
    finding = seen.data["findings"][0]
    assert (finding["kind"], finding["element"]) == ("wrong-values", 1)
    browser.open(seen.save(tmp_path / "wrong.html"))
    # It begins at the store that wrote the element.
    last = len([one for one in seen.data["events"] if one["program"] == 1]) - 1
    assert browser.run("location.hash") == f"#program=1&step={last}&show=wrong"
    assert text(browser, "now").startswith("Stores to z")
    z = seen.data["tensors"][1]
    wanted = f"computed {z['after'][1]} · expected {z['expected'][1]} · off by "
    assert text(browser, "compared").startswith(wanted)
    red = "getComputedStyle(document.querySelector('{}')).backgroundColor"
    cell = browser.run(red.format("#tensor-z i.wrong"))
    assert cell == browser.run(red.format("#legend .key.wrong"))
    assert browser.run("getComputedStyle(document.querySelector('i.wrong')).boxShadow") == "none"
    browser.point("#tensor-z i[data-n='0']")
    assert "off by" not in text(browser, "compared")
    assert text(browser, "compared").startswith(f"computed {z['after'][0]} · expected ")


@pytest.mark.deep
def test_numbers_of_a_program_and_costs_of_lines(browser: Browser, tmp_path: Path) -> None:
    sizes = {"N0": 3, "T": 40}
    seen = view(sums_without_the_first, exercises.long_sum, grid=lambda m: m["N0"], sizes=sizes)
    browser.open(seen.save(tmp_path / "sums.html"), "program=1&step=0&show=step")
    browser.press("End")
    total = seen.data["tensors"][1]["after"][1]
    numbers = browser.run("[...document.querySelectorAll('#scalars span')].map(s => s.title)")
    assert str(total) in numbers
    assert "start = 32" in text(browser, "scalars")
    browser.press("Home")
    assert "start = 0" in text(browser, "scalars")
    # The numbers are those of the program that is shown.
    browser.press("End", "ArrowUp")
    assert str(seen.data["tensors"][1]["after"][0]) in browser.run(
        "[...document.querySelectorAll('#scalars span')].map(s => s.title)"
    )
    cost = "document.querySelector('.text[data-line=\"{}\"] .cost').textContent"
    load = next(one for one in seen.data["events"] if one["kind"] == "load")
    # 40 of 64 lanes are used; 128 and 32 bytes, which no sector is asked for in vain.
    assert browser.run(cost.format(load["line"][1])) == "38 % masked, 1.0 × sectors"
    assert browser.thrown() == []


@pytest.mark.deep
def test_both_sides_of_a_race(browser: Browser, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    file = tmp_path / "race.py"
    file.write_text(BARRIER.format(barrier="pass"))
    seen = view_file(file, {"N0": 12})
    browser.open(seen.save(tmp_path / "race.html"))
    now = "document.querySelector('.text.now').getAttribute('aria-label')"
    assert browser.run(now).endswith(": z[i] = tile[7 - t]")
    assert text(browser, "now").startswith("Loads shared tile of block [0, 0, 0]")
    browser.run("document.querySelector('#findings button.other').click()")
    assert ": tile[t] = x[i] if" in browser.run(now)
    assert browser.run("document.querySelectorAll('#detail i.store').length") == 1
    # Of the shared arrays that of the block is shown.
    shown = "[...document.querySelectorAll('.tensor')].filter(t => !t.hidden).map(t => t.id)"
    assert browser.run(shown) == ["tensor-x", "tensor-z", "tensor-shared tile of block [0, 0, 0]"]
    browser.run("go(data.programs.length - 1, 0)")
    assert browser.run(shown)[-1] == "tensor-shared tile of block [1, 0, 0]"
    assert browser.thrown() == []
