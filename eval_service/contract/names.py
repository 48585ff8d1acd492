"""The names on shared storage, and the one place that knows them.

<root>/<run>/step_<step>-<digest8>/    a published snapshot: immutable, its path never used for anything else
<root>/<run>/.partial-<nonce>/         one being written
<root>/<run>/.trash-<nonce>/           one being deleted
<root>/<run>/.held-<nonce>/            hard links to a checkpoint that is not ours to keep, while it is evaluated
<root>/<run>/outbox/                   requests that could not be sent, and the receipt of an unreachable drain
<root>/<run>/evals/                    the samples of each point, as Parquet
"""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import NamedTuple

from eval_service.contract.errors import InvalidRequest

MANIFEST = "manifest.json"
DISPATCH = "dispatch.json"
COMPLETE = ".complete"
INDEX = "model.safetensors.index.json"
OUTBOX = "outbox"
RECEIPT = "receipt.json"
EVALS = "evals"
PARTIAL_PREFIX = ".partial-"
TRASH_PREFIX = ".trash-"
HELD_PREFIX = ".held-"

# Written by the exporter about the snapshot; they are not part of the model, so no digest covers them.
BESIDE_THE_MODEL = frozenset({MANIFEST, DISPATCH, COMPLETE})

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_STEP_DIR = re.compile(r"step_(0|[1-9][0-9]{0,12})-([0-9a-f]{8})")
NONCE = re.compile(r"^[0-9a-f]{8,32}$")
BESIDE = re.compile(r"\.[^/]+\.[0-9a-f]{8,32}")  # what `beside` makes


class StepDir(NamedTuple):
    """A published directory's name, taken apart."""

    step: int
    digest8: str


def check_run(run: str) -> str:
    """Return `run` if it can name a run.

    Raises:
        InvalidRequest: for an empty or long name, a separator, or one that starts with a dot.
    """
    if not _RUN.fullmatch(run) or ".." in run:
        raise InvalidRequest(
            f"{run!r} can't name a run",
            field="run",
            hint="use up to 128 letters, digits, '.', '_' and '-', starting with a letter or digit, without '..'",
        )
    return run


def check_step(step: int) -> int:
    """Return `step` if it can be one: completed optimizer steps, so the base model is 0."""
    if step < 0:
        raise InvalidRequest(f"{step} is negative", field="step", hint="steps count completed ones; the base is 0")
    return step


def run_dir(root: str | Path, run: str) -> Path:
    """Where a run's snapshots, outbox and samples lie."""
    return Path(root) / check_run(run)


def step_dir_name(step: int, digest: str) -> str:
    """The name of a published snapshot."""
    return f"step_{check_step(step)}-{digest[:8]}"


def parse_step_dir(name: str) -> StepDir | None:
    """Take a published directory's name apart; None for any other name."""
    match = _STEP_DIR.fullmatch(name)
    return StepDir(int(match[1]), match[2]) if match else None


def partial_name(nonce: str) -> str:
    """The name of a directory that is being written."""
    return f"{PARTIAL_PREFIX}{_checked_nonce(nonce)}"


def trash_name(nonce: str) -> str:
    """The name of a directory that is being deleted."""
    return f"{TRASH_PREFIX}{_checked_nonce(nonce)}"


def held_name(nonce: str) -> str:
    """The name of a directory of hard links."""
    return f"{HELD_PREFIX}{_checked_nonce(nonce)}"


def outbox_dir(root: str | Path, run: str) -> Path:
    """Where a run keeps what it could not send."""
    return run_dir(root, run) / OUTBOX


def samples_file(root: str | Path, run: str, step: int, suite: str, point: str) -> Path:
    """Where a point's samples lie."""
    return run_dir(root, run) / EVALS / f"step_{step}-{suite}-{point}.parquet"


def beside(name: str) -> str:
    """The name that a file is written under before it is renamed into its place; a new one with each call."""
    return f".{name}.{uuid.uuid4().hex}"


def _checked_nonce(nonce: str) -> str:
    if not NONCE.fullmatch(nonce):
        raise ValueError(f"not a nonce: {nonce!r}")
    return nonce
