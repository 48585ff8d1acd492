"""The real service with two real engines, and the real trainer, for the tests that need them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil

from eval_service.contract.client import EvalClient
from eval_service.contract.errors import Unavailable
from eval_service.contract.names import parse_step_dir
from eval_service.contract.states import ENDS, PointState
from eval_service.contract.wire import EngineState, EngineView, PointView, SampleView
from eval_service.demo import tasks, tiny
from eval_service.demo.processes import Child, Family
from eval_service.demo.service import free_port, wait_ready
from tests.support.zygote import Zygote
from trainer.crash import VARIABLE

SUITE = "letters"
EXAMPLES = Path(__file__).parents[2] / "examples" / "suites"
ENGINES = 2
PROMPTS = 32  # of a suite, over its two tasks
_INSTRUCT = """
num_fewshot = 2
apply_chat_template = true
system_instruction = "sort"
"""
_T = TypeVar("_T")


def wait_for(look: Callable[[], _T | None], what: str, timeout_s: float = 90.0) -> _T:
    """Look every 50 ms until there is something; a test's own deadline names what it waited for."""
    until = time.monotonic() + timeout_s
    while (found := look()) is None or found is False:
        assert time.monotonic() < until, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(0.05)
    return found


class _Patient(httpx.HTTPTransport):
    def handle_request(self, request: httpx.Request) -> httpx.Response:
        def asked() -> httpx.Response | None:
            answer = super(_Patient, self).handle_request(request)
            if answer.status_code != 503 or "retry-after" not in answer.headers:
                return answer
            answer.close()
            return None

        return wait_for(asked, "the proxy to be told of its lanes")


def lane(url: str) -> httpx.Client:
    """A client of a lane that asks again, as people's clients do, where the proxy says that it was not told of its
    lanes for a while (503, `Retry-After`)."""
    return httpx.Client(base_url=url, timeout=60.0, transport=_Patient())


