"""What engines were proven to hold, whoever was the controller then: what tells a bad engine from a bad snapshot.

A proof is a done point's. It is of an engine of ours, and of the snapshot as it is now, only where the point's label is
of both: an eval function tells what a backend of its own held, and a directory may have come to hold something else.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import ColumnElement, RowMapping, and_, func, select

from eval_service.contract.manifest import Manifest
from eval_service.contract.states import PinProof, PointState
from eval_service.ledger.database import Database
from eval_service.ledger.rows import sound
from eval_service.ledger.schema import links, points, runs, snapshots

MOST = 4  # snapshots; those that were proven last are the likeliest to load
_NOT_DONE = tuple(state.value for state in PointState if state is not PointState.DONE)
_PROOFS = tuple(proof.value for proof in PinProof if proof is not PinProof.UNPROVEN)


@dataclass(frozen=True, slots=True)
class Proven:
    """A snapshot that engines were proven to hold, and where it was loaded from."""

    path: str
    manifest: Manifest


class Proofs:
    """Reads alone."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def has(self, digest: str) -> bool:
        """Whether any engine was proven to hold this content, wherever it lay."""
        query = select(points.c.id).join(snapshots, snapshots.c.id == points.c.snapshot_id)
        with self._db.reading() as connection:
            found = connection.execute(query.where(snapshots.c.digest == digest, _proven()).limit(1))
            return found.first() is not None

    def others(self, manifest: Manifest) -> list[Proven]:
        """Snapshots of other content for the same model, the one that was proven last first.

        None that is claimed for deletion; nor one that is not ours, and that nothing has kept as it was since.
        """
        proven_at, last = func.max(points.c.ended_at), func.max(points.c.seq)
        query = (  # what is deleted was claimed before; it is asked for because there is an index of it
            select(snapshots.c.id)
            .join(points, points.c.snapshot_id == snapshots.c.id)
            .join(runs, runs.c.run == snapshots.c.run)
            .where(snapshots.c.deleted_at.is_(None), snapshots.c.deleting_at.is_(None), runs.c.deleted_at.is_(None))
            .where(snapshots.c.admitted_at.is_not(None), snapshots.c.digest != manifest.digest, _proven())
            .group_by(snapshots.c.id)
            .order_by(proven_at.desc(), last.desc())
        )
        described = select(snapshots.c.path, snapshots.c.manifest, links.c.path.label("links"), links.c.why_not)
        described = described.outerjoin(links, links.c.snapshot == snapshots.c.id)
        with self._db.reading() as connection:
            ids = connection.execute(query.limit(MOST)).scalars().all()
            rows = [connection.execute(described.where(snapshots.c.id == id_)).mappings().one_or_none() for id_ in ids]
        found = sound((row for row in rows if row is not None), _made)
        return [proven for proven in found if _shapes(proven.manifest) == _shapes(manifest)]


def _made(row: RowMapping) -> Proven:
    path = row["path"] if row["links"] is None or row["why_not"] is not None else row["links"]
    return Proven(path, Manifest.model_validate_json(row["manifest"]))


def _proven() -> ColumnElement[bool]:
    """Of points with their snapshots."""
    label = func.substr(snapshots.c.digest, 1, 8).concat(".").concat(points.c.id).concat(".%")
    # Not `== DONE`: by that SQLite looks at every point that was ever done before it looks at what is on storage.
    done = points.c.state.not_in(_NOT_DONE)
    return and_(done, points.c.pin_proof.in_(_PROOFS), points.c.weight_version.like(label))


def _shapes(manifest: Manifest) -> frozenset[tuple[str, tuple[int, ...]]]:
    return frozenset((tensor.name, tensor.shape) for tensor in manifest.tensors)
