"""Takes the pictures of the search page: docs/search_page.png (desktop) and docs/search_phone.png.

    python docs/screenshots.py FOLDER

FOLDER gets a collection of letters, digits and signs, drawn in several fonts; it is indexed with the pretrained
network and calibrated on itself. What is there already is not made again. The desktop shows the answer to a letter that
is not in the collection, the phone the first screen. Needs Chromium and playwright.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import idml
from idml.data.datasets import load_glyphs

HERE = Path(__file__).parent
NAME = "Letters"  # of the collection
COLLECTED = "ABCDEFGHJKLMNPQRSTUVWXYZabdefghijmnqrty23456789&@#%?!$€£§¶+=<>ΓΔΘΛΞΠΣΦΨΩ"  # none is drawn like another
UNKNOWN = "Ж"  # not in the collection
DESKTOP = {"viewport": {"width": 1280, "height": 940}}
PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "is_mobile": True, "has_touch": True}
LOADED = "[...document.querySelectorAll('img[src]')].every((image) => image.complete)"


def draw_letters(folder: Path) -> None:
    """Write the characters of the embedded data set, one sub-folder for each; the unknown one beside them."""
    data = load_glyphs()
    for images in (data.train, data.test):
        for source, label in zip(images.sources, images.labels.tolist(), strict=True):
            code, _, words = images.classes[label].partition(" ")
            letter = chr(int(code.removeprefix("U+"), 16))
            if letter in COLLECTED or letter == UNKNOWN:
                place = folder / ("asked" if letter == UNKNOWN else "letters") / f"{letter} {words.lower()}"
                place.mkdir(parents=True, exist_ok=True)
                source.decode().resize((112, 112)).save(place / f"{Path(source.name).stem}.png")


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
    """Make the collection and write both pictures beside this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the collection")
    parser.add_argument("--query", type=Path, help="another image to ask with")
    asked = parser.parse_args()
    program = shutil.which("chromium")
    if program is None:
        parser.error("no chromium in the path; install it (on Debian: apt-get install chromium)")
    from playwright.sync_api import sync_playwright

    if not (asked.folder / "letters").exists():
        draw_letters(asked.folder)
    gallery = asked.folder / NAME
    if not (gallery / "calibration.json").exists():
        print(idml.index(asked.folder / "letters", gallery))
        print("\n".join(idml.calibrate(gallery)["words"]))
    query = asked.query or next((asked.folder / "asked").glob(f"{UNKNOWN}*/STIXGeneral.png"))
    command = [sys.executable, "-m", "idml.cli", "serve", str(gallery), "--port", "0"]
    service = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert service.stderr is not None
        url = next(line.split(" served at ")[1].split()[0] for line in service.stderr if " served at " in line)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
            take(browser, url, query, HERE / "search_page.png", DESKTOP)
            take(browser, url, None, HERE / "search_phone.png", PHONE)
            browser.close()
    finally:
        service.terminate()
        service.wait()


if __name__ == "__main__":
    main()