@dataclass
class Live:
    """One running service and the places that it works in."""

    base: Path
    family: Family
    grade: str = "sglang-cpu"
    bounds: str = f"[0, {ENGINES}]"  # of the engines
    settings: str = ""  # further ones of the service
    more: str = ""  # of the fleet's file
    command: tuple[str, ...] = ()  # module and arguments; none: `evalfleet serve` with these files
    environment: dict[str, str] = field(default_factory=dict)
    zygote: Zygote | None = None  # of its trainers
    port: int = field(default_factory=free_port)
    child: Child = field(init=False)
    client: EvalClient = field(init=False)
    http: httpx.Client = field(init=False)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def model(self) -> Path:
        """The base model, which the engines boot with."""
        return self.base / "model"

    @property
    def root(self) -> Path:
        """The root of every run."""
        return self.base / "runs"

    def build(self) -> None:
        """Model, data and configuration."""
        tiny.build_model(self.model)
        tokenizer = tiny.build_tokenizer()

        def render(question: str) -> str:
            message = [{"role": "user", "content": question}]
            return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))

        tasks.write_data(self.base / "data", render, seed=7, train_examples=400, eval_examples=48)
        self.root.mkdir()
        (self.base / "beyond.jsonl").write_text(
            json.dumps({"prompt": "whole", "answer": "x", "ids": [1, 2, 3]})
            + "\n"
            + json.dumps({"prompt": "beyond", "answer": "x", "ids": [1, 10**6]})
            + "\n"
        )
        by_work = str(self._by_work).lower()
        fleet = _FLEET.format(grade=self.grade, bounds=self.bounds, autoscale=by_work, settings=self.settings)
        (self.base / "fleet.toml").write_text(fleet + self.more)
        (self.base / "suites.toml").write_text("\n".join((_SUITES, self._examples(), self._harness())))

    def _examples(self) -> str:
        """The suites of the examples, with their data beside them; any text at all is a verdict of the tiny judge."""
        shutil.copytree(EXAMPLES / "data", self.base / "data", dirs_exist_ok=True)
        shutil.copy(EXAMPLES / "own_scorers.py", self.base)
        text = (EXAMPLES / "suites.toml").read_text()
        return text.replace(r"'\b(yes|no)\b'", "'()'").replace("{ yes = 1.0, no = 0.0 }", '{ "" = 1.0 }')

    def _harness(self) -> str:
        """lm-eval's tasks of the examples, and those of `lm_tasks`, some of whose texts are longer than the context."""
        for tasks_ in (EXAMPLES / "lm_tasks", Path(__file__).parent / "lm_tasks"):
            shutil.copytree(tasks_, self.base / "lm_tasks", dirs_exist_ok=True)
        text = (EXAMPLES / "lm_eval.toml").read_text()
        instruct = text.replace("suites.harness", "suites.instruct") + _INSTRUCT
        return (
            text.replace('"tiny_choose"]', '"tiny_choose", "long_generate", "long_choose", "long_rolling"]') + instruct
        )

    def start(self) -> None:
        """Start `evalfleet serve`, and wait until its engines are ready."""
        self.child = self.family.start(
            "the service",
            self.command or ["eval_service.cli.main", "serve", *_FILES, "--port", str(self.port)],
            log=self.base / "service.log",
            cwd=self.base,
            env=self.environment,
        )
        self.client = EvalClient(self.url)
        self.http = httpx.Client(base_url=self.url, timeout=30.0)
        wait_ready(self.child, self.client, timeout_s=240)
        if self._by_work:
            self.client.scale("eval", ENGINES)
            self.wait_engines()

    @property
    def _by_work(self) -> bool:
        """The session's own engines come by the work, unless they are asked for, as they are at the start."""
        return self.bounds.startswith("[0")

    def close(self) -> None:
        """Close the client's connections."""
        if hasattr(self, "client"):
            self.client.close()
            self.http.close()

    def wait_engines(self, timeout_s: float = 240.0) -> list[EngineView]:
        """Wait until every engine serves."""

        def ready() -> list[EngineView] | None:
            self.child.must_run()
            found = [engine for engine in self.engines() if engine.state is EngineState.READY]
            return found if len(found) == ENGINES else None

        return wait_for(ready, "the engines", timeout_s)

    def engines(self) -> list[EngineView]:
        """The eval group's engines, lost ones included."""
        with suppress(Unavailable):
            return [engine for group in self.client.fleet().groups if group.name == "eval" for engine in group.engines]
        return []

    def replica(self, deployment: str) -> psutil.Process:
        """The process of a deployment's one replica; the newest, where one has not quite ended, or the next."""

        def look() -> psutil.Process | None:
            found = []
            for process in self.family.members():
                with suppress(psutil.Error):  # it has ended meanwhile
                    if f"ServeReplica:evalfleet:{deployment}" in " ".join(process.cmdline()):
                        found.append((process.create_time(), process))
            return max(found, key=lambda each: each[0])[1] if found else None

        return wait_for(look, f"a process of {deployment}")

    def points(self, run: str, **query: Any) -> list[PointView]:
        """A run's points that count."""
        return [point for point in self.client.points(run=run, **query).points if not point.superseded]

    def ended(self, run: str, count: int, timeout_s: float = 90.0) -> list[PointView]:
        """Wait until a run has so many points, all of them ended."""

        def look() -> list[PointView] | None:
            with suppress(Unavailable):
                found = self.points(run)
                if len(found) >= count and all(point.state in ENDS for point in found):
                    return found
            return None

        return wait_for(look, f"{count} ended points of {run}", timeout_s)

    def samples(self, point: str) -> list[SampleView]:
        """All samples of a point."""
        return list(self.client.samples(point, limit=10_000).samples)

    def snapshots(self, run: str) -> list[int]:
        """Steps of the published snapshots on storage."""
        found = [parse_step_dir(path.name) for path in (self.root / run).glob("step_*")]
        return sorted(parsed.step for parsed in found if parsed is not None)


