"""What goes over HTTP: requests are strict (unknown fields are errors), and everything is frozen.

Times are Unix seconds; durations end in `_s`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from eval_service.contract.errors import EvalfleetError
from eval_service.contract.names import check_run
from eval_service.contract.results import Alarm, Direction, Wire
from eval_service.contract.results import Metric as Metric
from eval_service.contract.results import SamplePage as SamplePage
from eval_service.contract.results import SampleView as SampleView
from eval_service.contract.states import PinProof, PointState, Reason


def _run(value: str) -> str:
    try:
        return check_run(value)
    except EvalfleetError as exc:
        raise ValueError(str(exc)) from exc


def _without_nul(value: str) -> str:
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}")  # not every ledger can hold one


Text = Annotated[str, AfterValidator(_without_nul)]
RunName = Annotated[str, AfterValidator(_run)]
Step = Annotated[int, Field(ge=0, le=10**12)]
SuiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Priority = Annotated[int, Field(ge=-1_000_000, le=1_000_000)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Uuid = Annotated[str, Field(pattern=r"^[0-9a-fA-F-]{32,36}$")]


class Kind(StrEnum):
    """Why a point was asked for."""

    BASELINE = "baseline"
    PERIODIC = "periodic"
    FINAL = "final"
    MANUAL = "manual"


class Source(StrEnum):
    """Whose a snapshot's directory is; only `staging` is ever deleted by the service."""

    STAGING = "staging"  # our own export, made to be evaluated
    REUSE = "reuse"  # our own save_hf checkpoint
    CALLER = "caller"  # somebody else's directory, such as a base model


class Overflow(StrEnum):
    """What happens to a reservation over the run's bound."""

    BACKPRESSURE = "backpressure"
    SKIP = "skip"
    LATEST = "latest"


class OnTimeout(StrEnum):
    """What a drain does with what is not done at its deadline."""

    LEAVE = "leave"
    ABORT = "abort"


class Granted(StrEnum):
    """What a dispatch came to."""

    GRANTED = "granted"  # room is reserved; export, then send the snapshot under the same reservation
    TAKEN = "taken"  # the snapshot is taken in
    KNOWN = "known"  # nothing new: the same reservation again
    SKIPPED = "skipped"  # over the bound; don't export


# --- runs -----------------------------------------------------------------------------------------------------------


class RunSpec(Wire):
    """`PUT /runs/{run}`: what a run is. Putting it again changes it."""

    root: str = Field(description="directory under which the run's own directory lies; inside the service's roots")
    suites: tuple[SuiteName, ...] = Field(min_length=1)
    overflow: Overflow = Overflow.BACKPRESSURE
    max_in_flight: int = Field(default=2, ge=1, description="snapshots not settled")
    keep: int = Field(default=2, ge=0, description="most recently settled snapshots that GC leaves")
    collect_objects: bool = Field(default=False, description="GC may delete its exports in an object store too")
    priority: Priority = Field(default=0, description="of its points that name none of their own; higher goes first")
    max_engines: int | None = Field(default=None, ge=1, description="quota of engines; None: all")
    num_steps: Step | None = Field(default=None, description="the last step, if it is known")


class RunView(Wire):
    """A run as the service sees it."""

    run: str
    spec: RunSpec
    state: Literal["active", "paused", "drained", "deleting"]
    step: int | None = Field(description="the trainer's step, from its last progress call")
    progress_at: float | None
    created_at: float
    points: dict[PointState, int]
    snapshots_kept: int
    metrics: dict[str, float] = Field(description="headline of the last done point, by suite")
    scored_step: int | None = Field(default=None, description="the last step that has a score, of any suite")


class Progress(Wire):
    """`POST /runs/{run}/progress`."""

    step: Step


# --- dispatch -------------------------------------------------------------------------------------------------------


