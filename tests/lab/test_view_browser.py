"""The page of a view, opened in Chromium and used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from chromium import BROWSED, Browser, browser, elements, text

from lowbit.kernels.triton.registry import teaching_kernels
from lowbit.spec import exercises
from lowbit_lab import Access, View, trace_kernel, view
from lowbit_lab.views.run import view_named

__all__ = ["browser"]  # the fixture
pytestmark = BROWSED


@pytest.fixture
def softmax(browser: Browser, tmp_path: Path) -> Path:
    return softmax_view().save(tmp_path / "softmax.html")


SIZES = {"N0": 3, "T": 45}


def softmax_view() -> View:
    taught = teaching_kernels()["long_softmax"]
    return view(taught.kernel, taught.operation, grid=taught.grid, sizes=SIZES)


def softmax_trace() -> Any:
    taught = teaching_kernels()["long_softmax"]
    return trace_kernel(taught.kernel, taught.operation, grid=taught.grid, sizes=SIZES)


def test_each_step_highlights_what_the_trace_says(browser: Browser, softmax: Path) -> None:
    browser.open(softmax)
    assert browser.run("document.querySelectorAll('#tensor-x i').length") == 3 * 45
    trace = softmax_trace()
    own = [event for event in trace.events if event.program == (2, 0, 0)]
    assert len(own) > 8
    browser.press("ArrowDown", "ArrowDown")
    for step, event in enumerate(own):
        assert browser.run("location.hash") == f"#program=2&step={step}&show=step"
        now = browser.run("document.querySelector('.text.now').dataset.line")
        assert event.place is not None
        assert int(now) == event.place.line
        for tensor in ("x", "z"):
            for kind in ("load", "store"):
                hit = isinstance(event, Access) and (event.kind, event.tensor) == (kind, tensor)
                touched = event.elements[event.active & ~event.outside] if hit else np.array([])
                assert elements(browser, tensor, kind) == sorted(touched.tolist())
        if isinstance(event, Access):
            masked = browser.run("document.querySelectorAll('#detail i.masked').length")
            assert masked == int((~event.active).sum())
        browser.press("ArrowRight")
    assert browser.run("location.hash") == f"#program=2&step={len(own) - 1}&show=step"
    assert browser.thrown() == []


def test_a_product_shows_where_its_operands_come_from(browser: Browser, tmp_path: Path) -> None:
    taught = teaching_kernels()["batched_matmul"]
    sizes = {"N2": 2, "N0": 5, "MID": 19, "N1": 7}
    seen = view(taught.kernel, taught.operation, grid=taught.grid, sizes=sizes)
    events = seen.data["events"]
    step = next(i for i, event in enumerate(events) if event["kind"] == "product")
    browser.open(seen.save(tmp_path / "product.html"), f"program=0&step={step}")
    left, right = (events[block["source"]] for block in events[step]["operands"])
    assert (left["tensor"], right["tensor"]) == ("x", "y")
    for one in (left, right):
        inside = sorted(element for element in one["elements"] if element >= 0)
        assert elements(browser, one["tensor"], "operand") == inside
    assert browser.run("document.querySelectorAll('#tensor-x .plane').length") == 2
    browser.point("#detail > .planes:last-of-type i[data-n='17']")
    # Row 1 of the left, column 1 of the right operand, and the element itself.
    assert browser.run("document.querySelectorAll('#detail i.hit').length") == 16 + 16 + 1


def test_the_heat_map_is_numpys_count(browser: Browser, softmax: Path) -> None:
    browser.open(softmax)
    browser.press("2")
    trace = softmax_trace()
    counted = np.zeros(3 * 45, int)
    for access in trace.accesses:
        if (access.kind, access.tensor) == ("load", "x"):
            np.add.at(counted, access.elements[access.active], 1)
    cells = "[...document.querySelectorAll('#tensor-x i.heat')].map(c => +c.dataset.count)"
    assert browser.run(cells) == counted.tolist()
    assert set(counted) == {2}
    browser.press("3")
    assert set(browser.run(cells)) == {0}
    assert browser.run(cells.replace("tensor-x", "tensor-z")) == [1] * (3 * 45)


def test_the_totals(browser: Browser, softmax: Path) -> None:
    browser.open(softmax)
    rows = browser.run(
        "[...document.querySelectorAll('#totals tbody tr')].map(r => [...r.cells].map("
        "c => c.textContent))"
    )
    assert rows == [
        ["x", "1,080", "0", "540", "2.00 ×"],
        ["z", "0", "540", "540", "1.00 ×"],
        ["all", "1,080", "540", "1,080", "1.50 ×"],
    ]


def test_a_click_on_a_line_goes_to_its_next_step(browser: Browser, softmax: Path) -> None:
    browser.open(softmax, "program=1&step=0")
    trace = softmax_trace()
    own = [event for event in trace.events if event.program == (1, 0, 0)]
    stores = [event for event in own if isinstance(event, Access) and event.kind == "store"]
    assert stores[0].place is not None
    line = stores[0].place.line
    for store in stores:
        browser.run(f"document.querySelector('.text[data-line=\"{line}\"]').click()")
        assert browser.run("location.hash") == f"#program=1&step={store.step}&show=step"


def test_an_element_says_what_it_is(browser: Browser, softmax: Path) -> None:
    seen = softmax_view().data
    browser.open(softmax)
    browser.point("#tensor-x i[data-n='46']")
    shown = text(browser, "cell")
    assert shown.startswith(f"x[1, 1] = {seen['tensors'][0]['before'][46]}")
    assert "read 2 ×, written 0 ×" in shown
    browser.point("#tensor-z i[data-n='0']")
    assert text(browser, "cell").startswith("z[0, 0] = not written yet")
    browser.run("document.querySelector('#tensor-x .grids').focus()")
    browser.press("ArrowDown", "ArrowRight")
    assert text(browser, "cell").startswith("x[2, 2] = ")
    assert browser.run("location.hash") == "#program=0&step=0&show=step"
    browser.press("Escape", "ArrowRight")
    assert browser.run("location.hash") == "#program=0&step=1&show=step"


@triton.jit
def one_too_many(x_ptr, z_ptr, N0, B0: tl.constexpr):
    i = tl.program_id(0) * B0 + tl.arange(0, B0)
    x = tl.load(x_ptr + i, mask=i <= N0 + 1)
    tl.store(z_ptr + i, x, mask=i < N0)


def test_lanes_outside_and_wrong_values(browser: Browser, tmp_path: Path) -> None:
    operation = exercises.add_constant_blocks
    seen = view(one_too_many, operation, grid=lambda m: -(-m["N0"] // m["B0"]), sizes={"N0": 40})
    browser.open(seen.save(tmp_path / "wrong.html"), "program=1&step=0")
    chips = "[...document.querySelectorAll('#tensor-x .chip')].map(c => c.textContent)"
    assert browser.run(chips) == ["lane 8 offset 40", "lane 9 offset 41"]
    assert browser.run("document.querySelectorAll('#detail i.outside').length") == 2
    assert browser.run("document.querySelectorAll('#detail i.masked').length") == 22
    assert text(browser, "now") == (
        "Loads x: 8 of 32 lanes, 22 masked, 2 outside of the tensor; 40 bytes"
    )
    assert "reads outside of a tensor" in text(browser, "findings")
    browser.press("4")
    assert elements(browser, "z", "wrong") == list(range(40))
    browser.open(tmp_path / "wrong.html", "program=0&step=0")
    assert browser.run(chips) == []
    browser.run("document.querySelector('#findings button').click()")
    assert browser.run("location.hash") == "#program=1&step=0&show=step"
    # Without a place the page begins there.
    browser.open(tmp_path / "wrong.html")
    assert len(browser.run(chips)) == 2
    assert browser.run("location.hash") == "#program=1&step=0&show=step"


@triton.jit
def last_block_runs_over(x_ptr, z_ptr, N0, T, B0: tl.constexpr, B1: tl.constexpr):
    i = tl.program_id(0)
    total = tl.zeros((B1,), tl.float32)
    for start in range(0, T, B1):
        total += tl.load(x_ptr + i * T + start + tl.arange(0, B1))
    tl.store(z_ptr + i, tl.sum(total, axis=0))


def test_show_leads_to_what_was_found(browser: Browser, tmp_path: Path) -> None:
    sizes = {"N0": 2, "T": 100}
    seen = view(last_block_runs_over, exercises.long_sum, grid=lambda m: m["N0"], sizes=sizes)
    assert [finding["kind"] for finding in seen.data["findings"]] == [
        "out-of-bounds-load",
        "wrong-values",
    ]
    browser.open(seen.save(tmp_path / "over.html"))
    button = "document.querySelectorAll('#findings button')"
    browser.press("2")
    browser.run(f"{button}[0].click()")
    # The fourth load of the row is the one that leaves the tensor.
    assert browser.run("location.hash").endswith("show=step")
    assert "28 outside of the tensor" in text(browser, "now")
    browser.run(f"{button}[1].click()")
    assert elements(browser, "z", "wrong") == [0, 1]
    nothing = view(writes_nothing, exercises.long_sum, grid=1, sizes=sizes)
    browser.open(nothing.save(tmp_path / "nothing.html"))
    assert text(browser, "step-text") == "none"
    assert text(browser, "now") == "The kernel did nothing that could be recorded."
    browser.run(f"{button}[0].click()")
    assert len(elements(browser, "z", "heat")) == 2
    stopped = view(stops, exercises.long_sum, grid=lambda m: m["N0"], sizes=sizes)
    browser.open(stopped.save(tmp_path / "stopped.html"))
    fault = "[...document.querySelectorAll('.text.fault')].map(line => line.textContent.trim())"
    assert browser.run(fault) == ["tl.arange(0, 24)"]
    browser.run(f"{button}[0].click()")
    assert browser.run("location.hash") == "#program=0&step=0&show=step"
    assert browser.thrown() == []


@triton.jit
def stops(x_ptr, z_ptr):
    tl.load(x_ptr)
    tl.arange(0, 24)


@triton.jit
def writes_nothing(x_ptr, z_ptr):
    pass


@triton.jit
def far_outside(x_ptr, z_ptr, N0, B0: tl.constexpr):
    tl.store(z_ptr + N0 + tl.arange(0, B0), 1.0)


def test_of_many_lanes_outside_the_first_are_listed(browser: Browser, tmp_path: Path) -> None:
    seen = view(far_outside, exercises.add_constant, sizes={"N0": 64})
    browser.open(seen.save(tmp_path / "far.html"))
    assert browser.run("document.querySelectorAll('#tensor-z .chip').length") == 40
    strip = browser.run("document.querySelector('#tensor-z .strip').textContent")
    assert strip.endswith("and 24 more, red among the lanes")
    assert browser.run("document.querySelectorAll('#detail i.outside').length") == 64


def test_keys_work_wherever_the_focus_is(browser: Browser, softmax: Path) -> None:
    browser.open(softmax, "program=1&step=2")
    for control in ("program", "step"):
        browser.run(f"document.getElementById('{control}').focus()")
        browser.press("ArrowDown")
        assert browser.run("location.hash") == "#program=2&step=2&show=step"
        browser.press("ArrowUp", "3")
        assert browser.run("location.hash") == "#program=1&step=2&show=writes"
        browser.run("document.querySelector('[value=writes]').focus()")
        browser.press("1", "4")
        assert browser.run("location.hash") == "#program=1&step=2&show=step"


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("program=1.5&step=1.5", "program=1&step=1&show=step"),
        ("program=99&step=99", "program=2&step=9&show=step"),
        ("program=-1&step=x&show=wrong", "program=0&step=0&show=step"),
        ("%%%", "program=0&step=0&show=step"),
    ],
)
def test_any_address_shows_some_step(
    browser: Browser, softmax: Path, place: str, shown: str
) -> None:
    browser.open(softmax, place)
    assert browser.run("location.hash") == f"#{shown}"
    assert browser.thrown() == []


def test_the_address_is_not_changed_too_often(browser: Browser, softmax: Path) -> None:
    browser.open(softmax)
    browser.run("performance.now = () => 0")
    browser.run("history.replaceState = () => { document.changed = (document.changed ?? 0) + 1 }")
    browser.run("for (let n = 0; n < 60; n++) { stepBy(1); stepBy(-1); }")
    # Opening the page was the first of 90.
    assert browser.run("document.changed") == 89
    browser.press("2")
    assert browser.run("document.querySelector('[value=reads]').checked")


def test_no_page_is_wider_than_its_window(browser: Browser, tmp_path: Path) -> None:
    taught = teaching_kernels()["quantized_matmul"]
    page = view(taught.kernel, taught.operation, grid=taught.grid).save(tmp_path / "wide.html")
    top = "document.getElementById('tensor-{}').getBoundingClientRect().top"
    for width, beside in ((480, False), (1400, True)):
        browser.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        browser.open(page)
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        tops = [browser.run(top.format(name)) for name in ("scale", "weight")]
        assert (tops[0] == tops[1]) == beside
    browser.call("Emulation.clearDeviceMetricsOverride")


@pytest.mark.deep
def test_registers_and_tiles(browser: Browser, tmp_path: Path) -> None:
    data = view_named("product:amx", {"M": 3, "N": 16, "K": 64})
    events = data.data["events"]
    now = max(i for i, event in enumerate(events) if event.get("name") == "tdpbusd")
    program, step = events[now]["program"], events[now]["step"]
    browser.open(data.save(tmp_path / "tiles.html"), f"program={program}&step={step}")
    # The tile that has just changed is read as sums; the packed operand was loaded for it.
    assert elements(browser, "panels", "operand") == list(range(16 * 64))
    tile = "document.querySelector('.tile:has(i.changed)')"
    assert browser.run(f"{tile}.querySelector('select').value") == "int32"
    titles = browser.run(f"[...{tile}.querySelectorAll('i')].map(c => c.title.split(' = ')[1])")
    assert [int(title) for title in titles] == data.data["tensors"][2]["after"]
    browser.run(
        f"{{const s = {tile}.querySelector('select'); s.value = 'uint8';"
        "s.dispatchEvent(new Event('change'))}"
    )
    assert browser.run(f"{tile}.querySelectorAll('i').length") == 3 * 64
    vectors = view_named("product:generic", {"M": 1, "N": 16, "K": 64})
    browser.open(vectors.save(tmp_path / "vectors.html"))
    browser.press("End")
    while "Stores to c" not in text(browser, "now"):
        browser.press("ArrowLeft")
    assert " vector registers hold variables" in text(browser, "used")
    shown = browser.run("[...document.querySelectorAll('.register i')].map(c => c.title)")
    sums = [int(title.split(" = ")[1]) for title in shown]
    after = vectors.data["tensors"][2]["after"]
    assert len(sums) >= 4
    assert all(one in after for one in sums)
    assert browser.thrown() == []


@pytest.mark.deep
def test_the_page_loads_nothing_and_fits_a_frame(browser: Browser, tmp_path: Path) -> None:
    seen = softmax_view()
    page = tmp_path / "notebook.html"
    page.write_text(f"<!doctype html><title>n</title>{seen._repr_html_()}", encoding="utf-8")
    browser.open(page)
    inside = "document.querySelector('iframe').contentDocument"
    while not browser.run(
        f"{inside}.readyState === 'complete' && !!{inside}.querySelector('#now')"
    ):
        pass
    assert browser.run(f"{inside}.querySelectorAll('#tensor-x i.load').length") == 32
    browser.run(f"{inside}.getElementById('step-on').click()")
    assert browser.run(f"{inside}.getElementById('step-text').textContent") == "2 of 10"
    assert browser.thrown() == []
    addresses = [address for address in browser.requested() if not address.startswith("data:")]
    assert set(addresses) <= {page.as_uri(), "about:blank", "about:srcdoc"}
    for colours in ("light", "dark"):
        media = [{"name": "prefers-color-scheme", "value": colours}]
        browser.call("Emulation.setEmulatedMedia", features=media)
        browser.open(seen.save(tmp_path / "page.html"))
        back = browser.run("getComputedStyle(document.body).backgroundColor")
        assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 28)"}[colours]
