"""What can go wrong between a replica and its engine.

EngineError
├── EngineRefused   the engine answered, with an error; it goes on as before
├── EngineDown      no connection, or it was dropped before an answer
├── EngineTimeout   no answer within the deadline
├── BootFailed      the server ended, or did not answer, before it was ready
└── EngineFatal     the replica can't keep a server alive; something above must replace it
"""

from __future__ import annotations


class EngineError(Exception):
    """The base; the message says what happened."""


class EngineRefused(EngineError):
    """The engine answered with an error status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class EngineDown(EngineError):
    """No connection, or it was dropped."""


class EngineTimeout(EngineError):
    """No answer within the deadline."""


class BootFailed(EngineError):
    """The server ended, or did not answer, before it was ready."""


class EngineFatal(EngineError):
    """The replica can't keep a server alive."""
