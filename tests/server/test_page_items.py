"""The gallery's items on the page, cropping, hostile names, refusals and keys: in a real browser, with made answers."""

import io
import re

import pytest
from page_actions import (
    MATCH,
    NOVEL,
    PHONE,
    ask,
    assert_fits,
    assert_readable,
    loaded,
    rested,
    until,
    until_that,
    verdict,
)
from PIL import Image
from stand_in import HOSTILE, STATIC

pytest_plugins = ["browser"]


class TestFirstScreen:
    def test_samples_and_a_wall_search_when_clicked(self, service, visit, expect):
        page = visit(service.url)
        samples = page.locator("#sample-list a")
        expect(samples).to_have_count(8)
        # The first of each label, in the mixed order (here: backwards).
        expect(samples).to_have_text([HOSTILE, "heron", "tern", "gull", "", HOSTILE, "", "heron"])
        assert loaded(page, "#sample-list img") == 8
        expect(page.locator("#wall a")).to_have_count(32)
        assert loaded(page, "#wall img") == 32
        assert_readable(page)
        wall = page.get_by_role("link", name="Find images like gull, 020.png")
        wall.click()
        expect(verdict(page)).to_have_text("Match: gull")
        (asked,) = service.requests("GET", f"/api/items/{20:032x}/similar")
        assert asked.query == {"k": "24", "max_error": "0.05"}
        expect(page.locator("#query-name")).to_have_text("gull (020.png), itself left out of the search")
        expect(page.locator("#add")).to_be_hidden()  # it is in the collection
        assert loaded(page, "#query") == 1
        assert_readable(page)
        page.get_by_role("link", name="Search", exact=True).click()
        samples.nth(2).press("Enter")
        expect(page.locator("#query-name")).to_contain_text("tern (036.png)")
        expect(page.get_by_role("heading", name="Is it in the collection?")).to_be_focused()

    def test_a_gallery_without_labels_or_images(self, service, visit, expect):
        for item in service.items:
            item["label"] = None
        page = visit(service.url)
        expect(page.locator("#gallery")).to_contain_text("no labels")
        expect(page.locator("#sample-list a")).to_have_count(8)
        ask(page)
        expect(verdict(page)).to_have_text("Match")
        expect(page.locator("#found-labels")).to_be_hidden()
        expect(page.locator("#found")).not_to_contain_text("no label")
        page.get_by_role("link", name="Browse", exact=True).click()
        expect(page.locator("#items > li")).to_have_count(40)
        expect(page.get_by_label("Find a label")).to_be_hidden()
        service.items.clear()
        page = visit(service.url)
        expect(page.locator("#gallery")).to_contain_text("0 images")
        for hidden in ("#samples", "#home"):
            expect(page.locator(hidden)).to_be_hidden()
        page.get_by_role("link", name="Browse", exact=True).click()
        expect(page.locator("#browse-state")).to_have_text("There is nothing here.")