class DispatchRequest(Wire):
    """`POST /dispatch`: without `snapshot` it reserves, with it the snapshot is handed over."""

    run: RunName
    step: Step
    suites: tuple[SuiteName, ...] | None = Field(default=None, description="None: all of the run's")
    kind: Kind = Kind.PERIODIC
    force: bool = False
    priority: Priority | None = Field(
        default=None, description="higher goes first; None: the run's, whatever it is by then"
    )
    reservation: Uuid
    snapshot: str | None = Field(default=None, description="absolute path of the directory, or URL in an object store")
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")
    source: Source = Source.STAGING
    export_s: Seconds | None = None
    stall_s: Seconds | None = None
    canary_s: Seconds | None = None
    wait_s: Seconds | None = Field(
        default=None,
        description="how much longer the caller would wait for room; at 0 the answer is final; None: ask for ever",
    )
    deferred: bool = Field(default=False, description="exported while the service was away: accepted over the bound")


class PointRef(Wire):
    """One point of a dispatch."""

    id: str
    suite: str
    state: PointState
    reason: Reason | None = None
    detail: str | None = None


class DispatchReply(Wire):
    """What a dispatch came to, point by point."""

    run: str
    step: int
    reservation: str
    outcome: Granted
    points: tuple[PointRef, ...]


# --- points ---------------------------------------------------------------------------------------------------------


class Timings(Wire):
    """Seconds a point cost the trainer (first three) and the service."""

    stall_s: float | None = None
    export_s: float | None = None
    canary_s: float | None = None
    queue_s: float | None = None
    pin_s: float | None = None
    generate_s: float | None = None
    score_s: float | None = None
    duration_s: float | None = None


class AttemptView(Wire):
    """One try at a point."""

    number: int
    started_at: float
    ended_at: float | None
    outcome: str | None = Field(description="done, or the fault that ended it")
    detail: str | None
    engines: tuple[str, ...]


class PointView(Wire):
    """A point of the curve."""

    id: str
    run: str
    step: int
    suite: str
    kind: Kind
    force: bool
    priority: int
    reservation: str
    state: PointState
    reason: Reason | None
    detail: str | None
    superseded: bool = Field(description="a newer point of the same (run, step, suite) counts instead")
    source: Source
    snapshot: str | None
    digest: str | None
    weight_version: str | None
    pin_proof: PinProof | None
    attempts: int
    score: float | None = Field(description="the suite's headline metric")
    stderr: float | None
    headline: str | None = Field(default=None, description="the name of the metric that `score` is")
    direction: Direction = Direction.MAX
    metrics: dict[str, Metric]
    alarms: tuple[Alarm, ...] = ()
    suite_digest: str | None = Field(default=None, description="of what was asked, the data's bytes included")
    lag_steps: int | None
    timings: Timings
    created_at: float
    queued_at: float | None
    started_at: float | None
    ended_at: float | None
    samples_path: str | None
    held: bool = Field(default=False, description="somebody keeps its snapshot from garbage collection")
    history: tuple[AttemptView, ...] = ()


class PointSort(StrEnum):
    """The order of `GET /points`; what has no such value comes last."""

    STEP = "step"
    STEP_DOWN = "-step"
    SCORE = "score"
    SCORE_DOWN = "-score"
    LAG = "lag_steps"
    LAG_DOWN = "-lag_steps"
    CREATED = "created_at"
    CREATED_DOWN = "-created_at"
    ENDED = "ended_at"
    ENDED_DOWN = "-ended_at"


class PointPage(Wire):
    """`GET /points`."""

    points: tuple[PointView, ...]
    total: int


class PointReport(Wire):
    """`POST /points/{id}/report`: a reserved point gets no snapshot, since its export failed or never had its turn."""

    reason: Literal[Reason.EXPORT_FAILED, Reason.BUSY] = Reason.EXPORT_FAILED
    detail: Text = Field(default="", max_length=4000)


class LeftPoint(Wire):
    """A point that a command on a whole run left as it is, and why."""

    point: str
    step: int
    suite: str
    why: str


class RunCommandReply(Wire):
    """`POST /runs/{run}/cancel` and `backfill`: which points it is about, and which were left."""

    run: str
    points: tuple[PointRef, ...]
    left: tuple[LeftPoint, ...] = ()


