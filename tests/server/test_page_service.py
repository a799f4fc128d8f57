"""The page in a real browser, against the real service with a tiny gallery; and the stand-in held against it."""

import io
import json
import shutil
import socket
import threading
import urllib.request

import numpy as np
import pytest
import torch
import uvicorn
from page_actions import PHONE, ask, assert_fits, assert_readable, loaded, rested, verdict
from service_client import LABELS, made_gallery, picture
from stand_in import POLICY, StandIn

from idml import Embeddings
from idml.calibration.open_set import QueryPool
from idml.calibration.stored import Calibration
from idml.data.images import decode_image
from idml.model import fingerprint
from idml.search.answers import RiskTargets
from idml.search.indexing import add_maps
from idml.server import schemas
from idml.server.app import build_app
from idml.server.limits import Limits
from idml.server.security import LOCAL, Keys
from idml.server.serve import connection_protocol

pytest_plugins = ["browser"]


def upload(number, name="query.png"):
    return {"name": name, "mimeType": "image/png", "buffer": picture(number)}


def as_image(number):
    return decode_image(io.BytesIO(picture(number)), "query")


class Served:
    """The service in a thread of its own."""

    def __init__(self, gallery, keys=None):
        limits = Limits(body=1_000_000)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        app = build_app(gallery, keys=keys or Keys(), limits=limits, hosts=LOCAL)
        config = uvicorn.Config(app, http=connection_protocol(limits), ws="none", lifespan="on", log_config=None)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listener],))
        self._thread.start()

    def close(self):
        self._server.should_exit = True
        self._thread.join()


@pytest.fixture
def serve():
    """Starts services, and ends them."""
    running = []

    def start(gallery, **options):
        running.append(Served(gallery, **options))
        return running[-1].url

    yield start
    for service in running:
        service.close()


@pytest.fixture(scope="module")
def calibrated_run(tiny_run, tmp_path_factory):
    """The tiny model with a calibration of a made world."""
    folder = tmp_path_factory.mktemp("calibrated")
    shutil.copytree(tiny_run, folder, dirs_exist_ok=True)
    noise = np.random.default_rng(0)
    labels = torch.arange(30).repeat_interleave(30)
    places = noise.normal(size=(30, 16))[labels] + noise.normal(0, 0.8, size=(900, 16))
    e = Embeddings(torch.tensor(places).float(), torch.tensor(noise.normal(size=(900, 16))).float())
    stored = torch.arange(900) % 2 == 0
    found = QueryPool(e[~stored], labels[~stored], e[stored], labels[stored]).search()
    Calibration.fit(found.evidence, found.correct, model=fingerprint(folder)).save(folder / "calibration.json")
    return folder


def test_from_the_first_question_to_the_last_change(gallery, serve, visit, expect):
    page = visit(serve(gallery))
    expect(page.locator("#gallery")).to_have_text("12 images · 4 classes · not calibrated")
    expect(page.get_by_text("This collection is not calibrated")).to_be_visible()
    ask(page, upload(3))
    (reply,) = gallery.search([as_image(3)], 24)
    expect(verdict(page)).to_contain_text(reply.answer.state.value, ignore_case=True)
    first = page.locator("#found > li").first
    expect(first).to_contain_text(LABELS[3])
    expect(first).to_contain_text("distance 0.000")
    expect(page.locator("#found > li")).to_have_count(len(reply.results))
    assert loaded(page, "#found .item > .tile > img") == len(reply.results)
    assert_readable(page)

    ask(page, upload(77))
    page.get_by_label("Label (may stay empty)").fill("<i>new</i>")
    page.get_by_role("button", name="Add", exact=True).click()
    page.locator("#confirm-yes").click()
    expect(page.locator("#gallery")).to_contain_text("13 images · 5 classes")
    first = page.locator("#found .item > .tile").first
    expect(first).to_contain_text("<i>new</i>")
    first.click()
    expect(page.locator("#item-facts")).to_contain_text("uploads/")
    assert loaded(page, "#item-picture img") == 1
    assert page.locator("#item-picture img").evaluate("i => [i.naturalWidth, i.naturalHeight]") == [40, 32]
    page.get_by_label("Label (empty: none)").fill("old")
    page.get_by_role("button", name="Change label").click()
    page.locator("#confirm-yes").click()
    expect(page.locator("#found .item > .tile").first).to_contain_text("old")
    assert sorted({item.label for item in gallery.items()}) == sorted([*LABELS, "old"])

    page.locator("#found .item > .tile").first.click()
    page.get_by_role("button", name="Delete").click()
    page.locator("#confirm-yes").click()
    expect(page.locator("#gallery")).to_contain_text("12 images · 4 classes")
    assert len(gallery) == 12


