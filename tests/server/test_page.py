"""The page in a real browser, against a service with made answers."""

import re

import pytest
from seeing import MATCH, NOVEL, UNSURE, ask, assert_readable, drop, loaded, rested, until, verdict
from stand_in import HOSTILE

pytest_plugins = ["browsing"]


class TestAsking:
    def test_a_picked_image_is_answered(self, service, visit, expect):
        page = visit(service.url)
        expect(page.locator("#gallery")).to_have_text("40 images · 32 labelled · 4 classes · calibrated")
        ask(page)
        expect(verdict(page)).to_have_text("Match: gull")
        (asked,) = service.requests("POST", "/api/search")
        assert asked.query == {"k": "12", "max_error": "0.05"}
        assert asked.fields == {"image": ("match.png", MATCH["buffer"])}
        first = page.locator("#found > li").first
        expect(first).to_contain_text("gull")
        expect(first).to_contain_text("over 99 % likely")
        expect(first).to_contain_text("distance 0.100")
        assert page.locator("#found > li").count() == 12
        assert loaded(page, "#found > li > .tile > img") == 12
        assert loaded(page, "#query") == 1

    def test_a_dropped_image_is_answered_wherever_it_falls(self, service, visit, expect):
        page = visit(service.url + "#map")
        drop(page, "footer, body", UNSURE["buffer"], "unsure.png")
        expect(verdict(page)).to_have_text("Unsure")
        assert page.url.endswith("#search")
        assert service.requests("POST", "/api/search")[0].fields["image"] == ("unsure.png", UNSURE["buffer"])
        assert "over" not in page.locator("#drop").get_attribute("class").split()

    def test_a_pasted_image_is_answered(self, service, visit, expect):
        page = visit(service.url, permissions=["clipboard-read", "clipboard-write"])
        page.evaluate(
            """async (bytes) => navigator.clipboard.write(
              [new ClipboardItem({ "image/png": new Blob([new Uint8Array(bytes)], { type: "image/png" }) })])""",
            list(MATCH["buffer"]),
        )
        page.keyboard.press("Control+V")
        expect(verdict(page)).to_have_text("Match: gull")
        assert service.requests("POST", "/api/search")[0].fields["image"][1].startswith(b"\x89PNG")

    def test_several_files_and_no_image(self, service, visit, expect):
        page = visit(service.url)
        drop(page, "#drop", b"words", "words.txt", "text/plain")
        expect(page.get_by_role("alert")).to_have_text("“words.txt” is not an image.")
        assert service.requests("POST", "/api/search") == []
        page.locator("#file").evaluate("input => { input.multiple = true }")
        page.set_input_files("#file", [NOVEL, MATCH])
        expect(verdict(page)).to_have_text("Not in the collection")
        expect(page.locator("#said")).to_have_text("Only one of 2 files was asked: novel.png")

    def test_the_same_file_can_be_picked_again(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        page.set_input_files("#file", MATCH)
        rested(page)
        assert len(service.requests("POST", "/api/search")) == 2

    def test_only_the_latest_question_is_answered(self, service, visit, expect):
        page = visit(service.url)
        service.wait = 0.4
        page.set_input_files("#file", MATCH)
        expect(page.locator("#answer")).to_have_text("Looking…")
        page.set_input_files("#file", NOVEL)
        expect(verdict(page)).to_have_text("Not in the collection")
        page.wait_for_timeout(500)
        expect(verdict(page)).to_have_text("Not in the collection")
        expect(page.get_by_role("alert")).to_have_text("")

    def test_a_phone_offers_its_camera(self, service, visit, expect):
        desk = visit(service.url)
        expect(desk.get_by_text("Take a photo")).to_be_hidden()
        phone = visit(service.url, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
        expect(phone.get_by_text("Take a photo")).to_be_visible()
        phone.set_input_files("#camera", UNSURE)
        expect(verdict(phone)).to_have_text("Unsure")


class TestAnswers:
    @pytest.mark.parametrize(
        ("image", "words", "reason", "chance"),
        [
            (MATCH, "Match: gull", "Clear match.", "97 %"),
            (UNSURE, "Unsure", "Two classes tie.", "41 %"),
            (NOVEL, "Not in the collection", "Far from everything.", "3 %"),
        ],
    )
    def test_each_state_has_words_an_icon_and_a_probability(self, service, visit, expect, image, words, reason, chance):
        page = visit(service.url)
        ask(page, image)
        expect(verdict(page)).to_have_text(words)
        expect(page.locator("#answer .reason")).to_have_text(reason)
        lines = [f"{chance} probability that the first result is right"]
        if image is NOVEL:  # what decided comes first
            lines.insert(0, "2 % of images that belong here are as unusual as yours")
        expect(page.locator("#answer .chance")).to_have_text(lines)
        expect(page.locator("#answer")).to_have_attribute("role", "status")  # is read out
        icon = page.locator("#answer svg use").get_attribute("href")
        assert page.locator(f"symbol{icon} path").count() == 1
        assert verdict(page).evaluate("h => parseFloat(getComputedStyle(h).fontSize)") >= 24
        order = "(a, b) => a.compareDocumentPosition(b) === 4"
        assert page.evaluate(f"({order})(document.querySelector('#answer'), document.querySelector('#results'))")

    def test_the_icons_and_colours_differ(self, service, visit):
        page = visit(service.url)
        looks = set()
        for image in (MATCH, UNSURE, NOVEL):
            ask(page, image)
            rested(page)
            looks.add(
                page.evaluate("""() => [document.querySelector('#answer use').getAttribute('href'),
                getComputedStyle(document.querySelector('.answer')).backgroundColor].join()""")
            )
        assert len({look.split(",")[0] for look in looks}) == len(looks) == 3

    def test_an_uncalibrated_gallery_says_so_and_promises_nothing(self, service, visit, expect):
        service.calibrated = False
        page = visit(service.url)
        expect(page.get_by_text("This gallery is not calibrated")).to_be_visible()
        expect(page.locator("#wish")).to_be_hidden()
        ask(page)
        expect(page.locator("#answer .chance")).to_have_text("A guess: without a calibration there is no probability.")
        expect(page.locator("#found > li").first).not_to_contain_text("%")
        assert service.requests("POST", "/api/search")[0].query == {"k": "12"}

    def test_a_gallery_that_has_drifted_says_so_once(self, service, visit, expect):
        service.drift = "the gallery has doubled since the calibration"
        page = visit(service.url)
        expect(page.locator("#drift")).to_have_text("The gallery has doubled since the calibration.")
        ask(page)
        expect(page.locator("#answer .note")).to_have_text(["8 of 40 images have no label."])
        expect(page.get_by_text("has doubled since")).to_have_count(1)

    def test_near_duplicates_are_folded_and_open(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        folded = page.get_by_text("+3 near duplicates")
        expect(folded).to_be_visible()
        assert page.get_by_text("near duplicate").count() == 1
        inside = page.locator(".duplicates button")
        expect(inside.first).to_be_hidden()
        thumbnails = [f"/api/items/{i:032x}/thumbnail" for i in (20, 21, 22)]
        assert not [path for path in thumbnails if service.requests("GET", path)]
        folded.click()
        expect(inside).to_have_count(3)
        assert loaded(page, ".duplicates img") == 3
        assert all(service.requests("GET", path) for path in thumbnails)
        inside.nth(1).click()
        expect(page.locator("#item-facts")).to_contain_text("birds/021.png")


class TestPromises:
    def test_the_slider_changes_the_promise_and_asks_again(self, service, visit, expect):
        page = visit(service.url)
        expect(page.locator("#wished")).to_have_text("at most 5 %")
        expect(page.locator("#promise")).to_contain_text(
            "Promised, with 90 % confidence. About 62 % of queries get a match"
        )
        slider = page.get_by_label("Wrong matches I accept")
        slider.press("ArrowRight")
        expect(page.locator("#wished")).to_have_text("at most 10 %")
        expect(slider).to_have_attribute("aria-valuetext", "at most 10\u00a0%")
        expect(page.locator("#promise")).to_contain_text("About 81 %")
        assert service.requests("POST", "/api/search") == []  # nothing was asked yet
        ask(page)
        slider.press("ArrowRight")
        expect(page.locator("#promise")).to_contain_text("About 93 %")
        rested(page)
        asked = service.requests("POST", "/api/search")
        assert [each.query["max_error"] for each in asked] == ["0.1", "0.2"]
        assert asked[0].fields == asked[1].fields
        expect(slider).to_be_focused()

    def test_what_cannot_be_promised_is_said(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        page.get_by_label("Wrong matches I accept").fill("0")
        expect(page.locator("#promise")).to_have_text(
            "Cannot promise that here: 100 calibration queries, and 384 are needed at best. Nothing is called a match."
        )
        expect(verdict(page)).to_have_text("Unsure")
        assert service.requests("POST", "/api/search")[-1].query["max_error"] == "0.01"
        assert_readable(page)


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
        expect(page.locator("#ambiguous-state")).to_have_text("This model says nothing about uncertainty.")

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
        expect(question).to_contain_text("the only image without one")
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
        from stand_in import STATIC

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
        expect(page.get_by_role("alert")).to_contain_text("The service does not answer.")
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
