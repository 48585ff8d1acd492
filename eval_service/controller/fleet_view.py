"""What `GET /fleet` shows of the engines that the controller knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from eval_service.contract.wire import EngineState, EngineView, FleetView, GroupView
from eval_service.controller.engines import Engine
from eval_service.controller.sizing import Size
from eval_service.fleet_config import GroupConfig


def fleet_view(
    groups: Mapping[str, GroupConfig],
    engines: Iterable[Engine],
    tokens_per_s: Callable[[str], float],
    in_flight: Callable[[str], int],
    sizes: Mapping[str, Size] | None,
) -> FleetView:
    """All groups with their engines; where no sizes were decided, those of the config."""
    known = sizes or {name: Size(group.desired, "config") for name, group in groups.items()}
    views: dict[str, list[EngineView]] = {name: [] for name in groups}
    for engine in sorted(engines, key=lambda engine: engine.id):
        if engine.report.group in views:
            view = _engine_view(engine, in_flight(engine.id), tokens_per_s(engine.id))
            views[engine.report.group].append(view)
    shown = (_group_view(name, group, tuple(views[name]), known[name]) for name, group in groups.items())
    return FleetView(groups=tuple(shown), seen_at=None)


def _group_view(name: str, group: GroupConfig, engines: tuple[EngineView, ...], size: Size) -> GroupView:
    return GroupView(
        name=name,
        kind=group.kind,
        grade=group.grade,
        desired=size.engines,
        actual=sum(engine.state is not EngineState.LOST for engine in engines),
        least=group.desired if group.kind == "attached" else group.bounds[0],
        most=group.desired if group.kind == "attached" else group.bounds[1],
        sized_by=size.by,
        ready=sum(engine.state in (EngineState.READY, EngineState.PINNING) for engine in engines),
        engines=engines,
    )


def _engine_view(engine: Engine, in_flight: int, tokens_per_s: float) -> EngineView:
    report = engine.report
    return EngineView(
        id=engine.id,
        group=report.group,
        state=engine.state,
        detail=engine.quarantined or report.detail,
        url=report.url,
        node=report.node,
        nonce=report.nonce,
        server_pid=report.server_pid,
        supervisor_pid=report.supervisor_pid,
        replica_pid=report.replica_pid,
        snapshot=engine.pinned.manifest.digest if engine.pinned else None,
        weight_version=engine.pinned.weight_version if engine.pinned else None,
        point=engine.point,
        in_flight=in_flight,
        tokens_per_s=tokens_per_s,
        restarts=report.restarts,
        heard_at=engine.heard_wall,
    )
