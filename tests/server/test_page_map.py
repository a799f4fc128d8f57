"""The map, and how the page looks and sounds: in a real browser, against a service with made answers."""

from itertools import pairwise

import pytest
from page_actions import MATCH, NOVEL, UNSURE, ask, assert_fits, assert_readable, loaded, rested, verdict
from stand_in import HOSTILE

pytest_plugins = ["browser"]
PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True, "device_scale_factor": 2}


def painted(page):
    """The colours on the canvas, and how many pixels have each."""
    return page.evaluate("""() => {
      const canvas = document.querySelector("#map");
      const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
      copy.drawImage(canvas, 0, 0);
      const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
      const colours = {};
      for (let i = 0; i < data.length; i += 4) {
        if (data[i + 3] === 255) {
          const colour = [data[i], data[i + 1], data[i + 2]].join();
          colours[colour] = (colours[colour] ?? 0) + 1;
        }
      }
      return colours;
    }""")


def open_map(page):
    page.get_by_role("link", name="Map").click()
    page.locator("#map").wait_for()


def spot(page, i, n=40):
    """Where the stand-in's i-th point lies on the page: five columns, the same scale both ways, 14 pixels around."""
    box = page.locator("#map").bounding_box()
    width, height = (page.locator("#map").evaluate(f"c => c.client{side}") for side in ("Width", "Height"))
    rows = n // 5 - 1
    scale = min((width - 28) / 4, (height - 28) / rows)
    edge = page.locator("#map").evaluate("c => c.clientLeft")
    return (
        box["x"] + edge + width / 2 + scale * (i % 5 - 2),
        box["y"] + edge + height / 2 + scale * (i // 5 - rows / 2),
    )


class TestMap:
    def test_every_class_and_every_level_is_painted(self, service, visit, expect):
        page = visit(service.url)
        open_map(page)
        by_class = painted(page)
        large = [colour for colour, pixels in by_class.items() if pixels > 100]
        assert len(large) == 5  # four classes and no label
        expect(page.locator("#legend li")).to_have_text([HOSTILE, "gull", "heron", "tern", "no label"])
        page.get_by_label("uncertainty").check()
        expect(page.locator("#legend li")).to_contain_text(["least", "", "median", "", "most"])
        by_level = painted(page)
        assert by_level != by_class
        assert_fits(page)
        assert len([colour for colour, pixels in by_level.items() if pixels > 10]) >= 17  # as many as levels
        assert_readable(page)

    def test_the_mouse_shows_and_keeps_a_point(self, service, visit, expect):
        page = visit(service.url)
        open_map(page)
        shown = page.locator("#map-item")
        expect(shown).to_have_text("No image chosen.")
        page.mouse.move(*spot(page, 7))
        expect(shown).to_contain_text("heron")
        assert loaded(page, "#map-item img") == 1
        assert service.requests("GET", f"/api/items/{7:032x}/thumbnail")
        page.mouse.move(0, 0)
        expect(shown).to_have_text("No image chosen.")
        page.mouse.click(*spot(page, 6))
        expect(shown).to_contain_text("tern")
        page.mouse.move(*spot(page, 7))
        expect(shown).to_contain_text("heron")
        page.mouse.move(0, 0)
        expect(shown).to_contain_text("tern")
        shown.get_by_role("button").click()
        expect(page.locator("#item-facts")).to_contain_text("birds/006.png")

    def test_the_keyboard_goes_from_point_to_point(self, service, visit, expect):
        page = visit(service.url)
        open_map(page)
        page.get_by_label("uncertainty").focus()
        page.keyboard.press("Tab")
        canvas = page.locator("#map")
        expect(canvas).to_be_focused()
        shown = page.locator("#map-item button")
        ids = []
        for key in ("ArrowUp", "ArrowLeft", "ArrowUp", "ArrowRight", "ArrowDown"):
            page.keyboard.press(key)
            ids.append(int(shown.get_attribute("data-id"), 16))
        assert ids[0] in (17, 22)  # nearest to the middle
        assert [b - a for a, b in pairwise(ids)] == [-1, -5, 1, 5]
        for _ in range(9):
            page.keyboard.press("ArrowLeft")
        assert int(shown.get_attribute("data-id"), 16) % 5 == 0  # the edge holds
        page.keyboard.press("Enter")
        expect(page.locator("#item-dialog")).to_be_visible()
        page.keyboard.press("Escape")
        expect(canvas).to_be_focused()

    def test_a_finger_chooses_a_point(self, service, visit, expect):
        page = visit(service.url + "#map", **PHONE)
        page.locator("#map").wait_for()
        page.locator("#map").scroll_into_view_if_needed()
        page.touchscreen.tap(*spot(page, 6))
        expect(page.locator("#map-item")).to_contain_text("tern")

    def test_the_list_holds_what_the_map_shows(self, service, visit, expect):
        page = visit(service.url)
        open_map(page)
        page.get_by_text("The map as a list").click()
        groups = page.locator("#map-list details")
        expect(groups).to_have_count(5)
        expect(groups.nth(1).locator("summary")).to_have_text("gull (8 images)")
        expect(groups.nth(4).locator("summary")).to_have_text("no label (8 images)")
        groups.nth(1).locator("summary").press("Enter")
        expect(groups.nth(1).locator("li")).to_have_count(8)
        groups.nth(1).locator("li button").nth(2).click()
        expect(page.locator("#item-facts")).to_contain_text("birds/010.png")
        assert_readable(page)

    def test_changes_reach_the_map_without_drawing_it_anew(self, service, visit, expect):
        page = visit(service.url)
        open_map(page)
        page.mouse.click(*spot(page, 6))
        page.locator("#map-item button").click()
        page.locator("#item-label").fill("skua")
        page.locator("#item-label").press("Enter")
        page.locator("#confirm-yes").click()
        expect(page.locator("#map-item")).to_contain_text("skua")
        expect(page.locator("#legend")).to_contain_text("skua")
        page.locator("#map-item button").click()
        page.get_by_role("button", name="Delete").click()
        page.locator("#confirm-yes").click()
        expect(page.locator("#map-item")).to_have_text("No image chosen.")
        expect(page.locator("#legend")).not_to_contain_text("skua")
        expect(page.locator("#map-title")).to_be_focused()
        assert len(service.requests("GET", "/api/map")) == 1

    def test_an_empty_map_and_a_refused_one_say_so(self, service, visit, expect):
        visit.refused.add(503)
        service.refuse["GET /api/map"] = (503, "the map is being drawn, try again")
        page = visit(service.url)
        page.get_by_role("link", name="Map").click()
        expect(page.get_by_role("alert")).to_have_text("the map is being drawn, try again")
        service.refuse.clear()
        service.items.clear()
        page.get_by_role("link", name="Search").click()
        page.get_by_role("link", name="Map").click()
        expect(page.locator("#map-state")).to_contain_text("There is no map yet")
        expect(page.locator("#map")).to_be_hidden()


class TestLooks:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_every_view_can_be_read(self, service, visit, expect, scheme):
        service.drift = "the gallery has doubled since the calibration"
        page = visit(service.url, color_scheme=scheme)
        expect(page.locator("#gallery")).to_contain_text("40 images")
        assert_readable(page)
        for image in (MATCH, UNSURE, NOVEL):
            ask(page, image)
            rested(page)
            page.locator("#answer summary").click()
            assert_readable(page)
        page.locator("#found > li > .tile").first.click()
        expect(page.locator("#item-facts")).to_be_visible()
        assert_readable(page)
        page.get_by_role("button", name="Delete").click()
        assert_readable(page)
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        for view in ("Map", "Most ambiguous"):
            page.get_by_role("link", name=view).click()
            page.wait_for_timeout(100)
            assert_readable(page)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 26)"
        )

    def test_nothing_is_wider_than_a_phone(self, service, visit, expect):
        for item in service.items[:6]:
            item["label"] = "Llanfairpwllgwyngyllgogerychwyrndrobwllllantysiliogogogoch" * 3
            item["path"] = "x" * 300
        service.drift = "w" * 200
        page = visit(service.url, **PHONE)
        expect(page.locator("#gallery")).to_contain_text("40 images")
        assert_fits(page)
        ask(page)
        assert_fits(page)
        columns = page.locator("#found").evaluate("g => getComputedStyle(g).gridTemplateColumns.split(' ').length")
        assert columns == 2
        page.locator("#found summary").first.click()
        page.locator("#found > li > .tile").first.click()
        expect(page.locator("#item-facts")).to_be_visible()
        assert_fits(page)
        assert page.locator("#item-dialog").evaluate("d => d.scrollWidth <= d.clientWidth")
        page.keyboard.press("Escape")
        for view in ("Map", "Most ambiguous"):
            page.get_by_role("link", name=view).click()
            page.wait_for_timeout(100)
            assert_fits(page)

    def test_the_answer_is_seen_at_once_on_a_phone(self, service, visit, expect):
        page = visit(service.url, **PHONE)
        ask(page)
        expect(verdict(page)).to_be_in_viewport(ratio=1)
        expect(page.locator("#answer .chance").last).to_be_in_viewport(ratio=1)

    def test_targets_are_large_enough_for_a_finger(self, service, visit):
        page = visit(service.url, **PHONE)
        ask(page)
        small = page.evaluate("""() => [...document.querySelectorAll("button, nav a, .button, summary, input")]
          .filter((node) => node.checkVisibility() && !node.classList.contains("unseen"))
          .map((node) => [node.getBoundingClientRect(), node.textContent])
          .filter(([box]) => box.height < 24 || box.width < 24).map(([, words]) => words)""")
        assert small == []  # WCAG 2.2, 2.5.8

    def test_motion_is_left_out_where_it_is_not_wanted(self, service, visit):
        service.wait = 1.0
        for motion, running in (("reduce", 0), ("no-preference", 1)):
            page = visit(service.url, reduced_motion=motion)
            page.set_input_files("#file", MATCH)
            page.locator(".waiting").wait_for()
            assert page.evaluate("document.getAnimations().length") == running


