"""What is wrong with a snapshot, as data, so that all of it can be shown at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from eval_service.contract.errors import SnapshotAltered, SnapshotFault, SnapshotMissing, SnapshotUnsafe


class FaultCode(StrEnum):
    """What a fault means for the point; the codes of the contract's errors."""

    MISSING = SnapshotMissing.code  # no directory, marker or manifest (yet): ask again within the visibility timeout
    UNSAFE = SnapshotUnsafe.code  # outside the allowed roots, or a link that leads out
    ALTERED = SnapshotAltered.code  # what an object store holds is not what its manifest says
    INVALID = SnapshotFault.code  # it is there and is not what it says


_ERRORS = {
    FaultCode.MISSING: SnapshotMissing,
    FaultCode.UNSAFE: SnapshotUnsafe,
    FaultCode.ALTERED: SnapshotAltered,
    FaultCode.INVALID: SnapshotFault,
}
_MAX_CHARS = 1000


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong.

    `field` is the file, tensor or config key. `may_appear`: a shared file system may show what is lacking a moment
    later (also true of a listed file that is absent or short, though that one's code is `snapshot_invalid`).
    """

    code: FaultCode
    field: str
    message: str
    hint: str | None = None
    may_appear: bool = False

    @classmethod
    def of(cls, error: SnapshotFault) -> Fault:
        """One that was raised where a snapshot was fetched; its message begins with its code."""
        return cls(FaultCode(error.code), error.field or "snapshot", f"{error.code}: {error.message}", error.hint)

    def error(self, others: int = 0) -> SnapshotFault:
        """The contract's error for this fault; `others` is how many more there are."""
        more = f"; and {others} more, see `evalfleet doctor`" if others else ""
        return _ERRORS[self.code](self.message + more, field=self.field, hint=self.hint)


@dataclass(slots=True)
class Findings:
    """The faults found so far, in the order of the checks."""

    faults: list[Fault] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.faults)

    def missing(self, field: str, message: str, hint: str) -> None:
        """Not there (yet)."""
        self._add(FaultCode.MISSING, field, message, hint, may_appear=True)

    def unsafe(self, field: str, message: str, hint: str) -> None:
        """Leads where it may not."""
        self._add(FaultCode.UNSAFE, field, message, hint)

    def invalid(self, field: str, message: str, hint: str, *, may_appear: bool = False) -> None:
        """There, and not what it says."""
        self._add(FaultCode.INVALID, field, message, hint, may_appear=may_appear)

    def raised(self, error: SnapshotFault, field: str) -> None:
        """Take in a fault that was raised while a file was read."""
        self.invalid(error.field or field, error.message, error.hint or "export it anew")

    def _add(self, code: FaultCode, field: str, message: str, hint: str | None, *, may_appear: bool = False) -> None:
        self.faults.append(Fault(code, _printable(field), _printable(message), hint, may_appear))


def _printable(text: str) -> str:
    """Names come from files that anybody may have written, and go to terminals and into the ledger."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:_MAX_CHARS])
    return shown if len(text) <= _MAX_CHARS else f"{shown}..."


def distinct(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Without repetitions, in order."""
    return tuple(dict.fromkeys(faults))
