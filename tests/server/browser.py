"""A real browser for the tests: whatever a page logs as an error, or asks of another host, fails its test."""

import shutil
from urllib.parse import urlsplit

import pytest
from stand_in import StandIn


@pytest.fixture(scope="module")
def chromium():
    """The Chromium in the path."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no browser: install chromium (on Debian: apt-get install chromium) to test the page")
    from playwright.sync_api import sync_playwright

    # Ended with the module: while it runs, no other test of this thread could use an event loop.
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


class Visits:
    """Opens pages and remembers what they did wrong; ``refused`` holds the statuses that a test provokes."""

    def __init__(self, browser):
        self.browser, self.refused, self.wrong, self.contexts = browser, set(), [], []

    def __call__(self, url, **options):
        context = self.browser.new_context(**{"viewport": {"width": 1280, "height": 1600}, **options})
        context.set_default_timeout(120_000)
        self.contexts.append(context)
        page = context.new_page()
        page.on("console", self._heard)
        page.on("pageerror", lambda error: self.wrong.append(f"uncaught: {error}"))
        host = urlsplit(url).netloc
        page.on("request", lambda request: self._asked(request.url, host))
        page.goto(url)
        return page

    def _heard(self, message):
        if message.type not in ("error", "warning"):
            return
        if not any(f"status of {status} " in message.text for status in self.refused):
            self.wrong.append(f"console: {message.text}")

    def _asked(self, url, host):
        parts = urlsplit(url)
        if parts.scheme not in ("blob", "data") and parts.netloc != host:
            self.wrong.append(f"another host: {url}")

    def close(self):
        for context in self.contexts:
            context.close()


@pytest.fixture
def visit(chromium):
    """Opens a page in a browser of its own; at the end nothing may have gone wrong in it."""
    visits = Visits(chromium)
    yield visits
    visits.close()
    assert visits.wrong == []


@pytest.fixture
def expect(chromium):
    """Playwright's assertions, which wait until they hold."""
    from playwright.sync_api import expect

    expect.set_options(timeout=120_000)  # a machine may have other things to do
    return expect


@pytest.fixture
def service():
    """A service with made answers."""
    stand_in = StandIn()
    yield stand_in
    stand_in.close()
