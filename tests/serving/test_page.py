"""The page at / in a real browser, without any network but the server."""

import json
import os
import shutil
import time
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from server_process import serving

from mdps.runtime import load
from mdps.runtime.fitness import Fitness, Found
from mdps.runtime.manifest import Manifest

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SLOW = 60_000  # ms: the machine may be busy


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        reason = "no browser: apt-get install chromium"
        if os.environ.get("MDPS_CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(line_bundle):
    with serving([line_bundle], "--threads", "1") as running:
        yield running


@pytest.fixture(scope="module")
def expected(line_bundle, line_images):
    with load(line_bundle, threads=1) as detector:
        return detector.batch(line_images)


@pytest.fixture
def page(browser, server):
    """The page, open; anything its console calls an error, or asked of another host, fails the test."""
    yield from opened(browser, server.url)


def opened(browser, url, **options):
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
    context.set_default_timeout(SLOW)
    page = context.new_page()
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    page.on(
        "request", lambda asked: None if asked.url.startswith((url, "blob:", "data:")) else faults.append(asked.url)
    )
    page.goto(url)
    yield page
    context.close()
    assert not [fault for fault in faults if not fault.startswith("Failed to load resource: the server responded")]


def send(url, image, **headers):
    with urllib.request.urlopen(urllib.request.Request(f"{url}/inspect", image, headers)) as reply:
        return json.load(reply)


def until(page, condition, argument=None):
    """Wait for a condition on the page; `wait_for_function` would need an eval that the page's own policy forbids."""
    end = time.monotonic() + SLOW / 1000
    while not page.evaluate(condition, argument):
        assert time.monotonic() < end, condition
        page.wait_for_timeout(50)


def text(page, selector):
    return page.locator(selector).inner_text()


def test_the_page_follows_the_line(page, server, line_images, expected):
    passing = next(i for i, result in enumerate(expected) if result.verdict == "pass")
    failing = next(i for i, result in enumerate(expected) if result.verdict == "fail")
    for index, word in ((passing, "PASS"), (failing, "FAIL"), (passing, "PASS")):
        reply = send(server.url, line_images[index])
        until(page, "word => document.getElementById('verdict-word').textContent === word", word)
        assert f"{reply['score']:.4g}"[:5] in text(page, "#measured")
        # Not by colour alone: each verdict has a sign of its own shape.
        assert page.locator(f".sign.{word.lower()}").is_visible()
        assert page.locator(".sign:visible").count() == 1
    page.wait_for_selector("#picture[src^='blob:']")
    until(page, "document.getElementById('picture').naturalWidth >= 200")
    assert page.locator("#chart .threshold").count() == 1
    assert page.locator("#chart .cross").count() == int(text(page, "#count-fail")) >= 1
    assert "last" in page.locator("#chart").get_attribute("aria-label")
    assert "line: ready" in text(page, "#state")
    assert "CPUExecutionProvider" in text(page, "#facts")


def test_failures_are_looked_through_with_the_keyboard_alone(page, server, line_images, expected):
    failing = [data for data, result in zip(line_images, expected, strict=True) if result.verdict == "fail"]
    for data in failing[:3]:
        send(server.url, data)
    until(page, "document.querySelectorAll('#failures button').length >= 3")
    page.wait_for_timeout(1500)  # the server may hold failures of other tests: one that arrives later would come first
    page.locator("#failures button").first.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#viewer[open] #viewer-picture[src^='blob:']")
    assert text(page, "#viewer-title").startswith("Failure 1 of")
    page.keyboard.press("ArrowRight")
    until(page, "document.getElementById('viewer-title').textContent.startsWith('Failure 2 of')")
    page.keyboard.press("ArrowLeft")
    until(page, "document.getElementById('viewer-title').textContent.startsWith('Failure 1 of')")
    page.keyboard.press("o")
    assert page.locator("#viewer-layer").get_attribute("aria-pressed") == "false"
    page.keyboard.press("Escape")
    assert not page.locator("#viewer").evaluate("dialog => dialog.open")


def test_every_control_can_be_reached_by_tab_and_has_a_name(page):
    page.wait_for_selector("#board:not([hidden])")
    page.locator("body").evaluate("body => { document.activeElement.blur(); }")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"layer", "slider", "file"} <= reached
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("button, input:not([hidden]), select")].filter((control) =>
            !control.textContent.trim() && !control.labels?.length && !control.querySelector("img[alt]"))
            .map((control) => control.id)"""
    )
    assert unnamed == []


def test_the_preview_counts_what_another_threshold_would_have_failed(page, server, line_images):
    scores = [send(server.url, data)["score"] for data in line_images[:8]]
    until(page, "count => page.scores.length >= count", len(scores))
    page.locator("#slider").focus()
    page.keyboard.press("Home")
    shown = page.evaluate("page.scores.length")
    assert f"{shown} of {shown} (100.0 %)" in text(page, "#preview-text")
    assert page.locator("#chart .wanted").count() == 1
    page.keyboard.press("End")
    assert f": 0 of {shown} (0.0 %)" in text(page, "#preview-text")
    page.locator("#preview-reset").click()
    assert page.locator("#chart .wanted").count() == 0


def test_a_tried_image_is_judged_and_not_counted(page, server, line_images, expected, tmp_path):
    page.wait_for_selector("#board:not([hidden])")
    before = text(page, "#count-all")
    (tmp_path / "part.png").write_bytes(line_images[0])
    page.locator("#file").set_input_files(tmp_path / "part.png")
    page.wait_for_selector("#tried strong")
    assert expected[0].verdict.upper() in text(page, "#tried strong")
    (tmp_path / "notes.png").write_bytes(b"no image at all")
    page.locator("#file").set_input_files(tmp_path / "notes.png")
    until(page, "document.getElementById('tried').textContent.includes('this is no')")
    assert text(page, "#count-all") == before


def test_a_dropped_image_is_tried(page, line_images):
    page.wait_for_selector("#board:not([hidden])")
    page.evaluate(
        """(bytes) => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "dropped.png"));
            const how = {dataTransfer: data, bubbles: true, cancelable: true};
            document.getElementById("drop").dispatchEvent(new DragEvent("drop", how));
        }""",
        list(line_images[1]),
    )
    page.wait_for_selector("#tried strong")
    assert "dropped.png" in text(page, "#tried")


def test_a_lost_server_is_said_and_nothing_old_looks_current(browser, line_bundle, line_images):
    with serving([line_bundle], "--threads", "1") as server:
        pages = opened(browser, server.url)
        page = next(pages)
        send(server.url, line_images[0])
        page.wait_for_selector("#picture[src^='blob:']")
        assert page.locator("#alarm").is_hidden()
        server.process.kill()
        page.wait_for_selector("#alarm:not([hidden])")
        assert "No connection" in text(page, "#alarm")
        assert page.locator("body.stale").count() == 1
        page.context.close()


def test_a_detector_that_sees_no_defects_is_said_above_its_verdicts(browser, server, line_bundle, tmp_path):
    for page in opened(browser, server.url):
        page.wait_for_selector("#board:not([hidden])")
        assert page.locator("#doubt").is_hidden()
    bundle = shutil.copytree(line_bundle, tmp_path / "line")
    manifest = Manifest.read(bundle)
    unfit = replace(manifest.calibrations["default"], fitness=Fitness(0.4, {"crack": Found(6, 1, 0.4)}, {}))
    manifest.with_calibration("default", unfit).write(bundle)
    with serving([bundle], "--threads", "1", "--force") as running:
        for page in opened(browser, running.url):
            page.wait_for_selector("#doubt:not([hidden])")
            assert "Warning: this detector does not see defects on these parts: it finds 1 of 6" in text(page, "#doubt")
            assert page.locator("#alarm").is_hidden()
            assert page.locator("#doubt").bounding_box()["y"] < page.locator("#verdict").bounding_box()["y"]


def test_with_a_token_the_page_asks_for_it_and_shows_nothing_before(browser, line_bundle, line_images):
    token = "a token that is long enough"
    with serving([line_bundle], "--threads", "1", environment={"MDPS_TOKEN": token}) as server:
        send(server.url, line_images[0], Authorization=f"Bearer {token}")
        for page in opened(browser, server.url):
            page.wait_for_selector("#sign-in:not([hidden])")
            assert page.locator("#board").is_hidden()
            page.keyboard.type("a wrong one")
            page.keyboard.press("Enter")
            until(page, "document.getElementById('sign-in-error').textContent.includes('does not know')")
            page.keyboard.type(token)
            page.keyboard.press("Enter")
            page.wait_for_selector("#picture[src^='blob:']")
            assert text(page, "#count-all") == "1"


def test_dark_and_light_follow_the_system_with_enough_contrast(browser, server):
    for scheme in ("light", "dark"):
        for page in opened(browser, server.url, color_scheme=scheme):
            page.wait_for_selector("#board:not([hidden])")
            ratios = page.evaluate(CONTRAST)
            assert min(ratios.values()) >= 4.5, (scheme, ratios)


CONTRAST = """() => {
    const style = getComputedStyle(document.documentElement);
    const light = (name) => {
        let hex = style.getPropertyValue("--" + name).trim().slice(1);
        if (hex.length === 3) hex = [...hex].map((digit) => digit + digit).join("");
        const [r, g, b] = [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
            .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort(); return (y + 0.05) / (x + 0.05); };
    const names = ["ink", "quiet", "pass", "fail", "none", "accent"];
    return Object.fromEntries(names.map((name) => [name, ratio(name, "card")]));
}"""


@pytest.mark.parametrize("width", [768, 1280])
def test_nothing_is_cut_off_at_the_width_of(browser, server, line_images, width):
    for image in line_images[:6]:
        send(server.url, image)
    for page in opened(browser, server.url):
        page.set_viewport_size({"width": width, "height": 1024})
        page.wait_for_selector("#picture[src^='blob:']")
        outside = page.evaluate(
            """width => [...document.querySelectorAll("main *, header *")].filter((element) => {
                const box = element.getBoundingClientRect();
                return box.width && (box.left < -1 || box.right > width + 1);
            }).map((element) => element.id || element.tagName)""",
            width,
        )
        assert outside == []
        assert page.locator("#verdict-word").bounding_box()["height"] >= 48  # read from a few steps away


def test_screenshots(browser, line_bundle, line_images, tmp_path):
    """At desktop and tablet width; for the documentation where MDPS_SCREENSHOTS and its two companions are set."""
    folder = Path(os.environ.get("MDPS_SCREENSHOTS", tmp_path))
    bundle = Path(os.environ.get("MDPS_SCREENSHOT_BUNDLE", line_bundle))
    given = os.environ.get("MDPS_SCREENSHOT_IMAGES")
    images = [path.read_bytes() for path in sorted(Path(given).rglob("*.png"))] if given else line_images[:12]
    with serving([bundle], "--deadline-ms", "60000") as server:
        for image in images:
            send(server.url, image)
        for name, width, height in (("desktop", 1280, 860), ("tablet", 834, 1112)):
            for page in opened(browser, server.url, color_scheme="dark" if name == "tablet" else "light"):
                page.set_viewport_size({"width": width, "height": height})
                page.wait_for_selector("#picture[src^='blob:']")
                until(page, "document.querySelectorAll('#failures button').length === page.failures.length")
                wide = page.evaluate("document.documentElement.scrollWidth")
                assert wide <= width, "it does not fit the screen"
                page.screenshot(path=folder / f"page-{name}.png", full_page=True)
                assert (folder / f"page-{name}.png").stat().st_size > 10_000