def test_a_calibrated_gallery_promises_what_it_can(tmp_path, calibrated_run, serve, visit, expect):
    with made_gallery(tmp_path / "gallery", calibrated_run, items=40) as gallery:
        gallery.store_calibration(Calibration.load(calibrated_run / "calibration.json"))
        promises = gallery.guarantees()
        assert {promise.possible for promise in promises} == {True, False}
        page = visit(serve(gallery))
        slider = page.get_by_label("Wrong matches I accept")
        ask(page, upload(3))
        for i, promise in enumerate(promises):
            slider.fill(str(i))
            rested(page)
            expect(page.locator("#wished")).to_have_text(f"at most {100 * promise.max_error:g} %")
            if promise.possible:
                words = f"Promised, with {RiskTargets().confidence:.0%} confidence, where".replace("%", " %")
                expect(page.locator("#promise")).to_contain_text(words)
                share = 100 * promise.coverage
                expect(page.locator("#promise")).to_contain_text("over 99 %" if 99 < share < 100 else f"{share:.0f} %")
            else:
                expect(page.locator("#promise")).to_contain_text(promise.reason[1:])
            (reply,) = gallery.search([as_image(3)], 24, RiskTargets(max_error=promise.max_error))
            assert reply.calibrated
            expect(verdict(page)).to_contain_text(reply.answer.state.value, ignore_case=True)
            expect(page.locator("#answer .chance").last).to_contain_text("probability that the first result is right")


def test_the_switch_compares_part_by_part(tmp_path, calibrated_run, serve, visit, expect):
    with made_gallery(tmp_path / "gallery", calibrated_run) as gallery:
        gallery.store_calibration(Calibration.load(calibrated_run / "calibration.json"))
        page = visit(serve(gallery))
        switch = page.get_by_label("compare part by part")
        ask(page, upload(50))
        expect(switch).to_be_hidden()  # there are no position maps
        assert add_maps(gallery) == 12
        page.reload()
        ask(page, upload(50))

        def assert_shown(reply):
            ids = [tile.get_attribute("data-id") for tile in page.locator("#found .item > .tile").all()]
            assert ids == [result.id for result in reply.results]
            expect(verdict(page)).to_contain_text(reply.answer.state.value, ignore_case=True)

        (plain,), (sorted_anew,) = gallery.search([as_image(50)], 24), gallery.search([as_image(50)], 24, rerank="diml")
        assert plain.results[0].probability is not None
        assert [each.id for each in plain.results] != [each.id for each in sorted_anew.results]
        assert_shown(plain)
        expect(page.locator("#judge")).to_be_visible()
        for _ in range(2):
            switch.check()
            rested(page)
            assert_shown(sorted_anew)
            expect(page.locator("#judge")).to_be_hidden()
            switch.uncheck()
            rested(page)
            assert_shown(plain)
        switch.check()
        rested(page)
        page.locator("#found a.more").first.click()
        page.get_by_text("itself left out of the search").wait_for()
        rested(page)
        assert_shown(gallery.search_items([page.url.rpartition("/")[2]], 24, rerank="diml")[0])
        assert_readable(page)


def test_the_map_browsing_and_more_like_this(gallery, serve, visit, expect):
    page = visit(serve(gallery))
    page.get_by_role("link", name="Map").click()
    page.locator("#map").wait_for(timeout=120_000)  # the t-SNE itself
    expect(page.locator("#legend li")).to_have_text([f"{label}3" for label in sorted(LABELS)])
    page.locator("#map").press("ArrowUp")
    item = gallery.get(page.locator("#map-item button").get_attribute("data-id"))
    expect(page.locator("#map-item")).to_contain_text(item.label)
    assert loaded(page, "#map-item img") == 1
    assert_fits(page)
    expect(page.locator("#map-grid > li")).to_have_count(12)
    page.get_by_role("link", name="Browse", exact=True).click()
    expect(page.locator("#items > li")).to_have_count(12)
    expect(page.locator("#labels a")).to_have_text(["All 12", *(f"{label} 3" for label in sorted(LABELS))])
    page.locator("#labels a").nth(2).click()
    expect(page.locator("#items > li")).to_have_count(3)
    page.locator("#items a.more").first.click()
    verdict(page).wait_for()
    id = page.url.rpartition("/")[2]
    (reply,) = gallery.search_items([id], 24)
    expect(verdict(page)).to_contain_text(reply.answer.state.value, ignore_case=True)
    shown = [tile.get_attribute("data-id") for tile in page.locator("#found .item > .tile").all()]
    assert shown == [result.id for result in reply.results]
    assert id not in shown
    assert loaded(page, "#query") == 1


