"""How quickly the dashboard shows itself: `python -m benchmarks.dashboard [--quick] [--json]`.

The real gateway, as a process, over a ledger of 100 runs x 1,000 points, and a point with 100,000 samples; headless
Chromium on the same machine. A page counts from the navigation on, in a browser that has nothing cached; a filter from
the click (or the last key) until its rows are in the page.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Page
from sqlalchemy import select, update

from benchmarks.harness import Report, arguments, at_most, median, telling_process, versions_of
from benchmarks.stocked import Stock
from eval_service.contract.results import SampleView
from eval_service.gateway.app import build_app
from eval_service.gateway.services import Services
from eval_service.ledger.bounds import Bounds
from eval_service.ledger.database import Database
from eval_service.ledger.schema import points
from eval_service.serve.http_server import HttpServer
from eval_service.suites.samples import write_samples
from tests.support.browser import chromium

_STOCK = Stock(runs=100, steps=1000, manifest_bytes=10)
_SAMPLES = 100_000
_WAIT_MS = 60_000
_WATCH = """
addEventListener('DOMContentLoaded', () => new MutationObserver((_, self) => {
  if (document.querySelector(WHAT)) { window.shownAt ??= performance.now(); self.disconnect(); }
}).observe(document, {childList: true, subtree: true}));
"""
_PAINTED = """new Promise((done) => {
  const look = () => {
    const [paint] = performance.getEntriesByName('first-contentful-paint');
    if (paint) done(paint.startTime);
    else setTimeout(look, 10);
  };
  look();
})"""
_FILTER = """([id, value]) => new Promise((done) => {
  const began = performance.now();
  const range = document.querySelector('.range').textContent;
  new MutationObserver((_, self) => {
    const now = document.querySelector('.range')?.textContent;
    if (now && now !== range) { self.disconnect(); requestAnimationFrame(() => done(performance.now() - began)); }
  }).observe(document, {childList: true, subtree: true});
  const control = document.getElementById(id);
  if (value === null) control.click();
  else { control.value = value; control.dispatchEvent(new Event('input')); }
})"""


def main() -> int:
    """Measure, print, and say whether the targets were reached."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        _serve(args.serve)
        return 0
    rounds = 3 if args.quick else 10
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory)
        point = _fill(base)
        with telling_process("benchmarks.dashboard", "--serve", str(base)) as (_, url), chromium() as browser:
            return _measure(browser, url, point, rounds).show(as_json=args.json)


def _measure(browser: Browser, url: str, point: str, rounds: int) -> Report:
    places = {"runs": "runs", "run": f"run/{_STOCK.names[-1]}", "samples": f"point/{point}"}
    report = Report("the dashboard", versions_of("playwright") | {"chromium": browser.version})
    report.counts = {"runs": _STOCK.runs, "points": _STOCK.runs * _STOCK.steps, "samples": _SAMPLES, "rounds": rounds}
    for name, place in places.items():
        shown = [_opened(browser, f"{url}/#/{place}") for _ in range(rounds + 1)][1:]
        report.figures[f"{name}: first paint, s"] = median([first for first, _ in shown])
        report.figures[f"{name}: rows shown, s"] = median([rows for _, rows in shown])
    report.targets["first paint of the runs, s"] = at_most(report.figures["runs: first paint, s"], 1.0)
    for name, found in _filters(browser, f"{url}/#/{places['samples']}", rounds).items():
        report.figures[f"{name}, ms"] = found
        report.targets[f"{name} of {_SAMPLES:,} samples, ms"] = at_most(found, 300.0)
    return report


def _opened(browser: Browser, address: str) -> tuple[float, float]:
    """Seconds to the first paint and to the first row of a table, with nothing cached."""
    with _page(browser) as page:
        page.add_init_script(_WATCH.replace("WHAT", "'tbody tr'"))
        page.goto(address)
        page.locator("tbody tr").first.wait_for()
        return page.evaluate(_PAINTED) / 1000, page.evaluate("window.shownAt") / 1000


def _filters(browser: Browser, address: str, rounds: int) -> dict[str, float]:
    """Milliseconds from the click, or the last key, to the rows."""
    took: dict[str, list[float]] = {"filter, wrong": [], "filter, truncated": [], "search": []}
    with _page(browser) as page:
        for number in range(rounds + 1):
            page.goto(f"{address}?page={number + 2}")
            page.reload()
            page.locator(".range").first.wait_for()
            once = {
                "filter, wrong": page.evaluate(_FILTER, ["which-wrong", None]),
                "filter, truncated": page.evaluate(_FILTER, ["which-truncated", None]),
                "search": page.evaluate(_FILTER, ["samples-search", f"{number}777"]),
            }
            for name, found in once.items():
                took[name].append(found)
    return {name: median(of_one[1:]) for name, of_one in took.items()}


def _page(browser: Browser) -> Page:
    page = browser.new_page()
    page.set_default_timeout(_WAIT_MS)
    return page


def _fill(base: Path) -> str:
    """The ledger and the samples; returns the point that has them."""
    _STOCK.write(_url(base), base / "root")
    path = base / "samples.parquet"
    write_samples(path, _samples())
    database = Database(_url(base))
    with database.writing() as connection:
        newest = select(points.c.id).where(points.c.run == _STOCK.names[0]).order_by(points.c.step.desc()).limit(1)
        point = str(connection.execute(newest).scalar_one())
        connection.execute(update(points).where(points.c.id == point).values(samples_path=str(path)))
    database.close()
    return point


def _samples() -> Iterator[SampleView]:
    text = "A farmer has some sheep and buys some more at the market, of which a few run away. How many are left? "
    for index in range(_SAMPLES):
        yield SampleView.model_construct(
            index=index,
            prompt_index=index,
            sample_index=0,
            seed=None,
            dataset="letters",
            prompt=f"{text * 3}{index}",
            answer=str(index),
            output=f"There are {index} of them, since {text * 2}",
            score=float(index % 5 > 1),
            error=None,
            unparsed=False,
            finish_reason="length" if index % 50 == 3 else "stop",
            prompt_tokens=70,
            output_tokens=index % 97,
            engine="eval-0",
            weight_version="aaaaaaaa.1",
            latency_s=index % 31 / 10,
            logprob=None,
        )


def _serve(base: Path) -> None:
    """The gateway alone, until it is killed."""
    bounds = Bounds((base / "root",), ("main",))
    services = Services(Database(_url(base)), bounds, "0", _nobody, {})
    server = HttpServer(lambda: build_app(services), "127.0.0.1", 0, grace_s=1.0)
    print(f"http://127.0.0.1:{server.port}", flush=True)
    threading.Event().wait()


def _nobody() -> None:
    """No controller is there to be woken."""


def _url(base: Path) -> str:
    return f"sqlite:///{base / 'ledger.db'}"


if __name__ == "__main__":
    sys.exit(main())
