"""How many engines people have asked for, by group: written by gateways, read by the controller."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from pydantic import ValidationError
from sqlalchemy import delete, select

from eval_service.contract.errors import InvalidRequest, NotFound
from eval_service.contract.scaling import ScaleReply
from eval_service.contract.wire import FleetView
from eval_service.fleet_config import GroupConfig
from eval_service.ledger.database import FLEET, Database, put
from eval_service.ledger.schema import meta

_KEY = "engines:"  # of `meta`; the group's name follows


class ScaleOrders:
    """One number a group, the last one asked for; none where its config decides."""

    def __init__(self, database: Database, groups: Mapping[str, GroupConfig]) -> None:
        self._db = database
        self._groups = groups

    def order(self, group: str, engines: int | None) -> ScaleReply:
        """Ask for so many engines from now on; None: as many as the config says.

        Raises:
            NotFound: no such group.
            InvalidRequest: it can't be scaled, or not to that.
        """
        config = self._scalable(group)
        least, most = config.bounds
        if engines is not None and not least <= engines <= most:
            raise InvalidRequest(
                f"{group} may have {least} to {most} engines, not {engines}",
                field="engines",
                hint=f"groups.{group}.num_engines in the fleet's file sets these bounds",
            )
        with self._db.writing() as connection:
            if engines is None:
                connection.execute(delete(meta).where(meta.c.key == _KEY + group))
            else:
                put(connection, _KEY + group, str(engines), self._db.clock())
        return ScaleReply(group=group, engines=engines, least=least, most=most)

    def ordered(self) -> dict[str, int]:
        """What was asked for; of groups that are no more, too."""
        with self._db.reading() as connection:
            rows = connection.execute(select(meta.c.key, meta.c.value).where(meta.c.key.startswith(_KEY))).all()
        return {key.removeprefix(_KEY): int(value) for key, value in rows}

    def decided(self) -> dict[str, int]:
        """How many engines each group was last decided to have; nothing where another version wrote that."""
        shown = self._db.read_meta(FLEET)
        with suppress(ValidationError):
            return {g.name: g.desired for g in FleetView.model_validate_json(shown[0]).groups} if shown else {}
        return {}

    def _scalable(self, group: str) -> GroupConfig:
        config = self._groups.get(group)
        if config is None:
            raise NotFound(f"no group {group!r}", field="group", hint=f"there is: {', '.join(self._groups)}")
        if config.kind == "attached":
            hint = "start or end them where they run, and name their urls in the fleet's file"
            raise InvalidRequest(f"the engines of {group} are attached: they are not ours", field="group", hint=hint)
        if config.kind == "placeholder":
            raise InvalidRequest(f"{group} holds GPUs and has no engines", field="group")
        return config