# --- drain ----------------------------------------------------------------------------------------------------------


class PlannedPoint(Wire):
    """A point that the trainer planned, whatever became of it."""

    step: Step
    suite: SuiteName


class DrainRequest(Wire):
    """`POST /drain`. `drain` resumes one that was begun; it is a uuid made by the caller."""

    run: RunName
    planned: tuple[PlannedPoint, ...] = ()
    timeout_s: Seconds = 600.0
    on_timeout: OnTimeout = OnTimeout.LEAVE
    drain: Uuid | None = None


class EndedPoint(Wire):
    """A line of the receipt."""

    step: int
    suite: str
    point: str | None = None
    reason: str | None = None
    detail: str | None = None


class Receipt(Wire):
    """What drain returns: what finished, what did not, and why."""

    drain: str
    run: str
    open: bool = Field(description="still waiting: ask `GET /drains/{id}` again")
    drained: bool = Field(description="every point has ended")
    timed_out: bool = False
    started_at: float
    ended_at: float | None = None
    deadline: float
    done: tuple[EndedPoint, ...] = ()
    skipped: tuple[EndedPoint, ...] = ()
    failed: tuple[EndedPoint, ...] = ()
    cancelled: tuple[EndedPoint, ...] = ()
    pending: tuple[EndedPoint, ...] = ()
    never_came: tuple[EndedPoint, ...] = ()
    deferred: tuple[EndedPoint, ...] = Field(default=(), description="in the outbox of an unreachable service")


# --- fleet ----------------------------------------------------------------------------------------------------------


class EngineState(StrEnum):
    """What an engine is doing."""

    STARTING = "starting"
    READY = "ready"
    PINNING = "pinning"
    RESTARTING = "restarting"
    QUARANTINED = "quarantined"
    LEAVING = "leaving"
    LOST = "lost"


class EngineView(Wire):
    """One engine."""

    id: str
    group: str
    state: EngineState
    detail: str | None
    url: str | None
    node: str | None
    nonce: str | None
    server_pid: int | None
    supervisor_pid: int | None
    replica_pid: int | None
    snapshot: str | None = Field(description="digest of what is pinned")
    weight_version: str | None
    point: str | None = Field(description="the point whose lane it is leased to")
    in_flight: int
    tokens_per_s: float = Field(default=0.0, description="output tokens of its answers to the service, last 10 s")
    restarts: int
    heard_at: float


SizedBy = Literal["config", "scale", "work"]


class GroupView(Wire):
    """Engines with one purpose: how many there should be, are there, and can be pinned or asked."""

    name: str
    kind: str
    grade: str
    desired: int
    actual: int = Field(default=0, description="whatever their state, lost ones apart")
    ready: int
    least: int = Field(default=0, description="bounds of `desired`, from the fleet's config")
    most: int = 0
    sized_by: SizedBy = Field(default="config", description="what `desired` comes from")
    engines: tuple[EngineView, ...]


class PoolView(Wire):
    """The controller's pool of requests to engines, over all of its lanes."""

    capacity: int = Field(description="requests that may be in flight: engines of each lane, times server_concurrency")
    in_flight: int
    waiting: int = Field(description="requests that wait for room")


class FleetView(Wire):
    """`GET /fleet`."""

    groups: tuple[GroupView, ...]
    pool: PoolView = PoolView(capacity=0, in_flight=0, waiting=0)
    seen_at: float | None = Field(description="when the controller last wrote this; None: never")


class StatusView(Wire):
    """`GET /status`."""

    version: str
    epoch: int
    controller_at: float | None = Field(description="when the acting controller last showed itself")
    controller_alive: bool
    engines: dict[str, int] = Field(description="by state")
    tokens_per_s: dict[str, float] = Field(default_factory=dict, description="by engine that answers the service")
    runs: dict[str, dict[PointState, int]]
    points: dict[PointState, int]


class Health(Wire):
    """`GET /healthz` and `GET /readyz`."""

    ok: bool
    detail: dict[str, Any] = Field(default_factory=dict)
