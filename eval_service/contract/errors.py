"""The contract's error tree; each has a code, an HTTP status, and names the field and the fix where it can.

EvalfleetError
├── InvalidRequest        422  a field of the request is wrong
├── NotFound              404  no such run, point, drain or group
├── Conflict              409  the same reservation with another path, or an end that can't be left so
├── Unauthorized          401  no token, or none that the service knows
├── Forbidden             403  the token's scope does not reach so far, or the request comes from another site's page
├── Busy                  429  backpressure: ask again
│   └── RateLimited            more requests than anybody honest sends
├── Unavailable           503  the ledger can't be written, or the service can't be reached
│   └── StoreUnavailable       an object store can't be reached, or does not answer in time
├── SnapshotFault         422  a snapshot directory that is not what it says
│   ├── SnapshotMissing        no directory, or no completion marker (yet)
│   ├── SnapshotAltered        an object is not what the manifest says: cut short, changed or gone
│   └── SnapshotUnsafe         a path outside the allowed roots, or a link that leads out
└── ConfigError           422  a configuration file that can't work
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ErrorBody(BaseModel):
    """The inside of the one error envelope."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    code: str
    message: str
    field: str | None = None
    hint: str | None = None


class ErrorEnvelope(BaseModel):
    """Every error of the API has this shape."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    error: ErrorBody


class EvalfleetError(Exception):
    """The base: `message` says what is wrong, `field` where, `hint` how to mend it."""

    code = "internal"
    status = 500

    def __init__(self, message: str, *, field: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.hint = hint

    def __str__(self) -> str:
        where = f"{self.field}: " if self.field else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{where}{self.message}{hint}"

    def envelope(self) -> ErrorEnvelope:
        """The wire form of this error."""
        return ErrorEnvelope(
            error=ErrorBody(code=self.code, message=self.message, field=self.field, hint=self.hint),
        )


class InvalidRequest(EvalfleetError):
    """A field of the request is wrong."""

    code = "invalid_request"
    status = 422


class NotFound(EvalfleetError):
    """There is no such run, point, drain or group."""

    code = "not_found"
    status = 404


class Conflict(EvalfleetError):
    """What is asked contradicts what is recorded."""

    code = "conflict"
    status = 409


class Busy(EvalfleetError):
    """The run is at its bound; ask again."""

    code = "busy"
    status = 429


class RateLimited(Busy):
    """More requests than anybody honest sends; ask again after a second."""

    code = "rate_limited"


class Unauthorized(EvalfleetError):
    """No token, or none that the service knows."""

    code = "unauthorized"
    status = 401


class Forbidden(EvalfleetError):
    """The token's scope does not reach so far, or the request comes from another site's page."""

    code = "forbidden"
    status = 403


class Unavailable(EvalfleetError):
    """The service, or its ledger, can't be reached now."""

    code = "unavailable"
    status = 503


class StoreUnavailable(Unavailable):
    """An object store can't be reached, or does not answer in time; it is tried again."""

    code = "store_unavailable"


class SnapshotFault(EvalfleetError):
    """A snapshot directory that is not what it says; the message names the file or tensor."""

    code = "snapshot_invalid"
    status = 422


class SnapshotMissing(SnapshotFault):
    """No such directory, or its completion marker is not there (yet)."""

    code = "ckpt_missing"


class SnapshotAltered(SnapshotFault):
    """An object in a store is not what the snapshot's manifest says: cut short, changed, or gone."""

    code = "snapshot_altered"


class SnapshotUnsafe(SnapshotFault):
    """A path outside the allowed roots, or a link that leads out of the snapshot."""

    code = "snapshot_unsafe"


class ConfigError(EvalfleetError):
    """A configuration file that can't work."""

    code = "config_invalid"
    status = 422


BY_CODE: dict[str, type[EvalfleetError]] = {
    cls.code: cls
    for cls in (
        InvalidRequest,
        NotFound,
        Conflict,
        Busy,
        RateLimited,
        Unauthorized,
        Forbidden,
        Unavailable,
        StoreUnavailable,
        SnapshotFault,
        SnapshotMissing,
        SnapshotAltered,
        SnapshotUnsafe,
        ConfigError,
    )
}
