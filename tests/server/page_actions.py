"""What the tests of the page do and look at."""

import time

from stand_in import png

# For every visible element with text of its own: the contrast with what is behind it (WCAG 2.2, 1.4.3).
CONTRASTS = """() => {
  const parse = (colour) => {
    const parts = colour.match(/[\\d.]+/g).map(Number);
    return { rgb: parts.slice(0, 3), alpha: parts[3] ?? 1 };
  };
  const over = (top, below) => top.rgb.map((c, i) => c * top.alpha + below[i] * (1 - top.alpha));
  const ground = (node) => {
    if (!node) return [255, 255, 255];
    const own = parse(getComputedStyle(node).backgroundColor);
    return own.alpha === 1 ? own.rgb : over(own, ground(node.parentElement));
  };
  const light = (rgb) => {
    const [r, g, b] = rgb.map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  for (const node of document.body.querySelectorAll("*")) {
    const words = [...node.childNodes].filter((n) => n.nodeType === 3).map((n) => n.data.trim()).join("");
    if (!words || !node.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const behind = ground(node);
    const text = over(parse(getComputedStyle(node).color), behind);
    const [low, high] = [light(text), light(behind)].sort((a, b) => a - b);
    found.push([(high + 0.05) / (low + 0.05), words.slice(0, 60)]);
  }
  return found;
}"""

# What a screen reader would stumble over.
FAULTS = """() => {
  const faults = [];
  const seen = (node) => node.checkVisibility({ visibilityProperty: true });
  for (const image of document.images) if (!image.hasAttribute("alt")) faults.push(`no alt: ${image.outerHTML}`);
  const named = (node) =>
    node.getAttribute("aria-label") ||
    document.getElementById(node.getAttribute("aria-labelledby"))?.textContent.trim() ||
    [...(node.labels ?? [])].map((label) => label.textContent).join("") ||
    node.textContent.trim() ||
    [...node.querySelectorAll("img")].map((image) => image.alt).join("");
  const controls = "a, button, input, select, textarea, summary, [tabindex='0'], dialog[open], section, nav";
  for (const node of document.querySelectorAll(controls)) {
    if (seen(node) && !named(node)) faults.push(`no name: ${node.outerHTML.slice(0, 80)}`);
  }
  for (const node of document.querySelectorAll("[for], [aria-labelledby], [aria-describedby]")) {
    for (const name of ["for", "aria-labelledby", "aria-describedby"]) {
      for (const id of (node.getAttribute(name) ?? "").split(" ").filter(Boolean)) {
        if (!document.getElementById(id)) faults.push(`${name} of nothing: ${id}`);
      }
    }
  }
  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) faults.push(`id twice: ${id}`);
  if (document.querySelectorAll("h1").length !== 1) faults.push("not one h1");
  let above = 0;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4")) {
    if (!seen(heading)) continue;
    const level = Number(heading.tagName[1]);
    if (level > above + 1) faults.push(`a level is left out before: ${heading.textContent}`);
    above = level;
  }
  if (!document.documentElement.lang) faults.push("no lang");
  for (const landmark of ["header", "nav", "main"]) {
    if (document.querySelectorAll(landmark).length !== 1) faults.push(`not one ${landmark}`);
  }
  for (const node of document.querySelectorAll("[tabindex]")) if (node.tabIndex > 0) faults.push("tabindex above 0");
  return faults;
}"""

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}
MATCH, UNSURE, NOVEL = ({"name": f"{word}.png", "mimeType": "image/png", "buffer": png(word)} for word in
                        ("match", "unsure", "novel"))  # fmt: skip


def verdict(page):
    return page.locator("#answer .verdict")


def ask(page, image=MATCH):
    page.set_input_files("#file", image)
    verdict(page).wait_for()


def loaded(page, selector):
    """Wait until there are pictures, all fetched and decoded; how many."""
    page.locator(selector).first.wait_for()
    until(page, f"[...document.querySelectorAll({selector!r})].every(i => i.complete && i.naturalWidth)")
    return page.locator(selector).count()


def until(page, condition, seconds=300):
    """Wait for a condition; Playwright's own way asks the page to eval, which its policy forbids."""
    end = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < end, f"{condition} did not become true"
        page.wait_for_timeout(20)


def until_that(page, condition, seconds=300):
    """Wait for something outside of the page."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        page.wait_for_timeout(20)


def rested(page):
    """Wait until no question is open."""
    until(page, "!document.querySelector('[aria-busy]')")


def until_quiet(page, service, pause=500):
    """Wait until no question is open and none has reached the service for a while, however slow the machine is."""
    before = -1
    while len(service.asked) != before:
        before = len(service.asked)
        rested(page)
        page.evaluate("new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))")
        page.wait_for_timeout(pause)


def assert_readable(page):
    """No fault that a screen reader meets, and text that stands out from its ground."""
    assert page.evaluate(FAULTS) == []
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 5
    assert [found for found in contrasts if found[0] < 4.5] == []


def assert_fits(page):
    """Nothing is wider than the window."""
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0


def drop(page, target, data, name, kind="image/png"):
    """Let a file fall on an element, as a browser does it."""
    transfer = page.evaluate_handle(
        """([bytes, name, type]) => {
          const transfer = new DataTransfer();
          transfer.items.add(new File([new Uint8Array(bytes)], name, { type }));
          return transfer;
        }""",
        [list(data), name, kind],
    )
    for event in ("dragenter", "dragover", "drop"):
        page.dispatch_event(target, event, {"dataTransfer": transfer})
