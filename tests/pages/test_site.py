"""The site of `make site`, from the disk and without a network: it opens, and its search finds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

SITE = Path(__file__).parents[2] / "build" / "site"
PAGES = sorted(path for path in SITE.rglob("*.html") if path.name != "404.html")  # a server's


@pytest.fixture(params=["light", "dark"])
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """Fails if a page wrote an error, or asked for what is not on the disk."""
    context = browser.new_context(
        viewport={"width": 1300, "height": 900}, color_scheme=request.param, offline=True
    )
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    # one that is cut off because the next page is opened is no failure
    page.on(
        "requestfailed",
        lambda failed: failed.failure == "net::ERR_ABORTED" or wrong.append(failed.url),
    )
    page.on("request", lambda asked: _is_own(asked.url) or wrong.append(asked.url))
    yield page
    context.close()
    assert wrong == []


def _is_own(url: str) -> bool:
    return url.startswith((SITE.as_uri(), "data:", "blob:", "about:"))


def test_every_page_opens_without_an_error(page: Page) -> None:
    assert len(PAGES) > 40
    for path in PAGES:
        page.goto(path.as_uri())
        assert page.locator("h1").first.is_visible(), path


def test_the_search_finds_and_leads_there(page: Page) -> None:
    page.goto((SITE / "index.html").as_uri())
    page.keyboard.press("/")  # focuses the field
    page.keyboard.type("run checkpoint staleness")
    found = page.locator(".md-search-result__item a").first
    found.wait_for(state="visible")
    assert page.locator(".md-search-result__item").count() >= 2
    page.keyboard.press("Enter")
    page.wait_for_url("**/*.html?h=*")
    assert page.locator("mark").count() > 0  # what was found is marked there


def test_a_search_for_nothing_there_says_so(page: Page) -> None:
    page.goto((SITE / "index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("zzqxxyzzy")
    page.get_by_text("No matching documents").wait_for(state="visible")
