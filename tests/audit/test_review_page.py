"""The review in a real browser: by keyboard, by mouse, on a phone; nothing that a name holds is ever markup."""

import threading
import time

import pytest
from reviewed import WRONG, audited, copied

from idml.audit.decisions import read_decisions
from idml.audit.review import review_app

pytest_plugins = ["browser"]


@pytest.fixture(scope="module")
def original(tmp_path_factory, tiny_run):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IDML_CACHE", str(tmp_path_factory.mktemp("cache")))
        folder = tmp_path_factory.mktemp("audit")
        audited(folder, tiny_run)
        yield folder


class Served:
    """A review on a free port of this machine."""

    def __init__(self, place):
        import uvicorn

        self.out = place / "out"
        app = review_app(self.out, f"folder:{place / 'data'}")
        self.server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.02)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}/"

    def decisions(self):
        return [(d.decision, d.image, d.new_label) for d in read_decisions(self.out)]

    def close(self):
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture
def served(chromium, original, tmp_path):
    service = Served(copied(original, tmp_path))
    yield service
    service.close()


def shown(page):
    """The name of the image that is shown."""
    return page.locator("#caption").inner_text().split(": labelled")[0]


def wait(expect, page, status):
    expect(page.locator("#status")).to_contain_text(status)


def ready(page, expect):
    expect(page.locator("#item")).to_be_visible()
    expect(page.locator("#image")).to_have_js_property("complete", True)
    return shown(page)


def test_an_image_is_shown_with_its_label_and_its_evidence(served, visit, expect):
    page = visit(served.url)
    ready(page, expect)
    expect(page.locator("#title")).to_contain_text("Likely mislabelled, number 1: class")
    suggested = page.locator("#label").input_value()
    own = page.locator("#title").inner_text().partition(": ")[2]
    expect(page.locator("#why")).to_contain_text(f"from the other images of '{own}' as from those of '{suggested}'")
    expect(page.locator("#about")).to_contain_text("37 images of 6 classes")
    assert page.locator("#image").evaluate("image => image.naturalWidth") == 48
    assert page.locator("#partners img").count() >= 4
    page.wait_for_function("[...document.querySelectorAll('#partners img')].every(i => i.naturalWidth > 0)")
    titles = [f"Nearest images of {suggested} (suggested)", f"Nearest images of {own} (its label)"]
    expect(page.locator("#partners h3")).to_have_text(titles)
    for group, label in zip(page.locator("#partners section").all(), (suggested, own), strict=True):
        captions = group.locator("figcaption").all_inner_texts()
        assert captions
        assert all(caption.startswith(f"{label} (") for caption in captions)
    assert suggested in ("class 0", "class 1")
    looks = page.evaluate("""["keep", "exclude"].map((id) => getComputedStyle(document.getElementById(id)))
      .map((style) => [style.color, style.backgroundColor].join())""")
    assert looks[0] != looks[1]
    assert page.evaluate("document.activeElement.id") == "title"


def test_keys_keep_relabel_exclude_skip_and_undo(served, visit, expect):
    page = visit(served.url)
    first = ready(page, expect)
    page.keyboard.press("k")
    wait(expect, page, f"Kept: {first}")
    second = shown(page)
    suggested = page.locator("#label").input_value()
    page.keyboard.press("r")
    wait(expect, page, f"Relabelled: {second} to {suggested}")
    third = shown(page)
    page.keyboard.press("s")
    wait(expect, page, "Skipped")
    fourth = shown(page)
    page.keyboard.press("d")
    wait(expect, page, f"Excluded: {fourth}")
    assert len({first, second, fourth}) == 3
    assert third not in (first, second)
    page.keyboard.press("u")
    wait(expect, page, f"Undone: {fourth} is open again")
    assert shown(page) == fourth
    page.keyboard.press("u")
    wait(expect, page, f"Undone: {second} is open again")
    assert [decision for decision, _, _ in served.decisions()] == ["keep", "relabel", "exclude", "undo", "undo"]
    assert served.decisions()[1][2] == suggested
    page.keyboard.press("u")
    wait(expect, page, f"Undone: {first}")
    page.keyboard.press("u")
    wait(expect, page, "There is nothing to undo in this tab")
    expect(page.locator("#progress")).to_contain_text("0 of ")


def test_a_label_is_typed(served, visit, expect):
    page = visit(served.url)
    first = ready(page, expect)
    page.locator("#label").fill("")
    page.locator("#title").focus()
    page.keyboard.press("r")  # nothing to relabel to: the field is next
    wait(expect, page, "Type the new label")
    assert page.evaluate("document.activeElement.id") == "label"
    page.keyboard.type("duck, ruddy <u>")  # k, d, u and s are letters here
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "title"
    page.locator("#label").press("Enter")
    wait(expect, page, f"Relabelled: {first} to duck, ruddy <u>.")
    assert served.decisions() == [("relabel", first, "duck, ruddy <u>")]
    page.locator("#label").fill("class")
    expect(page.locator("#labels option")).to_have_count(6)


