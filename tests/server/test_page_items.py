"""The gallery's items on the page, hostile names, refusals and keys: in a real browser, with made answers."""

import re

from page_actions import MATCH, NOVEL, ask, assert_readable, loaded, rested, until, verdict
from stand_in import HOSTILE, STATIC

pytest_plugins = ["browser"]


class TestCollection:
    def test_most_ambiguous_first_and_more_on_demand(self, service, visit, expect):
        page = visit(service.url)
        page.get_by_role("link", name="Most ambiguous").click()
        tiles = page.locator("#ambiguous > li")
        expect(tiles).to_have_count(24)
        expect(page.get_by_role("heading", name="Most ambiguous images")).to_be_focused()
        page.get_by_role("button", name="Show more").click()
        expect(tiles).to_have_count(40)
        expect(page.get_by_role("button", name="Show more")).to_be_hidden()
        expect(tiles.nth(24).get_by_role("button")).to_be_focused()
        shown = [float(re.search(r"uncertainty ([\d.]+)", words)[1]) for words in tiles.all_inner_texts()]
        assert shown == sorted((item["level"] for item in service.items), reverse=True)

    def test_a_model_without_uncertainty_says_so(self, service, visit, expect):
        for item in service.items:
            item["level"] = 0.0
        page = visit(service.url + "#ambiguous")
        expect(page.locator("#ambiguous-state")).to_have_text("This model gives no uncertainty.")

    def test_an_item_opens_and_gives_the_focus_back(self, service, visit, expect):
        page = visit(service.url)
        ask(page, NOVEL)
        opener = page.locator("#found > li > .tile").nth(1)
        opener.press("Enter")
        dialog = page.get_by_role("dialog")
        expect(dialog.get_by_role("heading")).to_have_text("tern")
        expect(dialog).to_contain_text("birds/001.png")
        assert loaded(page, "#item-picture img") == 1
        assert page.locator("#item-picture img").evaluate("i => i.naturalWidth") == 300
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        expect(opener).to_be_focused()

    def test_an_item_without_a_kept_image_shows_its_thumbnail(self, service, visit, expect):
        service.items[0]["path"] = ""  # as in Milvus
        page = visit(service.url)
        ask(page)
        page.locator("#found > li > .tile").first.click()
        expect(page.locator("#item-facts")).to_contain_text("not kept")
        until(page, "document.querySelector('#item-picture img')?.naturalWidth === 96")

    def test_an_image_that_is_gone_shows_its_thumbnail(self, service, visit, expect):
        visit.refused.add(404)
        service.refuse[f"GET /api/items/{service.items[0]['id']}/image"] = (404, "the file is gone")
        page = visit(service.url)
        ask(page)
        page.locator("#found > li > .tile").first.click()
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
        page.keyboard.press("Enter")  # the confirmation has the focus
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

    def test_relabelling(self, service, visit, expect):
        page = visit(service.url + "#ambiguous")
        tile = page.locator("#ambiguous > li button").first
        item = max(service.items, key=lambda item: item["level"])
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
        page.get_by_role("link", name="Most ambiguous").click()
        tiles = page.locator("#ambiguous > li")
        expect(tiles).to_have_count(24)
        tiles.first.get_by_role("button").click()
        page.get_by_role("button", name="Delete").click()
        page.locator("#confirm-yes").click()
        expect(page.locator("#said")).to_have_text("The image was deleted.")
        expect(tiles).to_have_count(23)
        rested(page)
        assert len(service.requests("POST", "/api/search")) == 2
        expect(page.locator("#view-ambiguous")).to_be_visible()
        expect(page.locator("#ambiguous-title")).to_be_focused()
        page.get_by_role("button", name="Show more").click()
        expect(tiles).to_have_count(39)

    def test_deleting_asks_first_and_enter_does_not_do_it(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        victim = service.items[0]["id"]
        page.locator("#found > li > .tile").first.click()
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
        page.locator("#found > li > .tile").first.click()
        expect(page.locator("#item-facts")).to_be_visible()
        expect(page.locator("#item-edit")).to_be_hidden()


class TestHostileNames:
    def test_markup_in_labels_stays_text_everywhere(self, service, visit, expect):
        for item in service.items:
            item["label"] = HOSTILE
            item["path"] = f"birds/{HOSTILE}.png"
        service.drift = HOSTILE
        page = visit(service.url)
        ask(page)
        expect(verdict(page)).to_have_text(f"Match: {HOSTILE}")
        page.locator("#found > li > .tile").first.click()
        expect(page.locator("#item-title")).to_have_text(HOSTILE)
        page.get_by_role("button", name="Delete").click()
        expect(page.locator("#confirm-words")).to_contain_text(HOSTILE)
        page.keyboard.press("Escape")
        page.keyboard.press("Escape")
        page.get_by_role("link", name="Map").click()
        page.get_by_text("The map as a list").click()
        page.locator("#map-list details summary").click()
        expect(page.locator("#map-list li").first).to_contain_text(HOSTILE)
        page.get_by_role("link", name="Most ambiguous").click()
        expect(page.locator("#ambiguous > li").first).to_contain_text(HOSTILE)
        assert page.locator("b, [onerror], img[src='x']").count() == 0
        assert page.title() == "Image search · idml"

    def test_the_page_builds_no_markup_from_text(self):
        for file in STATIC.glob("*.js"):
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", file.read_text())
        html = (STATIC / "index.html").read_text()
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
        page.locator("#found > li > .tile").first.click()
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
        assert loaded(page, "#found > li > .tile > img") == 12
        assert page.locator("#found img[src^='blob:']").count() == 15 - 3  # the folded ones are not fetched
        thumbnail = service.requests("GET", f"/api/items/{0:032x}/thumbnail")
        assert [asked.key for asked in thumbnail] == ["open-sesame"]
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
