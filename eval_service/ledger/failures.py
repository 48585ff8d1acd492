"""What a driver raises, as what callers know: a ledger that can't be used now is `Unavailable`, whatever the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from eval_service.contract.errors import Unavailable


@contextmanager
def mapped() -> Iterator[None]:
    """Within it nothing of the driver's gets out.

    Raises:
        Unavailable: instead of what the driver, or the pool of connections, raised.
    """
    try:
        yield
    except DBAPIError as exc:
        raise Unavailable(f"the ledger can't be used now: {exc.orig}", field="ledger") from exc
    except PoolTimeout as exc:
        raise Unavailable(f"the ledger can't be used now: {exc}", field="ledger") from exc