def test_lists_are_filtered_and_worked_off(served, visit, expect):
    page = visit(served.url)
    ready(page, expect)
    page.get_by_label("Show", exact=True).select_option("duplicate")
    expect(page.locator("#title")).to_contain_text("Duplicate, number 1")
    expect(page.locator("#partners h3")).to_have_text("Its duplicates")
    total = int(page.locator("#bar").get_attribute("max"))
    page.locator("#title").focus()  # in the choice, letters choose
    for number in range(total):
        expect(page.locator("#progress")).to_have_text(f"{number} of {total} decided")
        page.keyboard.press("d")
    expect(page.locator("#done")).to_be_visible()
    expect(page.locator("#item")).to_be_hidden()
    expect(page.locator("#count-duplicate")).to_have_text(f"duplicates (0 of {total} open)")
    page.get_by_label("include decided images").check()
    expect(page.locator("#verdict")).to_contain_text("Excluded on 20")
    page.get_by_label("include decided images").uncheck()
    page.get_by_label("Show", exact=True).select_option("mislabelled")
    expect(page.locator("#title")).to_contain_text("Likely mislabelled")


def test_a_filter_that_is_chosen_while_another_is_applied_is_not_lost(served, visit, expect):
    page = visit(served.url)
    ready(page, expect)
    page.evaluate(
        """() => {
          for (const [id, field, value] of [["decided", "checked", true], ["kind", "value", "duplicate"]]) {
            const element = document.getElementById(id);
            element[field] = value;
            element.dispatchEvent(new Event("change"));
          }
        }"""
    )
    expect(page.locator("#title")).to_contain_text("Duplicate, number 1")


def test_buttons_and_a_page_that_is_opened_again(served, visit, expect):
    page = visit(served.url)
    first = ready(page, expect)
    page.get_by_role("button", name="Exclude").click()
    wait(expect, page, f"Excluded: {first}")
    page.get_by_role("button", name="Write cleaned.csv").click()
    wait(expect, page, "1 excluded")
    again = visit(served.url)
    assert ready(again, expect) != first
    assert (served.out / "cleaned.csv").exists()


def test_two_tabs_go_through_one_list(served, visit, expect):
    one, other = visit(served.url), visit(served.url)
    first = ready(one, expect)
    assert ready(other, expect) == first
    one.keyboard.press("k")
    wait(expect, one, "Kept")
    other.keyboard.press("s")
    wait(expect, other, "Skipped")
    assert shown(other) != first
    other.keyboard.press("k")
    wait(expect, other, "Kept")
    assert len(served.decisions()) == 2


def test_markup_in_a_name_is_text(served, visit, expect):
    page = visit(served.url)
    for _ in range(2):
        if WRONG in ready(page, expect):
            break
        page.keyboard.press("s")
        wait(expect, page, "Skipped")
    assert WRONG in shown(page)
    assert page.locator("#item img[src='x']").count() == 0


def test_keys_can_be_turned_off_and_shortcuts_of_the_browser_stay(served, visit, expect):
    page = visit(served.url)
    ready(page, expect)
    page.locator("summary").click()
    page.get_by_label("use single keys").uncheck()
    page.locator("#title").focus()
    page.keyboard.press("d")
    page.get_by_label("use single keys").check()
    page.keyboard.press("Alt+d")
    page.keyboard.press("s")
    wait(expect, page, "Skipped")
    assert served.decisions() == []


def test_a_review_that_has_ended_says_so(served, visit, expect):
    page = visit(served.url)
    ready(page, expect)
    page.context.set_offline(True)
    page.keyboard.press("k")
    expect(page.get_by_role("alert")).to_have_text("The review no longer responds. Is the command still running?")
    visit.wrong = [line for line in visit.wrong if "ERR_INTERNET_DISCONNECTED" not in line]
    assert served.decisions() == []


def test_on_a_phone_nothing_is_cut_off_and_everything_can_be_touched(served, visit, expect):
    page = visit(served.url, viewport={"width": 360, "height": 640}, has_touch=True)
    first = ready(page, expect)
    # No part of the finding is behind the buttons, wherever the page is scrolled to.
    for down in (0, 200, 10_000):
        page.evaluate(f"scrollTo(0, {down})")
        covered = page.evaluate("""() => {
          const bar = document.getElementById("actions").getBoundingClientRect();
          return [...document.querySelectorAll("#title, #why, #image, #caption, #partners img, #partners figcaption")]
            .map((node) => [node.outerHTML, node.getBoundingClientRect()])
            .filter(([, box]) => box.bottom > bar.top + 1 && box.top < bar.bottom - 1)
            .map(([html]) => html);
        }""")
        assert covered == []
    page.evaluate("scrollTo(0, 0)")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    for button in page.locator("#actions button").all():
        box = button.bounding_box()
        assert box["height"] >= 44
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    page.locator("#keep").tap()
    wait(expect, page, f"Kept: {first}")


def test_everything_has_a_name(served, visit, expect):
    page = visit(served.url)
    ready(page, expect)
    nameless = page.evaluate(
        """[...document.querySelectorAll("button, input, select, img, progress")].filter((e) => e.offsetParent
          && !(e.labels?.length || e.getAttribute("aria-label") || e.alt || e.textContent.trim()))
          .map((e) => e.outerHTML)"""
    )
    assert nameless == []
    assert page.locator("[role=status]").count() == page.locator("[role=alert]").count() == 1
