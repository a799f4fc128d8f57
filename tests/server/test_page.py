"""Questions, answers and promises on the page: in a real browser, against a service with made answers."""

import re

import pytest
from page_actions import MATCH, NOVEL, UNSURE, ask, assert_readable, drop, loaded, rested, until, until_that, verdict
from stand_in import HOSTILE

pytest_plugins = ["browser"]


class TestAsking:
    def test_a_picked_image_is_answered(self, service, visit, expect):
        page = visit(service.url)
        expect(page.get_by_role("heading", level=1)).to_have_text("Sea birds")
        expect(page).to_have_title("Sea birds · image search")
        expect(page.locator("#gallery")).to_have_text("40 images · 32 labelled · 4 classes · calibrated")
        ask(page)
        expect(verdict(page)).to_have_text("Match: gull")
        (asked,) = service.requests("POST", "/api/search")
        assert asked.query == {"k": "24", "max_error": "0.05"}
        assert asked.fields == {"image": ("match.png", MATCH["buffer"])}
        first = page.locator("#found > li").first
        expect(first).to_contain_text("gull")
        expect(first).to_contain_text("over 99 % likely")
        expect(first).to_contain_text("distance 0.100")
        assert page.locator("#found > li").count() == 12
        assert loaded(page, "#found .item > .tile > img") == 12
        assert loaded(page, "#query") == 1
        for start in ("#samples", "#home"):
            expect(page.locator(start)).to_be_hidden()

    def test_a_picture_that_the_browser_cannot_show_is_named(self, service, visit, expect):
        page = visit(service.url)
        ask(page, {"name": "match.heic", "mimeType": "image/heic", "buffer": b"a format of phones"})
        expect(page.locator("#query-name")).to_have_text("match.heic (no preview)")
        expect(page.locator("#query")).to_be_hidden()
        ask(page)
        expect(page.locator("#query-name")).to_have_text("match.png")
        expect(page.locator("#query")).to_be_visible()

    def test_a_dropped_image_is_answered_wherever_it_falls(self, service, visit, expect):
        page = visit(service.url + "#map")
        drop(page, "footer, body", UNSURE["buffer"], "unsure.png")
        expect(verdict(page)).to_have_text("Unsure")
        assert page.url.endswith("#query")
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

    def test_the_back_button_goes_back_through_the_queries(self, service, visit, expect):
        page = visit(service.url)
        ask(page, UNSURE)
        page.locator("#found a.more").first.click()
        expect(verdict(page)).to_have_text("Match: tern")
        page.go_back()
        expect(verdict(page)).to_have_text("Unsure")
        page.go_back()
        expect(page.locator("#wall")).to_be_visible()
        expect(verdict(page)).to_have_count(0)
        expect(page.locator("#query-picture")).to_be_hidden()
        page.reload()
        page.goto(service.url + "#query")  # no picture survives a reload
        until(page, "location.hash === '#search'")

    def test_several_files_and_no_image(self, service, visit, expect):
        page = visit(service.url)
        drop(page, "#drop", b"words", "words.txt", "text/plain")
        expect(page.get_by_role("alert")).to_have_text("“words.txt” is not an image.")
        assert service.requests("POST", "/api/search") == []
        page.locator("#file").evaluate("input => { input.multiple = true }")
        page.set_input_files("#file", [NOVEL, MATCH])
        expect(verdict(page)).to_have_text("Not in the collection")
        expect(page.locator("#said")).to_have_text("Only one of 2 files was searched: novel.png")

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
            lines = ["2 % of images that belong here are as unusual as yours", f"{lines[0]} anyway"]
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
        expect(page.get_by_text("This collection is not calibrated")).to_be_visible()
        expect(page.locator("#wish")).to_be_hidden()
        expect(page.locator("body")).not_to_contain_text("romise")
        ask(page)
        expect(page.locator("#answer .chance")).to_have_text("A guess: without a calibration there is no probability.")
        expect(page.locator("#found > li").first).not_to_contain_text("%")
        assert service.requests("POST", "/api/search")[0].query == {"k": "24"}

    def test_a_gallery_that_has_drifted_says_so_once_and_nothing_is_called_promised(self, service, visit, expect):
        service.drift = "the gallery has doubled since the calibration: nothing is promised until you calibrate again"
        page = visit(service.url)
        expect(page.locator("#promise")).to_have_text(
            "No error rate holds here now: the gallery has doubled since the calibration. "
            "To mend this, run idml calibrate again."
        )
        expect(page.locator("#open-set")).to_be_hidden()
        ask(page)
        expect(page.locator("#answer .note")).to_have_text(["8 of 40 images have no label."])
        expect(page.get_by_text("has doubled since")).to_have_count(1)
        for place in range(6):
            page.get_by_label("Wrong matches I accept").fill(str(place))
            rested(page)
            expect(page.locator("body")).not_to_contain_text("romised")

    def test_the_latest_answer_decides_what_is_called_promised(self, service, visit, expect):
        page = visit(service.url)
        promise, slider = page.locator("#promise"), page.get_by_label("Wrong matches I accept")
        expect(promise).to_contain_text("Promised, with 90 % confidence")
        why = "about 80 % of the latest 40 queries are unknown"
        service.void = f"{why}: nothing is promised (see idml calibrate --unknown)"
        words = f"No error rate holds here now: {why}. To mend this, run idml calibrate --unknown."
        ask(page)
        expect(promise).to_contain_text(words)
        expect(page.locator("#open-set")).to_be_hidden()
        expect(page.get_by_text("80 % of the latest")).to_have_count(1)
        for place in range(6):
            slider.fill(str(place))
            rested(page)
            expect(page.locator("body")).not_to_contain_text("romised")
        service.void = ""
        slider.fill("0")  # cannot be promised, so its answer says nothing about other rates
        rested(page)
        expect(promise).to_contain_text(words)
        slider.fill("2")
        rested(page)
        expect(promise).to_contain_text("Promised, with 90 % confidence")
        service.void = "no line about it"
        page.locator("#found a.more").first.click()
        expect(promise).to_contain_text("No error rate holds here now: the latest answer came without one.")

    def test_uncertainty_is_shown_only_where_it_says_something(self, service, visit, expect):
        page = visit(service.url)
        for speaks in (True, False):
            service.level_speaks = speaks
            page.reload()
            ask(page)
            expect(page.locator("#answer .numbers")).to_have_text(
                re.compile("Uncertainty" if speaks else "^((?!Uncertainty).)*$")
            )
            page.locator("#found .tile").first.click()
            expect(page.locator("#item-facts")).to_contain_text("birds/000.png")
            assert ("Uncertainty" in page.locator("#item-facts").inner_text()) == speaks
            page.keyboard.press("Escape")
            page.get_by_role("link", name="Browse", exact=True).click()
            page.locator("#items .tile").first.wait_for()
            assert ("uncertainty" in page.locator("#items").inner_text()) == speaks
            assert page.locator("#order option:enabled").count() == 2 + speaks
            page.get_by_role("link", name="Map").click()
            page.locator("#map").wait_for()
            assert page.locator("#map-colour").is_visible() == speaks
            page.get_by_role("link", name="Search", exact=True).click()

    def test_the_results_are_limited_to_a_label(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        chips = page.locator("#found-labels button")
        expect(chips).to_have_text(["All 12", "gull 3", "tern 3", "heron 2", "no label 2", f"{HOSTILE} 2"])
        expect(chips.first).to_have_attribute("aria-pressed", "true")
        shown = page.locator("#found > li:visible")
        chips.nth(2).press("Enter")
        expect(shown).to_have_count(3)
        expect(shown.nth(2)).to_contain_text("tern")
        expect(chips.nth(2)).to_have_attribute("aria-pressed", "true")
        page.get_by_label("Wrong matches I accept").press("ArrowRight")
        rested(page)
        expect(shown).to_have_count(3)  # the same picture keeps its label
        chips.nth(4).click()
        expect(shown).to_have_count(2)
        chips.first.click()
        expect(shown).to_have_count(12)
        ask(page, NOVEL)
        expect(shown).to_have_count(12)

    def test_near_duplicates_are_folded_and_open(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        folded = page.get_by_text("+3 near duplicates")
        expect(folded).to_be_visible()
        assert page.get_by_text("near duplicate").count() == 1
        inside = page.locator(".duplicates button")
        expect(inside.first).to_be_hidden()
        assert page.locator(".duplicates img:not([src])").count() == 3
        folded.click()
        expect(inside).to_have_count(3)
        assert loaded(page, ".duplicates img") == 3
        inside.nth(1).click()
        expect(page.locator("#item-facts")).to_contain_text("birds/021.png")


class TestFeedback:
    def test_answers_are_judged_and_judgements_deleted(self, service, visit, expect):
        service.later = {"feedback": 0}
        page = visit(service.url)
        ask(page)
        expect(page.locator("#judge-list")).to_be_hidden()
        page.get_by_role("button", name="Yes, right").click()
        expect(page.locator("#said")).to_contain_text("Thank you.")
        expect(page.locator("#judge")).to_be_hidden()
        ask(page, NOVEL)
        page.get_by_role("button", name="No, wrong").click()
        page.get_by_label("What does it show?").fill(" puffin ")
        assert_readable(page)
        page.keyboard.press("Enter")
        expect(page.locator("#judge")).to_be_hidden()
        first = service.items[0]["id"].encode()
        fields = [
            {name: value for name, (_, value) in each.fields.items()}
            for each in service.requests("POST", "/api/feedback")
        ]
        assert fields == [
            {"image": MATCH["buffer"], "verdict": b"right", "result": first},
            {"image": NOVEL["buffer"], "verdict": b"wrong", "result": first, "label": b"puffin"},
        ]
        ask(page, UNSURE)
        page.get_by_role("button", name="2 judgements kept").click()
        dialog = page.get_by_role("dialog")
        said = ["match.png: “gull” is right", "novel.png: “gull” is wrong, it shows “puffin”"]
        expect(dialog.locator("li")).to_contain_text(said)
        assert_readable(page)
        dialog.get_by_role("button", name="Delete: match.png").click()
        expect(dialog.locator("li")).to_have_count(1)
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="1 judgement kept")).to_be_visible()

    def test_it_is_said_whether_a_calibration_can_use_a_judgement(self, service, visit, expect):
        service.later = {"feedback": 0}
        page = visit(service.url)
        ask(page)
        page.get_by_role("button", name="Yes, right").click()
        expect(page.locator("#said")).to_contain_text("uses it when every image has a label")  # 8 of 40 have none
        for item in service.items:
            item["label"] = item["label"] or "other"
        page.reload()
        ask(page)
        page.get_by_role("button", name="Yes, right").click()
        expect(page.locator("#said")).to_have_text("Thank you. The next idml calibrate uses it.")
        ask(page, NOVEL)
        page.get_by_role("button", name="No, wrong").click()
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#said")).to_contain_text("cannot use it without the right label")
        for item in service.items:
            item["label"] = None
        page.reload()
        ask(page)
        expect(page.locator("#judge")).to_be_hidden()

    def test_a_judgement_is_sent_once_and_ends_with_its_own_answer(self, service, visit, expect):
        service.later = {"feedback": 0}
        page = visit(service.url)
        ask(page)
        yes, no = (page.get_by_role("button", name=name) for name in ("Yes, right", "No, wrong"))
        sending = []
        page.route("**/api/feedback", lambda route: sending.append(route))
        yes.click()
        until_that(page, lambda: sending)
        expect(yes).to_be_disabled()
        expect(no).to_be_disabled()
        ask(page, NOVEL)
        rested(page)
        expect(yes).to_be_enabled()
        sending.pop().continue_()
        expect(page.locator("#said")).to_contain_text("Thank you.")
        expect(page.get_by_role("button", name="1 judgement kept")).to_be_visible()
        expect(page.locator("#judge")).to_be_visible()  # the answer about the newer picture is not judged yet
        visit.refused.add(409)
        service.refuse["POST /api/feedback"] = (409, "another result is the first one now: search again")
        yes.click()
        until_that(page, lambda: sending)
        sending.pop().continue_()
        expect(page.get_by_role("alert")).to_have_text("another result is the first one now: search again")
        expect(yes).to_be_enabled()

    def test_nothing_is_offered_where_nothing_is_kept(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        expect(page.locator("#judge")).to_be_hidden()
        service.later, service.writable = {"feedback": 0}, False
        page.reload()
        ask(page)
        expect(page.locator("#judge")).to_be_hidden()


class TestReranking:
    def test_there_is_no_switch_without_maps(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        expect(page.locator("#rerank-choice")).to_be_hidden()
        assert "rerank" not in service.requests("POST", "/api/search")[0].query

    def test_the_switch_asks_again_and_takes_back_every_promise(self, service, visit, expect):
        service.mapped, service.later = True, {"feedback": 0}
        page = visit(service.url)
        switch = page.get_by_role("checkbox", name="compare part by part, without an error rate")
        switch.focus()
        page.keyboard.press("Space")
        assert service.requests("POST", "/api/search") == []  # nothing was asked yet
        ask(page)
        assert service.requests("POST", "/api/search")[-1].query == {"k": "24", "max_error": "0.05", "rerank": "diml"}
        expect(page.locator("#answer .chance")).to_have_text(
            "A guess: images that are compared part by part have no probability."
        )
        expect(page.locator("#answer .note").last).to_have_text(
            "Re-ranked by diml: the calibration is that of a search without re-ranking."
        )
        expect(page.locator("#promise")).to_have_text(
            "No error rate holds for images that are compared part by part: the calibration is that of the usual order."
        )
        expect(page.locator("#promise")).to_have_class("refused")
        expect(page.locator("#max-error")).to_have_attribute(
            "aria-valuetext", "at most 5\u00a0%, without a guarantee here"
        )
        expect(page.locator("#found")).not_to_contain_text("likely")
        for gone in ("#judge", "#open-set"):
            expect(page.locator(gone)).to_be_hidden()
        assert_readable(page)
        switch.uncheck()
        rested(page)
        assert "rerank" not in service.requests("POST", "/api/search")[-1].query
        expect(page.locator("#promise")).to_contain_text("Promised, with 90 % confidence")
        expect(page.locator("#answer .chance")).to_contain_text("97 % probability")
        for there in ("#judge", "#open-set"):
            expect(page.locator(there)).to_be_visible()

    def test_an_item_is_compared_part_by_part_too(self, service, visit, expect):
        service.mapped = True
        page = visit(service.url)
        ask(page)
        page.get_by_label("compare part by part").check()
        rested(page)
        page.locator("#found a.more").first.click()
        page.get_by_text("itself left out of the search").wait_for()
        rested(page)
        assert [each.query.get("rerank") for each in service.asked if each.path.endswith("/similar")] == ["diml"]

    def test_a_refusal_is_shown_and_the_switch_stays(self, service, visit, expect):
        service.mapped = True
        page = visit(service.url)
        ask(page)
        visit.refused.add(409)
        service.refuse["POST /api/search"] = (409, "the image a.png has no position map: run idml index --maps again")
        page.get_by_label("compare part by part").check()
        expect(page.get_by_role("alert")).to_have_text(
            "the image a.png has no position map: run idml index --maps again"
        )
        service.refuse.clear()
        page.get_by_label("compare part by part").uncheck()
        expect(verdict(page)).to_have_text("Match: gull")


class TestPromises:
    def test_the_slider_changes_the_promise_and_asks_again(self, service, visit, expect):
        page = visit(service.url)
        expect(page.locator("#wished")).to_have_text("at most 5 %")
        expect(page.locator("#promise")).to_contain_text(
            "Promised, with 90 % confidence, where no more than about 25 % of queries show what is not in the "
            "collection. About 62 % of queries get a match"
        )
        expect(page.locator("#open-set > div")).to_have_text(
            ["unknown images recognised57 %", "known images wrongly rejected5 %"]
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

    def test_few_classes_and_a_small_growth_are_said(self, service, visit, expect):
        growth = "the gallery has 6 % more images than at calibration"
        promises = [{**each, "approximate": True} for each in service.gallery()["promises"]]
        service.later = {"promises": promises, "growth": growth}
        page = visit(service.url)
        expect(page.locator("#promise")).to_contain_text(
            "Promised approximately (few pictures were counted), with 90 % confidence, where"
        )
        expect(page.locator("#promise")).to_contain_text("The gallery has 6 % more images than at calibration.")

    def test_the_page_never_raises_the_accepted_error(self, service, visit, expect):
        """5 % stays, though only 10 % can be promised; without 5 %, the next lower rate is taken."""
        before = service.gallery()["promises"]
        refused = {"possible": False, "threshold": None, "reason": "cannot promise at most 5 % wrong matches here: no"}
        service.later = {"promises": [{**each, **refused} if each["max_error"] < 0.1 else each for each in before]}
        page = visit(service.url)
        expect(page.locator("#wished")).to_have_text("at most 5 %")
        least = "On the slider, 10 % is the smallest rate that can be promised."
        expect(page.locator("#promise")).to_contain_text(least)
        ask(page)
        assert service.requests("POST", "/api/search")[-1].query["max_error"] == "0.05"
        service.later = {"promises": [each for each in before if each["max_error"] != 0.05]}
        page.reload()
        expect(page.locator("#wished")).to_have_text("at most 2 %")

    def test_a_late_answer_about_the_state_is_ignored(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        waiting = []
        page.route("**/api/gallery", lambda route: waiting.append(route))
        again = 'void import(new URL("static/gallery.js", location.href).href).then((it) => it.readGallery())'
        for n in (1, 2):
            page.evaluate(again)
            until_that(page, lambda n=n: len(waiting) == n)
        states = [service.gallery() | {"name": name} for name in ("before", "now")]
        page.get_by_label("Wrong matches I accept").fill("3")  # moved while the state was asked for: it stays there
        waiting[1].fulfill(json=states[1])
        expect(page.locator("#name")).to_have_text("now")
        expect(page.locator("#wished")).to_have_text("at most 10 %")
        with page.expect_response("**/api/gallery"):
            waiting[0].fulfill(json=states[0])
        page.wait_for_timeout(50)
        expect(page.locator("#name")).to_have_text("now")

    def test_what_cannot_be_promised_is_said(self, service, visit, expect):
        page = visit(service.url)
        ask(page)
        page.get_by_label("Wrong matches I accept").fill("0")
        expect(page.locator("#promise")).to_have_text(
            "Cannot promise at most 1 % wrong matches here: "
            "there are 100 calibration queries, at least 384 are needed. "
            "Nothing is called a match. On the slider, 5 % is the smallest rate that can be promised."
        )
        expect(verdict(page)).to_have_text("Unsure")
        assert service.requests("POST", "/api/search")[-1].query["max_error"] == "0.01"
        assert_readable(page)
