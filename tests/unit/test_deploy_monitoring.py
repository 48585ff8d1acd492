"""Dashboard, alert rules and docs name the metrics that the service really exports, and every one of those is used."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from eval_service.contract.states import PointState
from eval_service.contract.wire import FleetView, GroupView, PoolView
from eval_service.gateway.metrics import Metrics
from eval_service.trackers.config import TrackerConfig
from tests.support.couriers import FakeReceiver, catch_up, courier
from tests.support.ledger import Ledger, result
from tests.support.views import engine

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy/prometheus/rules.yml"
NAME = re.compile(r"\bevalfleet_[a-z_]+\b")
DASHBOARD = json.loads((ROOT / "deploy/grafana/evalfleet.json").read_text())


def expressions() -> list[str]:
    """Every PromQL expression of the dashboard and the rules."""
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    rules = yaml.safe_load(RULES.read_text())["groups"]
    return panels + [rule["expr"] for group in rules for rule in group["rules"]]


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a service with a little of everything exports."""
    ledger = Ledger(tmp_path_factory.mktemp("scraped"))
    group = GroupView(
        name="eval", kind="pinned", grade="fake", desired=1, ready=1, engines=(engine("e1", in_flight=3),)
    )
    pool = PoolView(in_flight=3, waiting=2, capacity=32)
    ledger.moves.show_life(FleetView(groups=(group,), seen_at=None, pool=pool))
    ledger.intents.progress("r1", 8)
    point = ledger.queued(1, export_s=1.0, stall_s=0.5)
    ledger.clock.turn(7)
    ledger.go(point, PointState.SCORING)
    timings = {"pin_s": 2.0, "generate_s": 20.0, "score_s": 0.2}
    assert ledger.moves.finish(point, result(timings=timings))
    ledger.reach(PointState.SKIPPED, 2)
    ledger.queued(3)
    ledger.clock.turn(9)
    catch_up(courier(ledger, TrackerConfig(kind="tensorboard"), FakeReceiver()))
    metrics = Metrics(ledger.views)
    metrics.render()
    return metrics.render()[0].decode()


def exported(text: str) -> dict[str, str]:
    """Names of samples and families, with the family's help."""
    found = {}
    for family in text_string_to_metric_families(text):
        found[family.name] = family.documentation
        found |= {sample.name: family.documentation for sample in family.samples}
    return found


def test_every_metric_of_the_dashboard_and_the_rules_is_exported(scraped: str) -> None:
    names = {name for expression in expressions() for name in NAME.findall(expression)}
    assert names
    assert names - exported(scraped).keys() == set()


def test_every_family_is_on_the_dashboard(scraped: str) -> None:
    shown = " ".join(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])
    assert [f.name for f in text_string_to_metric_families(scraped) if f.name not in shown] == []


def test_the_docs_list_every_metric_with_its_help(scraped: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.+?) \|$", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE)
    made = [(f.name, f.type, f.documentation) for f in text_string_to_metric_families(scraped)]
    assert rows == made, "\n".join(f"| `{name}` | {type_} | {help_} |" for name, type_, help_ in made)


def test_values_are_those_of_the_ledger_and_a_second_scrape_counts_no_point_twice(scraped: str) -> None:
    values = {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k != "run")): sample.value
        for family in text_string_to_metric_families(scraped)
        for sample in family.samples
    }
    assert values["evalfleet_point_pin_seconds_bucket", "3.0"] == 1
    assert values["evalfleet_point_pin_seconds_bucket", "1.0"] == 0
    assert values["evalfleet_point_generate_seconds_sum",] == 20
    assert values["evalfleet_point_queue_seconds_sum",] == 7
    assert values["evalfleet_point_stall_seconds_count",] == 1
    assert values["evalfleet_lag_steps",] == 7
    assert (values["evalfleet_pool_in_flight",], values["evalfleet_pool_waiting",]) == (3, 2)
    assert values["evalfleet_queue_oldest_seconds",] == 9
    assert values["evalfleet_deliveries_total", "tracker:t"] == 2


def test_every_expression_is_balanced_and_uses_functions_that_there_are() -> None:
    known = {"sum", "max", "by", "rate", "increase", "delta", "histogram_quantile"}
    for expression in expressions():
        assert all(expression.count(a) == expression.count(b) for a, b in ("()", "[]", "{}"))
        assert set(re.findall(r"\b([a-z_]+) ?\(", expression)) - {"and"} <= known, expression


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian: prometheus) is not installed")
def test_promtool_takes_rules_their_tests_each_query_of_the_dashboard_and_what_is_exported(
    tmp_path: Path, scraped: str
) -> None:
    def promtool(*arguments: str, given: str | None = None) -> None:
        done = subprocess.run(["promtool", *arguments], input=given, capture_output=True, text=True, timeout=60)  # noqa: PLW1510
        assert done.returncode == 0, done.stdout + done.stderr

    promtool("check", "config", str(RULES.with_name("prometheus.yml")))
    promtool("check", "rules", str(RULES))
    promtool("test", "rules", str(RULES.with_name("rules_test.yml")))
    shown = [re.sub(r"\$__\w+", "5m", query) for query in expressions()]  # Grafana puts a duration in its place
    queries = [{"record": f"query:{at}", "expr": query} for at, query in enumerate(shown)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": queries}]}))
    promtool("check", "rules", str(tmp_path / "queries.yml"))
    promtool("check", "metrics", given=scraped)