class TestSimilar:
    def test_more_like_this_from_a_result_and_from_the_dialog(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        more = page.locator("#found a.more")
        expect(more).to_have_count(12)
        expect(more.nth(1)).to_have_accessible_name("More like this: tern, 001.png")
        more.nth(1).click()
        expect(page.locator("#query-name")).to_contain_text("tern (001.png)")
        assert service.requests("GET", f"/api/items/{1:032x}/similar")
        expect(page.locator("#found .item > .tile").nth(1)).to_have_attribute("data-id", f"{2:032x}")  # without itself
        page.get_by_label("Wrong matches I accept").press("ArrowRight")
        rested(page)
        asked = service.requests("GET", f"/api/items/{1:032x}/similar")
        assert [each.query["max_error"] for each in asked] == ["0.05", "0.1"]
        page.locator("#found .item > .tile").nth(2).click()
        page.get_by_role("dialog").get_by_role("link", name="More like this").click()
        expect(page.get_by_role("dialog")).to_be_hidden()
        expect(page.locator("#query-name")).to_contain_text("003.png")
        page.locator("#found .item > .tile").first.click()
        page.get_by_role("dialog").get_by_role("link", name="All with this label").click()
        expect(page.get_by_role("heading", name="Browse: gull")).to_be_focused()
        expect(page.locator("#items > li")).to_have_count(8)

    def test_an_address_of_an_item_that_is_gone(self, service, visit, expect):
        visit.refused.add(404)
        page = visit(service.url + "#similar/nobody")
        expect(page.get_by_role("alert")).to_have_text("there is no such thing")
        expect(page.locator("#answer")).to_have_text("")
        page.goto(service.url + "#similar/%E0%A4%A")  # a damaged address
        expect(page.get_by_role("alert")).not_to_have_text("")

    def test_deleting_the_item_that_is_searched(self, service, visit, expect):
        page = visit(service.url + f"#similar/{3:032x}")
        verdict(page).wait_for()
        page.evaluate(f"""() => document.dispatchEvent(
          new CustomEvent("gallery-changed", {{ detail: {{ id: "{3:032x}", deleted: true }} }}))""")
        expect(page.locator("#wall")).to_be_visible()


class TestCropping:
    """A picture of four colours, a quarter each; a part of it is sent."""

    def picture(self, side=100, kind="PNG"):
        image = Image.new("RGB", (2 * side, side))
        for i, colour in enumerate([(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)]):
            image.paste(colour, (side // 2 * i, 0, side // 2 * (i + 1), side))
        file = io.BytesIO()
        image.save(file, kind)
        return {"name": f"match.{kind.lower()}", "mimeType": f"image/{kind.lower()}", "buffer": file.getvalue()}

    def sent(self, service):
        return Image.open(io.BytesIO(service.requests("POST", "/api/search")[-1].fields["image"][1])).convert("RGB")

    def test_the_framed_pixels_are_sent(self, service, visit, expect):
        page = visit(service.url)
        ask(page, self.picture())
        page.get_by_role("button", name="Search a part of it").click()
        dialog = page.get_by_role("dialog", name="Which part?")
        expect(dialog).to_be_visible()
        assert_readable(page)
        expect(page.locator("#crop-size")).to_contain_text("70 % of the width and 70 % of the height, from 15 % left")
        stage = page.locator("#crop-image").bounding_box()
        at = lambda x, y: (stage["x"] + x * stage["width"], stage["y"] + y * stage["height"])  # noqa: E731
        page.mouse.move(*at(0.15, 0.15))  # a corner
        page.mouse.down()
        page.mouse.move(*at(0.5, 0.5))
        page.mouse.up()
        expect(page.locator("#crop-size")).to_contain_text("35 % of the width and 35 % of the height, from 50 % left")
        page.mouse.move(*at(0.7, 0.7))  # the frame
        page.mouse.down()
        page.mouse.move(*at(2, 0.6), steps=3)
        page.mouse.up()
        expect(page.locator("#crop-size")).to_contain_text("from 65 % left and 40 % top")
        page.mouse.move(*at(0.02, 0.1))  # beside it: a new frame
        page.mouse.down()
        page.mouse.move(*at(0.22, 0.9), steps=3)
        page.mouse.up()
        dialog.get_by_role("button", name="Search this part").click()
        expect(page.locator("#query-name")).to_have_text("A part of match.png")
        rested(page)
        part = self.sent(service)
        assert part.size == pytest.approx((40, 80), abs=2)
        assert part.getcolors() == [(part.width * part.height, (255, 0, 0))]
        page.get_by_role("button", name="Search a part of it").click()  # again from the whole picture
        expect(page.locator("#crop-image")).to_have_js_property("naturalWidth", 200)
        dialog.get_by_role("button", name="Cancel").click()
        assert len(service.requests("POST", "/api/search")) == 2
        page.get_by_label("Label (may stay empty)").fill("red")
        page.get_by_role("button", name="Add", exact=True).click()
        page.locator("#confirm-yes").click()
        expect(page.locator("#said")).to_have_text("The image is in the gallery now.")
        assert Image.open(io.BytesIO(service.requests("POST", "/api/items")[0].fields["image"][1])).size == part.size

    def test_the_keyboard_crops_before_anything_is_searched(self, service, visit, expect):
        page = visit(service.url)
        page.get_by_label("crop it before searching").check()
        page.set_input_files("#file", self.picture(kind="JPEG"))
        frame = page.get_by_role("application", name="Part to search")
        expect(frame).to_be_visible()
        assert service.requests("POST", "/api/search") == []
        frame.focus()
        for keys in ("ArrowRight",) * 3, ("ArrowUp",) * 9, ("Shift+ArrowLeft",) * 10, ("Shift+ArrowDown",) * 20:
            for key in keys:
                page.keyboard.press(key)
        expect(page.locator("#crop-size")).to_contain_text(
            "50 % of the width and 100 % of the height, from 21 % left and 0 % top"
        )
        page.keyboard.press("Enter")
        verdict(page).wait_for()
        assert self.sent(service).size == (100, 100)
        page.set_input_files("#file", self.picture(20))
        page.get_by_role("button", name="Search the whole picture").click()
        expect(page.locator("#query-name")).to_have_text("match.png")
        rested(page)
        assert self.sent(service).size == (40, 20)
        page.set_input_files("#file", {"name": "match.heic", "mimeType": "image/heic", "buffer": b"not known here"})
        expect(page.locator("#said")).to_contain_text("the whole picture is searched")
        rested(page)
        assert service.requests("POST", "/api/search")[-1].fields["image"] == ("match.heic", b"not known here")
        expect(page.locator("#crop")).to_be_hidden()

    def test_a_finger_crops_an_item(self, service, visit, expect):
        page = visit(service.url + f"#similar/{4:032x}", **PHONE)
        verdict(page).wait_for()
        page.get_by_role("button", name="Search a part of it").tap()
        page.locator("#crop-box").wait_for()
        assert_fits(page)
        expect(page.locator("#crop-dialog")).to_be_in_viewport(ratio=0.99)
        page.get_by_role("button", name="Search this part").tap()
        expect(page.locator("#query-name")).to_have_text("A part of 004.png")
        rested(page)
        assert self.sent(service).size == (210, 210)


class TestBrowsing:
    def test_pages_orders_and_labels(self, service, visit, expect):
        service.items += [{**item, "id": f"{i + 40:032x}"} for i, item in enumerate(service.items)]
        page = visit(service.url)
        page.get_by_role("link", name="Browse", exact=True).click()
        tiles = page.locator("#items > li")
        expect(tiles).to_have_count(48)
        expect(page.locator("#browse-state")).to_have_text("48 of 80 images")
        expect(page.get_by_role("heading", name="Browse")).to_be_focused()
        expect(page.locator("#labels a")).to_have_text(["All 80", f"{HOSTILE} 16", "gull 16", "heron 16", "tern 16"])
        page.get_by_role("button", name="Show more").click()
        expect(tiles).to_have_count(80)
        expect(page.get_by_role("button", name="Show more")).to_be_hidden()
        expect(tiles.nth(48).get_by_role("button")).to_be_focused()
        page.get_by_label("Order").select_option("uncertain")
        expect(page.locator("#browse-state")).to_have_text("48 of 80 images")
        shown = [float(re.search(r"uncertainty ([\d.]+)", words)[1]) for words in tiles.all_inner_texts()]
        assert shown == sorted((item["level"] for item in service.items), reverse=True)[:48]
        page.get_by_label("Find a label").fill("ER")
        chips = page.locator("#labels a")
        expect(chips).to_have_text([f"{HOSTILE} 16", "heron 16", "tern 16"])
        chips.nth(2).click()
        expect(page.locator("#browse-state")).to_have_text("16 of 16 images")
        expect(page.get_by_role("heading", name="Browse: tern")).to_be_focused()
        expect(page.locator("#labels [aria-current]")).to_have_text("tern 16")
        assert {words.split("\n")[0] for words in tiles.all_inner_texts()} == {"tern"}
        page.get_by_label("Find a label").fill("nobody")
        expect(page.locator("#labels-left")).to_have_text("No label contains this text.")
        page.go_back()
        expect(page.locator("#browse-state")).to_have_text("48 of 80 images")
        assert_readable(page)

    def test_a_label_left_while_it_is_read_is_read_again(self, service, visit, expect):
        page = visit(service.url)
        late = []
        page.route("**/api/items?*label=gull*", lambda route: late.append(route))
        page.goto(service.url + "#browse/gull")
        until_that(page, lambda: late)
        page.goto(service.url + "#browse/tern")
        expect(page.locator("#items .label")).to_have_text(["tern"] * 8)
        with page.expect_response("**/api/items?*label=gull*"):
            late.pop().continue_()
        page.wait_for_timeout(50)
        page.unroute("**/api/items?*label=gull*")
        page.goto(service.url + "#browse/gull")
        expect(page.locator("#items .label")).to_have_text(["gull"] * 8)
        page.goto(service.url + "#browse/tern")
        expect(page.locator("#items .label")).to_have_text(["tern"] * 8)

    def test_an_image_with_another_label_leaves_the_list_of_a_label(self, service, visit, expect):
        page = visit(service.url + "#browse/gull")
        shown = page.locator("#items .label")
        for left, label in ((7, "tern"), (6, "no gull")):
            page.locator("#items .tile").first.click()
            page.locator("#item-label").fill(label)
            page.locator("#item-label").press("Enter")
            page.locator("#confirm-yes").click()
            expect(shown).to_have_text(["gull"] * left)
            expect(page.locator("#browse-title")).to_be_focused()
        page.goto(service.url + "#search")
        ask(page)
        page.locator("#found .item > .tile", has_text="tern").first.click()
        page.locator("#item-label").fill("gull")
        page.locator("#item-label").press("Enter")
        page.locator("#confirm-yes").click()
        expect(page.locator("#said")).to_contain_text("is now “gull”")
        page.goto(service.url + "#browse/gull")
        expect(shown).to_have_text(["gull"] * 7)

    def test_many_labels_are_found_by_typing(self, service, visit, expect):
        for i, item in enumerate(service.items):
            item["label"] = f"label {i:02d}"
        page = visit(service.url + "#browse/label%2033")
        expect(page.locator("#labels a")).to_have_count(14)  # all, the chosen one, the first twelve
        expect(page.locator("#labels-left")).to_have_text("28 more labels: type to find them.")
        expect(page.locator("#items > li")).to_have_count(1)
        page.get_by_label("Find a label").fill("label 3")
        expect(page.locator("#labels a")).to_have_count(10)


class TestCollection:
    def test_an_item_opens_and_gives_the_focus_back(self, service, visit, expect):
        page = visit(service.url)
        ask(page, NOVEL)
        opener = page.locator("#found .item > .tile").nth(1)
        opener.press("Enter")
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_role("heading")).to_have_text("tern")
        expect(dialog).to_contain_text("birds/001.png")
        assert loaded(page, "#item-picture img") == 1
        assert page.locator("#item-picture img").evaluate("i => i.naturalWidth") == 300
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(opener).to_be_focused()

    def test_the_item_that_was_opened_last_is_shown(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        first, second = (item["id"] for item in service.items[:2])
        late = []
        page.route(f"**/api/items/{first}", lambda route: late.append(route))
        page.locator("#found .item > .tile").first.click()
        until_that(page, lambda: late)
        page.locator("#found .item > .tile").nth(1).click()
        expect(page.locator("#item-facts")).to_contain_text(second)
        with page.expect_response(f"**/api/items/{first}"):
            late.pop().continue_()
        page.wait_for_timeout(50)
        expect(page.locator("#item-facts")).to_contain_text(second)

    def test_an_item_without_a_kept_image_shows_its_thumbnail(self, service, visit, expect):
        service.items[0]["path"] = ""  # as in Milvus
        page = visit(service.url)
        ask(page)
        page.locator("#found .item > .tile").first.click()
        expect(page.locator("#item-facts")).to_contain_text("not kept")
        until(page, "document.querySelector('#item-picture img')?.naturalWidth === 96")

    def test_an_image_that_is_gone_shows_its_thumbnail(self, service, visit, expect):
        visit.refused.add(404)
        service.refuse[f"GET /api/items/{service.items[0]['id']}/image"] = (404, "the file is gone")
        page = visit(service.url)
        ask(page)
        page.locator("#found .item > .tile").first.click()
        until(page, "document.querySelector('#item-picture img')?.naturalWidth === 96")

    def test_adding_with_a_label(self, service, visit, expect):
        page = visit(service.url)
        expect(page.locator("#add")).to_be_hidden()
        ask(page, NOVEL)
        page.get_by_label("Label (may stay empty)").fill("  puffin ")
        page.get_by_role("button", name="Add", exact=True).click()
        question = page.get_by_role("dialog")
        expect(question).to_contain_text("Add this image as “puffin”?")
        question.get_by_role("button", name="Cancel").click()
        assert service.requests("POST", "/api/items") == []
        page.get_by_label("Label (may stay empty)").press("Enter")
        expect(question.get_by_role("button", name="Add", exact=True)).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("#said")).to_have_text("The image is in the gallery now.")
        (added,) = service.requests("POST", "/api/items")
        assert added.fields == {"image": ("novel.png", NOVEL["buffer"]), "label": (None, b"puffin")}
        expect(page.locator("#gallery")).to_contain_text("41 images")
        assert len(service.requests("POST", "/api/search")) == 2  # asked again of the gallery as it is now
        page.get_by_role("button", name="Add", exact=True).click()
        question.get_by_role("button", name="Add", exact=True).click()
        expect(page.locator("#said")).to_have_text("The gallery already had this image.")
        expect(question).to_be_hidden()
        assert "label" not in service.requests("POST", "/api/items")[-1].fields

    def test_the_closing_of_a_question_does_not_answer_the_next_one(self, service, visit, expect):
        page = visit(service.url)
        answers = page.evaluate("""async () => {
            const { confirmed } = await import(new URL("static/dialogs.js", location.href).href);
            const dialog = document.getElementById("confirm-dialog");
            const first = confirmed("one", "Yes");
            while (!dialog.open) await new Promise(requestAnimationFrame);
            dialog.close();  // its event comes later
            const second = confirmed("two", "Yes");
            const one = await first;
            await new Promise((resolve) => setTimeout(resolve));  // all listeners of the event have run
            while (!dialog.open) await new Promise(requestAnimationFrame);
            const words = document.getElementById("confirm-words").textContent;
            document.getElementById("confirm-yes").click();
            return [one, words, await second];
        }""")
        assert answers == [False, "two", True]

    def test_relabelling(self, service, visit, expect):
        page = visit(service.url + "#browse")
        tile = page.locator("#items > li button").first
        item = service.items[-1]
        before = item["label"]
        tile.click()
        dialog = page.locator("#item-dialog")
        dialog.get_by_label("Label").fill("skua")
        dialog.get_by_role("button", name="Change label").click()
        question = page.locator("#confirm-dialog")
        expect(question).to_contain_text(f"Change the label from “{before}” to “skua”?")
        question.get_by_role("button", name="Change").click()
        expect(page.locator("#said")).to_have_text(f"The label was “{before}” and is now “skua”.")
        expect(tile).to_contain_text("skua")
        expect(tile).to_be_focused()
        assert item["label"] == "skua"
        for unlabelled in service.items:
            unlabelled["label"] = unlabelled["label"] or "other"
        page.reload()
        tile.click()
        dialog.get_by_label("Label").fill("")
        dialog.get_by_role("button", name="Change label").click()
        expect(question).to_contain_text("the only image without a label")
        question.get_by_role("button", name="Change").click()
        expect(tile).to_contain_text("no label")
        assert item["label"] is None

    def test_a_change_leaves_the_view_where_it_is(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        page.get_by_role("link", name="Browse", exact=True).click()
        tiles = page.locator("#items > li")
        expect(tiles).to_have_count(40)
        tiles.first.get_by_role("button").click()
        page.get_by_role("button", name="Delete").click()
        page.locator("#confirm-yes").click()
        expect(page.locator("#said")).to_have_text("The image was deleted.")
        expect(tiles).to_have_count(39)
        rested(page)
        assert len(service.requests("POST", "/api/search")) == 2
        expect(page.locator("#view-browse")).to_be_visible()
        expect(page.locator("#browse-title")).to_be_focused()

    def test_deleting_asks_first_and_enter_does_not_do_it(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        victim = service.items[0]["id"]
        page.locator("#found .item > .tile").first.click()
        page.get_by_role("button", name="Delete").click()
        question = page.locator("#confirm-dialog")
        expect(question).to_contain_text("This cannot be undone.")
        page.keyboard.press("Enter")
        expect(question).to_be_hidden()
        assert service.item(victim) is not None
        page.get_by_role("button", name="Delete").click()
        question.get_by_role("button", name="Delete").click()
        expect(page.locator("#said")).to_have_text("The image was deleted.")
        assert service.item(victim) is None
        expect(page.locator("#gallery")).to_contain_text("39 images")
        expect(page.locator("#found > li").first).to_contain_text("tern")
        expect(page.locator("#results-title")).to_be_focused()

    def test_a_read_only_gallery_offers_no_changes(self, service, visit, expect):
        service.writable = False
        page = visit(service.url)
        expect(page.locator("#gallery")).to_contain_text("read-only")
        ask(page)
        expect(page.locator("#add")).to_be_hidden()
        page.locator("#found .item > .tile").first.click()
        expect(page.locator("#item-facts")).to_be_visible()
        expect(page.locator("#item-edit")).to_be_hidden()


class TestHostileNames:
    def test_markup_in_labels_stays_text_everywhere(self, service, visit, expect):
        for item in service.items:
            item["label"] = HOSTILE
            item["path"] = f"birds/{HOSTILE}.png"
        service.drift = HOSTILE
        service.later = {"name": HOSTILE}
        page = visit(service.url)
        ask(page)
        expect(verdict(page)).to_have_text(f"Match: {HOSTILE}")
        page.locator("#found .item > .tile").first.click()
        expect(page.locator("#item-title")).to_have_text(HOSTILE)
        page.get_by_role("button", name="Delete").click()
        expect(page.locator("#confirm-words")).to_contain_text(HOSTILE)
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        page.locator("#found a.more").first.click()
        expect(page.locator("#query-name")).to_contain_text(HOSTILE)
        page.get_by_role("link", name="Map").click()
        expect(page.locator("#map-grid li").first).to_contain_text(HOSTILE)
        expect(page.locator("#legend")).to_contain_text(HOSTILE)
        page.get_by_role("link", name="Browse", exact=True).click()
        expect(page.locator("#items > li").first).to_contain_text(HOSTILE)
        page.locator("#labels a").nth(1).click()
        expect(page.get_by_role("heading", name=f"Browse: {HOSTILE}")).to_be_visible()
        page.get_by_role("link", name="Search", exact=True).click()
        expect(page.locator("#sample-list")).to_contain_text(HOSTILE)
        assert page.locator("b, [onerror], img[src='x']").count() == 0
        assert page.title() == f"{HOSTILE} · image search"

    def test_the_page_builds_no_markup_from_text(self):
        for file in STATIC.glob("*.js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", file.read_text())
        for html in (file.read_text() for file in STATIC.glob("*.html")):
            assert not re.search(r"\son\w+=|<style|\sstyle=|<script(?![^>]*\ssrc=)", html)
            assert not re.search(r"(src|href)=\"(https?:)?//", html)


class TestRefusals:
    def test_a_refusal_is_one_line(self, service, visit, expect):
        visit.refused |= {422, 429}
        page = visit(service.url)
        service.refuse["POST /api/search"] = (422, "the image is broken")
        page.set_input_files("#file", MATCH)
        expect(page.get_by_role("alert")).to_have_text("the image is broken")
        expect(page.locator("#answer")).to_have_text("")
        service.refuse["POST /api/search"] = (429, "too many requests, slow down")
        page.set_input_files("#file", MATCH)
        expect(page.get_by_role("alert")).to_have_text("too many requests, slow down")
        assert_readable(page)
        service.refuse.clear()
        ask(page)
        expect(page.get_by_role("alert")).to_have_text("")

    def test_a_refused_change_is_told_in_the_dialog(self, service, visit, expect):
        visit.refused.add(403)
        page = visit(service.url)
        ask(page)
        service.refuse[f"DELETE /api/items/{service.items[0]['id']}"] = (403, "this key may only read and search")
        page.locator("#found .item > .tile").first.click()
        page.get_by_role("button", name="Delete").click()
        page.locator("#confirm-yes").click()
        expect(page.locator("#item-error")).to_have_text("this key may only read and search")
        expect(page.locator("#item-dialog")).to_be_visible()

    def test_a_service_that_is_gone(self, service, visit, expect):
        page = visit(service.url)
        expect(page.locator("#gallery")).to_contain_text("40 images")
        page.route("**/api/**", lambda route: route.abort("connectionrefused"))
        page.set_input_files("#file", MATCH)
        expect(page.get_by_role("alert")).to_contain_text("The service does not respond.")
        visit.wrong[:] = [line for line in visit.wrong if "ERR_CONNECTION_REFUSED" not in line]


class TestKeys:
    def test_a_key_is_asked_for_sent_and_kept_in_the_tab(self, service, visit, expect):
        visit.refused.add(401)
        service.key = "open-sesame"
        page = visit(service.url)
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_contain_text("a key is needed")
        expect(dialog.get_by_label("Key", exact=True)).to_be_focused()
        dialog.get_by_label("Key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("this key is not known")
        dialog.get_by_label("Key", exact=True).fill("open-sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#gallery")).to_contain_text("40 images")
        ask(page)
        assert loaded(page, "#found .item > .tile > img") == 12
        assert page.locator("#found img[src^='blob:']").count() == 15 - 3  # the folded ones are not fetched
        thumbnail = service.requests("GET", f"/api/items/{0:032x}/thumbnail")
        assert {asked.key for asked in thumbnail} == {"open-sesame"}
        assert page.evaluate("JSON.stringify({ ...sessionStorage })") == '{"idml-api-key":"open-sesame"}'
        assert page.evaluate("localStorage.length + document.cookie.length") == 0
        assert not [asked for asked in service.asked if "open-sesame" in str(asked.query)]
        page.reload()
        expect(page.locator("#gallery")).to_contain_text("40 images")
        expect(dialog).to_be_hidden()
        page.get_by_role("button", name="API key").click()
        page.get_by_role("button", name="Forget the key").click()
        expect(dialog).to_contain_text("a key is needed")
        assert page.evaluate("sessionStorage.length") == 0

    def test_turning_the_question_down_leaves_a_way_back(self, service, visit, expect):
        visit.refused.add(401)
        service.key = "open-sesame"
        page = visit(service.url)
        page.get_by_role("button", name="Cancel").click()
        expect(page.get_by_role("alert")).to_have_text("a key is needed")
        expect(page.locator("#gallery")).to_have_text("The gallery could not be read.")
        assert_readable(page)
        page.set_input_files("#file", MATCH)
        page.get_by_label("Key", exact=True).fill("open-sesame")
        page.get_by_role("button", name="Use this key").click()
        expect(verdict(page)).to_have_text("Match: gull")
        expect(page.locator("#gallery")).to_contain_text("40 images")
        expect(page.get_by_role("button", name="API key")).to_be_visible()

    def test_an_open_service_asks_for_none(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        expect(page.get_by_role("button", name="API key")).to_be_hidden()
        assert {asked.key for asked in service.asked} == {None}