def test_the_documentation_shows_every_request(gallery, serve, visit, expect):
    url = serve(gallery, keys=Keys("full-key", "read-key"))  # needs none
    for options in ({"color_scheme": "dark"}, PHONE):
        page = visit(url + "docs", **options)
        page.locator(".operation").first.wait_for()
        with urllib.request.urlopen(url + "openapi.json") as answer:
            api = json.load(answer)
        wanted = [f"{method.upper()}{path}" for path, each in api["paths"].items() for method in each]
        expect(page.locator(".operation h2")).to_have_text(wanted)
        search = page.locator(".operation", has=page.get_by_text("/api/search", exact=True))
        expect(search).to_contain_text("max_error")
        expect(search).to_contain_text("from 1e-9, below 1; default 0.05")
        expect(search.locator("pre")).to_have_text(f"curl -F image=@photo.jpg '{url}api/search'")
        search.locator("summary").click()
        expect(search).to_contain_text("list of FoundItem")
        judge = page.locator(".operation", has=page.get_by_text("/api/feedback", exact=True), has_text="POST")
        example = f"curl -F image=@photo.jpg -F verdict=right '{url}api/feedback'"  # every field that is needed
        expect(judge.locator("pre")).to_have_text(example)
        assert_readable(page)
        assert_fits(page)
    page.get_by_role("link", name="Search", exact=True).click()
    expect(page).to_have_url(url)
    visit.refused.add(401)


def test_a_read_key_searches_and_changes_nothing(gallery, serve, visit, expect):
    visit.refused.add(401)
    page = visit(serve(gallery, keys=Keys("full-key", "read-key")))
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_contain_text("a key is needed")
    dialog.get_by_label("Key", exact=True).fill("read-key")
    page.keyboard.press("Enter")
    expect(page.locator("#gallery")).to_contain_text("read-only")
    ask(page, upload(3))
    assert loaded(page, "#found .item > .tile > img") == page.locator("#found img[src^='blob:']").count()
    page.locator("#found .item > .tile").first.click()
    assert loaded(page, "#item-picture img") == 1
    expect(page.locator("#item-edit")).to_be_hidden()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="API key").click()
    dialog.get_by_label("Key", exact=True).fill("full-key")
    page.keyboard.press("Enter")
    expect(page.locator("#gallery")).to_have_text("12 images · 4 classes · not calibrated")
    ask(page, upload(3))
    expect(page.locator("#add")).to_be_visible()


def test_what_the_service_refuses_is_one_line_on_the_page(gallery, serve, visit, expect):
    visit.refused |= {413, 415, 422}
    page = visit(serve(gallery))
    line = page.locator("#error")
    page.set_input_files("#file", {"name": "a.png", "mimeType": "image/png", "buffer": b"no image at all"})
    expect(line).to_contain_text("this is not an image of a known format")
    page.set_input_files("#file", {"name": "b.png", "mimeType": "image/png", "buffer": picture(1)[:-300]})
    expect(line).to_contain_text("upload")
    page.evaluate("""() => {  // more than a connection buffers: it is refused while it is being sent
      const dataTransfer = new DataTransfer();
      dataTransfer.items.add(new File([new Uint8Array(8e6)], "large.png", { type: "image/png" }));
      document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true }));
    }""")
    expect(line).to_have_text("the request is larger than 1 MB")
    expect(page.locator("#answer")).to_have_text("")
    ask(page, upload(1))
    expect(line).to_have_text("")


def test_the_page_comes_whole_and_under_the_policy_that_the_tests_use(gallery, serve):
    url = serve(gallery)
    with urllib.request.urlopen(url) as answer:
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
    with urllib.request.urlopen(url + "static/app.js") as answer:
        assert answer.headers["content-type"].startswith("text/javascript")


def test_the_stand_in_speaks_as_the_service_does():
    stand_in = StandIn()
    try:
        for shape, said in (
            (schemas.GalleryInfo, stand_in.gallery()),
            (schemas.SearchAnswer, stand_in.reply("match.png", 0.05)),
            (schemas.SearchAnswer, stand_in.reply("match.png", 0.05, rerank="diml")),
            (schemas.ItemInfo, stand_in.items[0]),
            (schemas.GalleryMap, {"points": stand_in.points()}),
            (schemas.ItemPage, stand_in.page("mixed", "gull", 0, 2)),
            (schemas.LabelPage, stand_in.labels("", 3)),
        ):
            assert json.loads(shape.model_validate(said).model_dump_json()).keys() == said.keys()
        assert schemas.FoundItem.model_fields.keys() == stand_in.reply("", 0.05)["results"][0].keys()
        assert schemas.LabelCount.model_fields.keys() == stand_in.labels("", 1)["labels"][0].keys()
        assert schemas.Guarantee.model_fields.keys() == stand_in.gallery()["promises"][0].keys()
    finally:
        stand_in.close()