class TestKeyboard:
    def test_the_tab_key_reaches_everything_in_order(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        page.get_by_role("link", name="Skip to the content").focus()
        stops = []
        for i in range(9):
            page.keyboard.press("Tab" if i else "Shift")  # the first stop is there already
            stops.append(page.evaluate("(document.activeElement.id || document.activeElement.textContent).trim()"))
            ring = page.evaluate("""() => {
              const node = document.activeElement.matches(".unseen")
                ? document.activeElement.nextElementSibling : document.activeElement;
              return parseFloat(getComputedStyle(node).outlineWidth);
            }""")
            assert ring >= 2, stops[-1]
        assert stops[:8] == [
            "Skip to the content", "Search", "Map", "Most ambiguous", "file", "In numbers", "max-error",
            page.locator("#found button").first.text_content(),
        ]  # fmt: skip
        assert stops[8] == "+3 near duplicates"

    def test_the_skip_link_skips(self, service, visit, expect):
        page = visit(service.url)
        expect(page.locator("#gallery")).to_contain_text("40 images")
        page.keyboard.press("Tab")
        skip = page.get_by_role("link", name="Skip to the content")
        expect(skip).to_be_in_viewport()
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_be_focused()
        expect(page.locator("#view-search")).to_be_visible()

    def test_the_back_button_goes_back_through_the_views(self, service, visit, expect):
        page = visit(service.url + "#search")
        expect(page.get_by_role("link", name="Search")).to_have_attribute("aria-current", "page")
        open_map(page)
        page.get_by_role("link", name="Most ambiguous").click()
        expect(page.locator("#view-ambiguous")).to_be_visible()
        page.go_back()
        expect(page.locator("#view-map")).to_be_visible()
        expect(page.locator("#view-ambiguous")).to_be_hidden()
        expect(page.get_by_role("link", name="Map")).to_have_attribute("aria-current", "page")
