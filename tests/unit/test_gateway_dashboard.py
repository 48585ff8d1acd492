"""What the dashboard is served with, and the routes that it needs."""

from __future__ import annotations

import re
import uuid
from pathlib import Path

import pytest

from eval_service.contract.curves import Curve, DrainPage
from eval_service.contract.errors import Unavailable
from eval_service.contract.states import PointState
from eval_service.contract.wire import Metric
from eval_service.gateway.dashboard import FILES
from eval_service.suites.samples import SampleSort, Wanted, Which, read_samples, write_samples
from tests.support.api import Api
from tests.support.ledger import result
from tests.support.views import sample

S = PointState
SCRIPTS = sorted(path for path in FILES.rglob("*.js") if "vendor" not in path.parts)


@pytest.fixture
def api(tmp_path: Path) -> Api:
    return Api(tmp_path)


def test_the_page_may_load_nothing_from_elsewhere_and_run_no_script_that_is_written_into_it(api: Api) -> None:
    response = api.request("GET", "/")
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "<script>" not in response.text
    assert not re.search(r"\son\w+=|style=|https?://", response.text)


def test_every_file_that_a_page_names_is_there(api: Api) -> None:
    named = {
        FILES / name.removeprefix("dashboard/")
        for name in re.findall(r'"(dashboard/[^"]+)"', api.request("GET", "/").text)
    }
    for script in SCRIPTS:
        named |= {(script.parent / name).resolve() for name in re.findall(r'from "([^"]+)"', script.read_text())}
    for path in named:
        response = api.request("GET", f"/dashboard/{path.relative_to(FILES)}")
        assert response.status_code == 200, path
        again = api.request(
            "GET", f"/dashboard/{path.relative_to(FILES)}", headers={"if-none-match": response.headers["etag"]}
        )
        assert again.status_code == 304


@pytest.mark.parametrize(
    "path", ["../gateway/app.py", "%2e%2e/fleet_config.py", "/etc/passwd", "__init__.py", "", "vendor"]
)
def test_nothing_but_the_dashboards_files_can_be_asked_for(api: Api, path: str) -> None:
    assert api.request("GET", f"/dashboard/{path}").status_code == 404


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_no_script_makes_markup_or_code_of_a_string(script: Path) -> None:
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|https?://"
    )
    assert re.findall(forbidden, script.read_text()) == []


def test_a_curve_has_values_intervals_gaps_and_the_best(api: Api) -> None:
    metrics = {"exact": Metric(value=0.75, stderr=0.1, n=4, low=0.6, high=0.9), "other": Metric(value=2.0, n=1)}
    points = [api.ledger.live(S.SCORING, step) for step in (1, 2)]
    for point, score in zip(points, (0.75, 0.5), strict=True):
        assert api.ledger.moves.finish(point, result(metrics=metrics, score=score, headline="exact"))
    api.ledger.reach(S.FAILED, 3)
    curve = Curve.model_validate(api.get("/runs/r1/curve"))
    assert [(point.step, point.state, point.reason) for point in curve.points] == [
        (1, S.DONE, None),
        (2, S.DONE, None),
        (3, S.FAILED, "deadline"),
    ]
    span = curve.points[0].values["exact"]
    assert (span.value, span.low, span.high) == (0.75, 0.6, 0.9)
    assert (curve.headline, curve.best, curve.metrics, curve.suites) == (
        "exact",
        points[0],
        ("exact", "other"),
        ("main",),
    )
    assert list(curve.points[2].values) == []
    asked = Curve.model_validate(api.request("GET", "/runs/r1/curve?metric=other&metric=exact").json())
    assert sorted(asked.points[0].values) == ["exact", "other"]
    assert api.get("/runs/r1/curve", suite="nothing")["points"] == []
    assert api.error("GET", "/runs/none/curve", 404)["field"] == "run"


def test_of_equals_the_newest_is_the_best_as_garbage_collection_and_advice_have_it(api: Api) -> None:
    points = [api.ledger.done(step, score=score) for step, score in ((1, 0.5), (2, 0.9), (3, 0.9), (4, 0.1))]
    curve = Curve.model_validate(api.get("/runs/r1/curve"))
    assert curve.best == points[2] == api.get("/runs/r1/advice")["best"]["point"]


