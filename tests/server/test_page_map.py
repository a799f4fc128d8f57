"""The map, and how the page looks and sounds: in a real browser, against a service with made answers."""

import re
from itertools import pairwise

import pytest
from page_actions import (
    MATCH,
    NOVEL,
    PHONE,
    UNSURE,
    ask,
    assert_fits,
    assert_readable,
    loaded,
    rested,
    until,
    until_quiet,
    verdict,
)
from stand_in import HOSTILE

pytest_plugins = ["browser"]


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
        named = [f"{label}8" for label in (HOSTILE, "gull", "heron", "tern", "no label")]
        expect(page.locator("#legend li")).to_have_text(named)
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
        page.get_by_role("button", name="Select an area").focus()
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

    def test_zooming_and_panning_change_what_the_grid_shows(self, service, visit, expect):
        page = visit(service.url)
        open_map(page)
        count, tiles = page.locator("#map-count"), page.locator("#map-grid > li")
        expect(count).to_have_text("40 on the map, 36 shown")
        expect(tiles).to_have_count(36)
        page.mouse.move(*spot(page, 0))
        page.mouse.wheel(0, -700)
        expect(count).to_contain_text("in view")
        ids = lambda: [int(each.get_attribute("data-id"), 16) for each in tiles.locator("button").all()]  # noqa: E731
        seen = ids()
        assert 0 in seen  # the place under the pointer stays
        assert 39 not in seen
        assert len(seen) < 20
        before = painted(page)
        box = page.locator("#map").bounding_box()
        page.mouse.move(box["x"] + 300, box["y"] + 400)
        page.mouse.down()
        page.mouse.move(box["x"] + 300, box["y"] + 100, steps=4)
        page.mouse.up()
        until(page, "document.querySelectorAll('#map-grid > li').length > 0")
        assert painted(page) != before
        expect(tiles.locator(f"[data-id='{0:032x}']").first).not_to_be_attached()
        page.get_by_role("button", name="Show all").click()
        expect(count).to_have_text("40 on the map, 36 shown")
        page.get_by_role("button", name="Zoom in").click()
        page.get_by_role("button", name="Zoom in").click()
        expect(count).to_contain_text("in view")
        canvas = page.locator("#map")
        canvas.press("-")
        canvas.press("-")
        expect(count).to_have_text("40 on the map, 36 shown")
        canvas.press("+")
        canvas.press("+")
        canvas.press("ArrowUp")
        for _ in range(9):
            canvas.press("ArrowUp")  # the map follows the chosen point
        id = page.locator("#map-item button").get_attribute("data-id")
        assert int(id, 16) < 5
        expect(page.locator(f"#map-grid [data-id='{id}']").first).to_be_attached()
        canvas.press("0")
        expect(count).to_contain_text("on the map")
        page.mouse.wheel(0, 300)  # everything is shown: the page scrolls, the map does not

    def test_a_selected_area_is_shown_in_the_grid(self, service, visit, expect):
        page = visit(service.url)
        open_map(page)
        page.get_by_role("button", name="Select an area").click()
        (left, top), (right, bottom) = spot(page, 5), spot(page, 12)
        page.mouse.move(left - 9, top - 9)
        page.mouse.down()
        page.mouse.move(right + 9, bottom + 9, steps=3)
        page.mouse.up()
        tiles = page.locator("#map-grid > li")
        expect(tiles).to_have_count(6)
        expect(page.locator("#map-count")).to_have_text("6 selected")
        assert {int(each.get_attribute("data-id"), 16) for each in tiles.locator("button").all()} == {
            5,
            6,
            7,
            10,
            11,
            12,
        }
        expect(page.get_by_role("button", name="Select an area")).to_have_attribute("aria-pressed", "false")
        tiles.first.hover()  # a tile shows its point
        first = tiles.first.locator("button").get_attribute("data-id")
        expect(page.locator("#map-item button")).to_have_attribute("data-id", first)
        page.mouse.click(*spot(page, 12))
        expect(page.locator("#map-item")).to_contain_text("heron")
        page.locator("#map").press("ArrowRight")  # 13 is not selected
        expect(page.locator("#map-item button")).to_have_attribute("data-id", f"{12:032x}")
        page.locator("#map").press("Escape")
        expect(page.locator("#map-count")).to_contain_text("40 on the map")
        page.keyboard.down("Shift")  # the same without the button
        page.mouse.move(left - 9, top - 9)
        page.mouse.down()
        page.mouse.move(left + 9, bottom + 9, steps=3)
        page.mouse.up()
        page.keyboard.up("Shift")
        expect(page.locator("#map-count")).to_have_text("2 selected")
        page.get_by_role("button", name="End the selection").click()
        expect(page.locator("#map-count")).to_contain_text("40 on the map")
        expect(page.locator("#map")).to_be_focused()

    def test_a_label_of_the_legend_selects_its_images(self, service, visit, expect):
        for i, item in enumerate(service.items):
            item["label"] = f"kind {i // 2:02d}"
        page = visit(service.url)
        open_map(page)
        entry = page.locator("#legend button").nth(3)
        entry.press("Enter")
        expect(page.locator("#map-count")).to_have_text("2 selected")
        expect(page.locator("#map-grid > li")).to_have_text([re.compile("^kind 03")] * 2)
        expect(entry).to_have_attribute("aria-pressed", "true")
        assert_readable(page)
        entry.press("Enter")
        expect(page.locator("#map-count")).to_contain_text("40 on the map")
        expect(page.locator("#legend button")).to_have_count(16)
        other = page.get_by_label("Another label")
        expect(other.locator("option").first).to_have_text("4 more labels…")
        other.select_option("kind 19")
        expect(page.locator("#map-count")).to_have_text("2 selected")
        page.locator("#map-grid > li button").first.click()
        expect(page.locator("#item-facts")).to_contain_text("birds/03")

    def test_two_fingers_zoom(self, service, visit, expect):
        page = visit(service.url + "#map", **PHONE)
        page.locator("#map").wait_for()
        page.evaluate("""() => {
          const canvas = document.querySelector("#map");
          canvas.setPointerCapture = () => {};  // made events have no pointer to capture
          const send = (type, pointerId, x) => canvas.dispatchEvent(new PointerEvent(type, {
            pointerId, pointerType: "touch", isPrimary: pointerId === 11, button: 0, bubbles: true,
            clientX: canvas.getBoundingClientRect().left + x, clientY: canvas.getBoundingClientRect().top + 100 }));
          send("pointerdown", 11, 100);
          send("pointerdown", 12, 140);
          send("pointermove", 12, 260);
          send("pointerup", 12, 260);
          send("pointerup", 11, 100);
        }""")
        expect(page.locator("#map-count")).to_contain_text("in view")
        expect(page.locator("#map")).to_have_css("touch-action", "none")
        assert_fits(page)

    def test_a_map_that_is_being_computed_is_asked_for_again(self, service, visit, expect):
        service.drawing = 3
        page = visit(service.url)
        open_map(page)
        assert len(service.requests("GET", "/api/map")) == 4
        expect(page.locator("#map-state")).to_have_text("")
        service.drawing = 10**6
        page.reload()
        expect(page.locator("#map-state")).to_contain_text("Drawing the map")
        page.get_by_role("link", name="Search", exact=True).click()
        until_quiet(page, service)  # a question that was on its way has arrived
        asked = len(service.requests("GET", "/api/map"))
        page.wait_for_timeout(200)
        assert len(service.requests("GET", "/api/map")) == asked  # nobody waits for it

    def test_an_old_map_is_hidden_while_a_new_one_is_computed(self, service, visit, expect):
        page = visit(service.url)
        open_map(page)
        page.get_by_role("link", name="Search", exact=True).click()
        ask(page, NOVEL)
        page.get_by_role("button", name="Add", exact=True).click()
        page.locator("#confirm-yes").click()
        expect(page.locator("#said")).to_have_text("The image is in the gallery now.")
        service.drawing = 10**6
        page.get_by_role("link", name="Map").click()
        expect(page.locator("#map-state")).to_contain_text("Drawing the map")
        expect(page.locator("#map")).to_be_hidden()
        service.drawing = 0
        page.locator("#map").wait_for()
        page.mouse.move(*spot(page, 7))
        expect(page.locator("#map-item button")).to_be_visible()

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
        visit.refused.add(404)  # pictures of the wall that the page had not loaded before they are gone
        service.items.clear()
        page.get_by_role("link", name="Search", exact=True).click()
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
        page.locator("#found .item > .tile").first.click()
        expect(page.locator("#item-facts")).to_be_visible()
        assert_readable(page)
        page.get_by_role("button", name="Delete").click()
        assert_readable(page)
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        for view in ("Map", "Browse"):
            page.get_by_role("link", name=view, exact=True).click()
            until_quiet(page, service)
            assert_readable(page)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(244, 245, 249)" if scheme == "light" else "rgb(18, 20, 27)"
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
        page.locator("#answer summary").click()
        for number in page.locator("#answer .numbers dd").all():  # on one line, not digit below digit
            assert number.bounding_box()["height"] < 30
        page.locator("#found summary").first.click()
        page.locator("#found .item > .tile").first.click()
        expect(page.locator("#item-facts")).to_be_visible()
        assert_fits(page)
        assert page.locator("#item-dialog").evaluate("d => d.scrollWidth <= d.clientWidth")
        page.keyboard.press("Escape")
        for view in ("Map", "Browse"):
            page.get_by_role("link", name=view, exact=True).click()
            until_quiet(page, service)
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
        for i in range(11):
            page.keyboard.press("Tab" if i else "Shift")  # the first stop is there already
            stops.append(page.evaluate("(document.activeElement.id || document.activeElement.textContent).trim()"))
            ring = page.evaluate("""() => {
              const node = document.activeElement.matches(".unseen")
                ? document.activeElement.nextElementSibling : document.activeElement;
              return parseFloat(getComputedStyle(node).outlineWidth);
            }""")
            assert ring >= 2, stops[-1]
        assert stops == [
            *("Skip to the content", "Search", "Browse", "Map", "API", "file", "crop", "In numbers", "max-error"),
            *("All 12", "gull 3"),
        ]
        page.locator("#found-labels button").last.focus()
        for stop in (".tile", "a.more", "summary"):
            page.keyboard.press("Tab")
            expect(page.locator(f"#found > li:first-child {stop}").first).to_be_focused()

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
        expect(page.get_by_role("link", name="Search", exact=True)).to_have_attribute("aria-current", "page")
        open_map(page)
        page.get_by_role("link", name="Browse", exact=True).click()
        expect(page.locator("#view-browse")).to_be_visible()
        page.go_back()
        expect(page.locator("#view-map")).to_be_visible()
        expect(page.locator("#view-browse")).to_be_hidden()
        expect(page.get_by_role("link", name="Map")).to_have_attribute("aria-current", "page")
