"""The options that commands share."""

from __future__ import annotations

from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from eval_service.contract.client import EvalClient
from eval_service.contract.errors import ConfigError
from eval_service.contract.token import check_token, read_token_lines

DEFAULT_URL = "http://127.0.0.1:8700"
_chosen: ContextVar[str | None] = ContextVar("token", default=None)

Url = Annotated[str, typer.Option("--url", envvar="EVALFLEET_URL", help="Where the service listens.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.")]


def connect(url: str) -> EvalClient:
    """A client of the service; tests put their own in its place."""
    return EvalClient(url, token=_chosen.get())


class Talking(TyperCommand):
    """A command that may bring a token: all that have `--url` do."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._talks = any(parameter.name == "url" for parameter in self.params)
        if self._talks:
            told = "The service's token; better by EVALFLEET_TOKEN."
            self.params.append(TyperOption(param_decls=["--token"], metavar="TOKEN", help=told))
            told = "A file whose first line is the token."
            self.params.append(TyperOption(param_decls=["--token-file"], metavar="FILE", help=told))

    def invoke(self, ctx: Any) -> Any:
        """Run it, under its token."""
        if self._talks:
            _chosen.set(_token_of(ctx.params.pop("token", None), ctx.params.pop("token_file", None)))
        return super().invoke(ctx)


def _token_of(token: str | None, file: str | None) -> str | None:
    """What the command line names; None: the environment's."""
    if token is not None:
        hide(token)
        if file is not None:
            raise ConfigError("--token is given, too", field="--token-file", hint="give one of the two")
        return check_token(token, "--token")
    if file is not None:
        return check_token(read_token_lines(Path(file), "--token-file")[0], "--token-file")
    return None


def hide(secret: str) -> None:
    """Overwrite a secret in this process's command line, which every user of the host can read."""
    with suppress(OSError, ValueError, IndexError):
        start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            line = memory.read(end - start)
            memory.seek(start)
            memory.write(line.replace(secret.encode(), b"*" * len(secret.encode())))
