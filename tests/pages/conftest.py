"""A headless Chromium: Debian's, or the one that CHROMIUM names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    assert Path(path).exists(), f"there is no {path}: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(params=["light", "dark"])
def opened(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[[Path], Page]]:
    """Opens a file; fails if the page wrote an error or asked for anything but itself."""
    context = browser.new_context(
        viewport={"width": 1300, "height": 900}, color_scheme=request.param, offline=True
    )
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("dialog", lambda dialog: wrong.append(dialog.message))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))

    def open_file(path: Path) -> Page:
        page.goto(path.as_uri())
        return page

    yield open_file
    context.close()
    assert wrong == []
    assert len([url for url in asked if not url.startswith("data:")]) == 1
