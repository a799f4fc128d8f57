"""Takes the pictures of the search page: docs/search_page.png (desktop) and docs/search_phone.png.

idml serve GALLERY, then: python docs/screenshots.py http://127.0.0.1:8000/ QUERY.png

The desktop shows the answer to the query, the phone the first screen. Needs Chromium and playwright.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DESKTOP = {"viewport": {"width": 1280, "height": 860}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
LOADED = "[...document.querySelectorAll('img[src]')].every((image) => image.complete)"


def take(browser: Any, url: str, query: Path | None, target: Path, options: dict[str, Any]) -> None:
    """Open the page, ask it with an image if there is one, and write what is seen then."""
    context = browser.new_context(color_scheme="light", reduced_motion="reduce", **options)
    page = context.new_page()
    page.goto(url)
    page.locator("#wall img").first.wait_for()
    if query is not None:
        page.set_input_files("#file", query)
        page.locator("#answer .verdict").wait_for()
        print(f"{target.name}: {query.name} is answered “{page.locator('#answer .verdict').inner_text()}”")
    page.wait_for_load_state("networkidle")  # the thumbnails
    while not page.evaluate(LOADED):
        page.wait_for_timeout(50)
    page.evaluate("window.scrollTo(0, 0)")
    page.screenshot(path=target)
    context.close()


def main() -> None:
    """Write both pictures beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the running service; one that needs no key")
    parser.add_argument("query", type=Path, help="an image to ask with")
    asked = parser.parse_args()
    program = shutil.which("chromium")
    if program is None:
        parser.error("no chromium in the path; install it (on Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        take(browser, asked.url, asked.query, FOLDER / "search_page.png", DESKTOP)
        take(browser, asked.url, None, FOLDER / "search_phone.png", PHONE)
        browser.close()


if __name__ == "__main__":
    main()
