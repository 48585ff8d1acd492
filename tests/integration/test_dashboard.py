"""The dashboard in a real browser, over the real gateway and ledger: every page, in light and dark, as it is used."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from eval_service.access.config import Scope
from eval_service.access.keyring import Access, Keyring, Token, digest_of
from tests.support.browser import chromium, find_chromium
from tests.support.dashboard import ALARMED, BEST, FAULTY, HOSTILE, Stand, Watched

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
AXE = Path(__file__).parents[1] / "support/vendor/axe.min.js"
IMAGES = Path(__file__).parents[2] / "docs/images"
PATIENCE_MS = 30_000  # two cores, and others use them
# A page that begins before the events are followed is made anew once they are, under the test's pointer perhaps.
FOLLOWS_FIRST = """(() => {
  const later = window.setTimeout;
  window.setTimeout = (what, ...rest) => (what.name === "begin" ? 0 : later(what, ...rest));
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    try:
        find_chromium()
    except FileNotFoundError as exc:
        pytest.skip(str(exc))
    expect.set_options(timeout=PATIENCE_MS)
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    with Stand(tmp_path_factory.mktemp("dashboard")).serving() as found:
        yield found


def places(stand: Stand) -> dict[str, tuple[str, str]]:
    """Every page: where it is, and what is there once it is made."""
    return {
        "runs": ("runs", "text=sft-letters-lr3e-5"),
        "run": ("run/sft-letters?with=sft-letters-lr3e-5", "canvas"),
        "points": ("points?state=running", "td >> text=running"),
        "point": (f"point/{stand.points[FAULTY]}", "text=1–50 of 240"),
        "compare": (f"compare/{stand.points[200]}/{stand.points[BEST]}", "text=improved"),
        "fleet": ("fleet", "text=quarantined"),
        "drains": ("drains", "text=sft-letters"),
        "drain": (f"drain/{stand.drain}", "text=points have ended"),
    }


PAGES = ("runs", "run", "points", "point", "compare", "fleet", "drains", "drain")


@pytest.fixture
def watched(browser: Browser, stand: Stand) -> Iterator[Watched]:
    """A page of its own; at its end it had no error on its console, and asked no other host for anything."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light")
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(FOLLOWS_FIRST)
    found = Watched(context.new_page(), stand.url)
    yield found
    context.close()
    assert (found.errors, found.strays) == ([], [])


def faults_of(page: Page) -> list[str]:
    """What axe finds."""
    # The policy of the page forbids scripts that are not the service's own; the debugger may all the same.
    page.evaluate(AXE.read_text() + "; null")
    found: dict[str, Any] = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [f"{one['id']}: {node['html'][:160]}" for one in found["violations"] for node in one["nodes"]]


def open_page(watched: Watched, stand: Stand, name: str) -> Page:
    where, until = places(stand)[name]
    page = watched.go(where, until)
    expect(page.locator("#fault")).to_be_hidden()
    return page


@pytest.mark.parametrize("name", PAGES)
def test_a_page_passes_axe_in_light_and_dark_and_has_a_json_twin(watched: Watched, stand: Stand, name: str) -> None:
    page = open_page(watched, stand, name)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        assert faults_of(page) == [], f"{name} in {scheme}"
    twin = page.locator("#twin").get_attribute("href")
    answer = page.request.get(f"{stand.url}/{twin}")
    assert answer.ok
    assert answer.json()


def test_a_phone_shows_every_page_without_scrolling_sideways(watched: Watched, stand: Stand) -> None:
    watched.page.set_viewport_size({"width": 375, "height": 740})
    for name in PAGES:
        page = open_page(watched, stand, name)
        wide = page.evaluate("document.documentElement.scrollWidth")
        assert wide <= 375, f"{name} is {wide} px wide"


def test_the_curve_tells_values_with_intervals_gaps_with_reasons_the_best_and_alarms(
    watched: Watched, stand: Stand
) -> None:
    page = open_page(watched, stand, "run")
    newest = page.get_by_role("link", name="Step 1400 is better than step 1300: +")
    expect(newest).to_contain_text("points (p=")
    expect(page.get_by_text("are not compared yet")).to_have_count(0)
    chart = page.locator("[role=group]").first
    chart.focus()
    told = {}
    readout = page.locator(".readout").first
    for step in range(0, 1500, 100):
        page.keyboard.press("ArrowRight")
        expect(readout).to_contain_text(f"Step {step:,}:")
        told[step] = readout.inner_text()
    assert "no value (skipped: export_failed)" in told[400]
    assert "no value (failed: deadline)" in told[900]
    assert "score_collapse" in told[ALARMED]
    assert "best" in told[BEST]
    assert "sft-letters-lr3e-5 main/exact_match: 0" in told[100], "the other run lies over it"
    assert "[" in told[100]
    assert "step 100 is better than step 0: +" in told[100], "each point tells what it is beside the one before it"
    page.get_by_label("Each result beside").select_option("the best")
    expect(page.get_by_text("Step 1300 is worse than step 1400: -")).to_be_visible()
    assert "against=best" in page.url
    page.get_by_label("truncated").check()
    expect(page.locator(".keys").first).to_contain_text("sft-letters main/truncated")
    assert "metric=truncated" in page.url, "what is shown is in the URL"
    page.keyboard.press("Tab")
    chart.focus()
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_contain_text("step 1,600")


def test_comparisons_that_another_reader_holds_up_are_asked_for_again(watched: Watched, stand: Stand) -> None:
    answers: list[int] = []

    def held_up(route: Route) -> None:
        answer = route.fetch()
        curve = answer.json()
        if len(answers) < 3:
            curve |= {"uncompared": 9, "points": [{**point, "beside": None} for point in curve["points"]]}
        answers.append(curve["uncompared"])
        route.fulfill(response=answer, json=curve)

    watched.page.route(lambda url: "/curve?" in url and "against=" in url, held_up)
    page = open_page(watched, stand, "run")
    expect(page.get_by_role("link", name="Step 1400 is better than step 1300: +")).to_be_visible()
    assert answers[:3] == [9, 9, 9]
    page.unroute_all(behavior="wait")


def test_what_happens_is_shown_without_a_reload(watched: Watched, stand: Stand) -> None:
    page = open_page(watched, stand, "run")
    expect(page.locator("#live")).to_have_text("live")
    row = page.locator("tr", has=page.get_by_role("link", name="1,500", exact=True))
    expect(row).to_contain_text("running")
    page.evaluate("window.same = true")
    page.locator("[role=group]").first.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".readout").first).to_contain_text("Step 0:")
    stand.finish(stand.points[1500], 0.875)
    expect(row).to_contain_text("done")
    expect(row).to_contain_text("0.875")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".readout").first).to_contain_text("Step 100:")  # whoever reads the chart keeps his place
    assert page.evaluate("window.same"), "it is still the same document"


def test_samples_are_filtered_searched_sorted_and_linked(watched: Watched, stand: Stand) -> None:
    page = open_page(watched, stand, "point")
    area = page.locator(".range")
    expect(area).to_contain_text("1–50 of 240")
    page.get_by_label("errored").check()
    expect(area).to_contain_text("of 4")
    page.get_by_label("truncated").check()
    expect(area).to_contain_text("of 10")
    page.get_by_label("Text has").fill("WORD67")
    expect(area).to_contain_text("1–1 of 1")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    expect(area).to_contain_text("1–1 of 1")
    expect(page.get_by_label("Text has")).to_have_value("WORD67")
    page.get_by_label("Text has").fill("")
    expect(area).to_contain_text("1–10 of 10")
    page.get_by_label("errored").uncheck()
    expect(area).to_contain_text("1–6 of 6")
    page.get_by_label("truncated").uncheck()
    expect(area).to_contain_text("1–50 of 240")  # a link that is made anew while it is pressed is not followed
    page.get_by_role("link", name="Tokens").click()
    expect(page.get_by_role("columnheader", name="Tokens")).to_have_attribute("aria-sort", "descending")
    expect(page.locator("tbody tr", has=page.locator("details")).first).to_contain_text("64")
    page.get_by_role("link", name="Next").click()
    expect(area).to_contain_text("51–100 of 240")


def test_a_point_shows_its_attempts_faults_and_timings(watched: Watched, stand: Stand) -> None:
    page = open_page(watched, stand, "point")
    attempts = page.get_by_role("region", name="Attempts")
    expect(attempts).to_contain_text("engine_lost")
    expect(attempts).to_contain_text("eval-1 went away")
    bars = page.locator(".bar")
    assert bars.count() == 5
    boxes = [box for bar in bars.all() if (box := bar.bounding_box()) is not None]
    assert [box["x"] for box in boxes] == sorted(box["x"] for box in boxes)
    assert max(boxes, key=lambda box: box["width"]) == boxes[3], "generating took longest"


def test_two_points_are_compared_with_flips_first(watched: Watched, stand: Stand) -> None:
    page = open_page(watched, stand, "point")
    page.get_by_role("link", name="the one before").click()
    expect(page.locator("h1")).to_contain_text("against")
    expect(page.get_by_role("region", name="Flips")).to_be_visible()
    open_page(watched, stand, "compare")
    expect(page.locator("dd strong")).to_have_text("better")
    expect(page.locator("mark").first).to_be_visible()  # what differs


def test_what_a_model_or_a_dataset_wrote_is_text(watched: Watched, stand: Stand) -> None:
    page = open_page(watched, stand, "point")
    page.get_by_label("Text has").fill("onerror")
    expect(page.locator(".range")).to_contain_text("1–1 of 1")
    entry = page.locator("details", has_text="onerror")
    entry.locator("summary").click()
    expect(entry.locator("pre").nth(1)).to_have_text(HOSTILE)
    assert page.locator("main img, main script").count() == 0
    assert "taken" not in page.title()


def test_engines_show_what_they_are_pinned_to_and_the_theme_is_kept(watched: Watched, stand: Stand) -> None:
    page = open_page(watched, stand, "fleet")
    engines = page.get_by_role("region", name="Engines")
    expect(engines.locator("tr", has_text="eval-0")).to_contain_text("aaaaaaaa.1")
    expect(engines.locator("tr", has_text="eval-0")).to_contain_text("17")
    page.get_by_role("button", name="Theme").click()
    page.get_by_role("button", name="Theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_service_that_says_no_is_shown_in_its_own_words(browser: Browser, stand: Stand) -> None:
    page = browser.new_context().new_page()
    page.goto(f"{stand.url}/#/run/nothing")
    expect(page.get_by_role("alert")).to_contain_text("no run 'nothing'")
    page.context.close()


@pytest.mark.skipif("EVALFLEET_SCREENSHOTS" not in os.environ, reason="makes the docs' pictures anew when asked to")
def test_the_pictures_of_the_docs(watched: Watched, stand: Stand) -> None:
    for name, scheme in {"run": "light", "point": "dark", "compare": "light", "fleet": "dark"}.items():
        watched.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        page = open_page(watched, stand, name)
        page.wait_for_load_state("load")
        page.screenshot(path=IMAGES / f"dashboard-{name}.png")


def test_where_the_service_wants_a_token_the_page_asks_for_it_once(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    token = "the-token-of-this-test"
    known = Keyring((Token("look", Scope.READ, (digest_of(token.encode()),)),))
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    with Stand(tmp_path_factory.mktemp("guarded"), Access(known)).serving() as guarded:
        page = context.new_page()
        page.goto(f"{guarded.url}/#/runs")
        expect(page.locator("#fault")).to_contain_text("token")
        page.fill("#token-field", token)
        page.click("#token button")
        page.locator("text=sft-letters-lr3e-5").first.wait_for()
        expect(page.locator("#live")).to_have_text("live")
        expect(page.locator("#token")).to_be_hidden()
        page.goto(f"{guarded.url}/#/point/{guarded.points[1500]}")
        expect(page.locator("#page")).to_contain_text("running")
        guarded.finish(guarded.points[1500], 0.9)
        expect(page.locator("#page")).to_contain_text("done")
        page.click("#twin")
        expect(page.locator("body")).to_contain_text('"state":"done"')
        assert page.evaluate("location.protocol") == "blob:"
    context.close()
