"""Takes the pictures of the search page: docs/search_page.png (desktop) and docs/search_phone.png.

idml serve GALLERY, then: python docs/screenshots.py http://127.0.0.1:8000/ QUERY.png [QUERY.png]

The first query is asked on the desktop, the last one on the phone. Needs Chromium and playwright.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DESKTOP = {"viewport": {"width": 1200, "height": 980}}
PHONE = {"viewport": {"width": 360, "height": 740}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}


def take(browser: Any, url: str, query: Path, target: Path, options: dict[str, Any]) -> None:
    """Ask the page with an image, and write what is seen then."""
    context = browser.new_context(color_scheme="light", reduced_motion="reduce", **options)
    page = context.new_page()
    page.goto(url)
    page.set_input_files("#file", query)
    page.locator("#answer .verdict").wait_for()
    page.wait_for_load_state("networkidle")  # the thumbnails
    page.evaluate("window.scrollTo(0, 0)")
    page.screenshot(path=target)
    print(f"{target.name}: {query.name} is answered “{page.locator('#answer .verdict').inner_text()}”")
    context.close()


def main() -> None:
    """Write both pictures beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the running service; one that needs no key")
    parser.add_argument("query", nargs="+", type=Path, help="an image to ask with")
    asked = parser.parse_args()
    program = shutil.which("chromium")
    if program is None:
        parser.error("no chromium in the path; install it (on Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        take(browser, asked.url, asked.query[0], FOLDER / "search_page.png", DESKTOP)
        take(browser, asked.url, asked.query[-1], FOLDER / "search_phone.png", PHONE)
        browser.close()


if __name__ == "__main__":
    main()
