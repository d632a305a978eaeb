"""The pictures of pages: `python docs/pictures/make.py report.html report` writes report-light.png, -dark and -phone here. Needs playwright and Chromium."""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

page_file, name = Path(sys.argv[1]).resolve(), sys.argv[2]
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(
        executable_path=shutil.which("chromium"), args=["--no-sandbox"]
    )
    for kind, scheme, width, height in (
        ("light", "light", 1280, 1000),
        ("dark", "dark", 1280, 1000),
        ("phone", "light", 390, 844),
    ):
        page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
        page.goto(page_file.as_uri())
        chart = page.locator(".u-over").first
        if kind != "phone" and chart.count() and (box := chart.bounding_box()):
            page.mouse.move(box["x"] + box["width"] * 0.45, box["y"] + 60)
        page.screenshot(path=Path(__file__).parent / f"{name}-{kind}.png")
    browser.close()