@contextmanager
def serving(base: Path, **shape: Any) -> Iterator[Live]:
    """A service of such a shape; nothing of it is left, and nothing had to be killed."""
    family = Family()
    service = Live(base, family, **shape)
    service.build()
    try:
        service.start()
        yield service
    finally:
        service.close()
        left = family.end()
    assert left == [], f"these had to be killed: {left}"


@dataclass
class Training:
    """Trainers of a run, each a process of its own, their configuration and what they left."""

    live: Live
    run: str
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    tries: int = 0

    @property
    def output(self) -> Path:
        """Step log, plan, receipt."""
        return self.live.base / "trainers" / self.run

    def train(self, crash: str = "", *, code: int | None = 0, timeout_s: float = 110.0) -> int:
        """Start the trainer and wait for its end, which is to have this code; the same run again resumes.

        Args:
            crash: where it ends, and how, as `trainer.crash` reads it.
        """
        assert self.live.zygote is not None
        self.output.mkdir(parents=True, exist_ok=True)
        path = self.output / "run.toml"
        path.write_text(self.toml())
        self.tries += 1
        stdout, stderr = (self.output / f"trainer-{self.tries}.{name}" for name in ("out", "err"))
        ended = self.live.zygote.launch(["--config", str(path)], {VARIABLE: crash}, stdout, stderr, timeout_s)
        assert code is None or ended == code, stderr.read_text(errors="replace")[-3000:]
        return ended

    def log(self) -> list[dict[str, Any]]:
        """Its step log, in order, over all its lives."""
        path = self.output / "out" / "steps.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def events(self, *names: str) -> Iterator[tuple[str, int | None]]:
        """(event, step) of the named events, in order."""
        return ((line["event"], line.get("step")) for line in self.log() if line["event"] in names)

    def toml(self) -> str:
        """Its configuration."""
        table: dict[str, dict[str, Any]] = {
            "run": {"name": self.run, "root": str(self.live.root), "output_dir": str(self.output / "out")},
            "model": {"hf_path": str(self.live.model)},
            "data": {"train": str(self.live.base / "data" / "train.jsonl"), "max_length": 64},
            "train": {"num_steps": 4, "global_batch_size": 8, "micro_batch_size": 8, "lr": 1e-3, "threads": 1},
            "eval": {"url": self.live.url, "interval": 2, "suites": [SUITE], "drain_timeout_s": 90.0},
        }
        for section, values in self.settings.items():
            table.setdefault(section, {}).update(values)
        return "\n".join(
            f"[{section}]\n"
            + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items() if value is not None)
            for section, values in table.items()
        )


_FILES = ("--fleet", "fleet.toml", "--suites", "suites.toml")
_FLEET = """
[service]
roots = ["runs", "model"]
state_dir = "state"
proxy_port = 0
scan_interval_s = 2.0
visibility_timeout_s = 2.0
reservation_timeout_s = 60.0
allow_code = true
{settings}
[groups.eval]
grade = "{grade}"
model = "model"
num_engines = {bounds}
autoscale = {autoscale}
idle_timeout_s = 3.0
num_gpus_per_engine = 0
server_concurrency = 16

[groups.judge]
kind = "frozen"
grade = "{grade}"
model = "model"
num_engines = [0, 1]
num_gpus_per_engine = 0
"""

_SUITES = """
[suites.letters]
sampling = { max_new_tokens = 8 }
datasets = [
    { name = "sort", path = "data/eval_sort.jsonl" },
    { name = "reverse", path = "data/eval_reverse.jsonl" },
]

[suites.beyond]
sampling = { max_new_tokens = 4 }
max_error_rate = 0.6
datasets = [{ name = "ids", path = "beyond.jsonl", prompt_ids = "ids" }]

[suites.slow]
sampling = { max_new_tokens = 160 }
datasets = [
    { name = "sort", path = "data/eval_sort.jsonl" },
    { name = "reverse", path = "data/eval_reverse.jsonl" },
]
"""

DONE = PointState.DONE
