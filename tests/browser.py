"""A real browser for tests of the pages that the product writes."""

import contextlib
import shutil

import pytest

BINARIES = ("chromium", "chromium-browser", "google-chrome")


@contextlib.contextmanager
def browser_page(served="file:"):
    """Open an empty page of a headless Chromium; skip the test if there is none.

    The test fails at the end if the page logged an error or a warning, or requested a URL that does
    not begin with `served` or "data:".
    """
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    binary = next(filter(None, map(shutil.which, BINARIES)), None)
    if not binary:
        pytest.skip("no Chromium on PATH")
    problems: list[str] = []

    def on_console(message):
        if message.type in ("error", "warning"):
            problems.append(message.text)

    def on_request(request):
        if not request.url.startswith((served, "data:")):
            problems.append(request.url)

    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=binary, args=["--no-sandbox"], timeout=300_000
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(300_000)  # a busy machine is slow
        page.on("console", on_console)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", on_request)
        yield page
        browser.close()
    assert problems == []


def settle(condition, page):
    """Wait until `condition()` holds.

    playwright's wait_for_function needs eval, which the pages forbid.
    """
    for _ in range(30_000):
        if condition():
            return
        page.wait_for_timeout(10)
    raise AssertionError("not within five minutes")
