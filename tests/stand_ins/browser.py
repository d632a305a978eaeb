"""A real browser for tests of the pages that the product writes, and what a page is made of."""

import contextlib
import re
import shutil
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser

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
    problems = []

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


class PageParts(HTMLParser):
    """The tags of a page with their attributes, and each text with the tags around it."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.texts, self._open = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._open.append(self.tags[-1])

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self._open:
            self.texts.append((list(self._open), data))

    def values(self, *names):
        """Return the values of all attributes with these names."""
        return [attrs[name] for _, attrs in self.tags for name in names if name in attrs]


def check_nothing_acts(html, links=()):
    """Check that a page loads nothing and runs only its own scripts; return its parts.

    links: all that it refers to.
    """
    page = PageParts(html)
    assert not [attrs for _, attrs in page.tags if any(name.startswith("on") for name in attrs)]
    assert not {"img", "link", "iframe", "base", "object", "form"} & {tag for tag, _ in page.tags}
    assert page.values("href", "src", "action", "xlink:href") == [*links]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttp|WebSocket|importScripts|sendBeacon", html)
    (policy,) = (value for value in page.values("content") if "default-src" in value)
    assert policy.startswith("default-src 'none'")
    for around, text in page.texts:
        tag, attrs = around[-1]
        if tag in ("script", "style") and attrs.get("type") != "application/json":
            digest = b64encode(sha256(text.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy
    return page