def test_each_point_of_a_curve_is_told_beside_the_one_before_it_the_best_or_a_step(api: Api, tmp_path: Path) -> None:
    for step, right in ((1, 4), (2, 30), (4, 20)):
        path = tmp_path / f"{step}.parquet"
        write_samples(path, [sample(index, float(index < right)) for index in range(40)])
        point = api.ledger.live(S.SCORING, step)
        told = result(score=right / 40, headline="exact", samples_path=str(path), suite_digest="d" * 32)
        assert api.ledger.moves.finish(point, told)
    api.ledger.reach(S.FAILED, 3)

    def beside(against: str) -> dict[int, tuple[int, str] | None]:
        while (curve := Curve.model_validate(api.get("/runs/r1/curve", against=against))).uncompared:
            pass  # each answer compares at least one more
        assert curve.against == against
        return {p.step: (p.beside.step, p.beside.verdict) if p.beside else None for p in curve.points}

    assert beside("before") == {1: None, 2: (1, "better"), 3: None, 4: (2, "worse")}, "a gap is nobody's neighbour"
    assert beside("best") == {1: (2, "worse"), 2: None, 3: None, 4: (2, "worse")}
    assert beside("4") == {1: (4, "worse"), 2: (4, "better"), 3: None, 4: None}
    assert [p["beside"] for p in api.get("/runs/r1/curve")["points"]] == [None] * 4, "not where nobody asks"
    assert api.error("GET", "/runs/r1/curve?against=3", 404)["field"] == "against"
    assert api.error("GET", "/runs/r1/curve?against=last", 422)["field"] == "against"


def test_a_storage_that_does_not_answer_costs_the_comparisons_and_never_the_curve(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(*_: object) -> object:
        raise Unavailable("the storage does not answer")

    for step in (1, 2):
        api.ledger.done(step)
    monkeypatch.setattr(api.services, "storage", hangs)
    curve = Curve.model_validate(api.get("/runs/r1/curve", against="before"))
    assert [(point.step, point.beside) for point in curve.points] == [(1, None), (2, None)]
    assert curve.uncompared == 1


def test_points_come_in_the_order_that_is_asked_for_and_what_has_no_value_last(api: Api) -> None:
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.1)):
        api.ledger.done(step, score=score)
    api.ledger.reach(S.FAILED, 4)
    for sort, steps in {
        "score": [3, 1, 2, 4],
        "-score": [2, 1, 3, 4],
        "-step": [4, 3, 2, 1],
        "step": [1, 2, 3, 4],
    }.items():
        assert [point["step"] for point in api.get("/points", run="r1", sort=sort)["points"]] == steps
    assert [point["step"] for point in api.get("/points", sort="-score", offset=1, limit=2)["points"]] == [1, 3]
    assert api.error("GET", "/points?sort=nonsense", 422)["field"] == "sort"


def test_a_run_tells_the_last_step_that_has_a_score(api: Api) -> None:
    assert api.get("/runs/r1")["scored_step"] is None
    api.ledger.done(5)
    api.ledger.reach(S.FAILED, 9)
    assert api.get("/runs/r1")["scored_step"] == 5


def test_drains_are_listed_the_newest_first(api: Api) -> None:
    api.ledger.queued(1)
    drains = [str(uuid.uuid4()) for _ in range(3)]
    for drain in drains:
        api.ledger.clock.turn(1.0)
        api.post("/drain", {"run": "r1", "timeout_s": 0, "drain": drain})
    page = DrainPage.model_validate(api.get("/drains", run="r1", limit=2))
    assert ([one.drain for one in page.drains], page.total) == (drains[:0:-1], 3)
    assert api.get("/drains", run="other") == {"drains": [], "total": 0}


def test_samples_are_sorted_by_a_number_before_they_are_paged(tmp_path: Path) -> None:
    path = tmp_path / "run" / "samples.parquet"
    tokens = [5, 1, 9, 7, 3]
    write_samples(path, [sample(index, float(n != 9), output_tokens=n) for index, n in enumerate(tokens)])
    for sort, expected in {
        SampleSort.TOKENS: [1, 4, 0, 3, 2],
        SampleSort.TOKENS_DOWN: [2, 3, 0, 4, 1],
        SampleSort.INDEX_DOWN: [4, 3, 2, 1, 0],
        SampleSort.SCORE: [2, 0, 1, 3, 4],
    }.items():
        page = read_samples(path, limit=3, offset=1, wanted=Wanted.of(sort=sort))
        assert ([one.index for one in page.samples], page.total) == (expected[1:4], 5)
    wrong = read_samples(path, wanted=Wanted.of([Which.WRONG], sort=SampleSort.TOKENS))
    assert [one.index for one in wrong.samples] == [2]
