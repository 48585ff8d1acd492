"""`evalfleet upload`: publish a snapshot to an object store, and dispatch it from there if asked."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Annotated, Any

import typer

from eval_service.cli import options
from eval_service.cli.output import print_json, say
from eval_service.contract.wire import DispatchRequest, Kind


def upload(
    snapshot: Annotated[Path, typer.Argument(metavar="SNAPSHOT", help="A published snapshot's directory.")],
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Where to, such as s3://bucket/evals.")],
    fleet: Annotated[Path | None, typer.Option(help="Reach the store as the [objects] of this file say.")] = None,
    dispatch: Annotated[bool, typer.Option("--dispatch", help="Then ask the service for its points.")] = False,
    url: options.Url = options.DEFAULT_URL,
    as_json: options.Json = False,
) -> None:
    """Copy a snapshot to PREFIX/RUN/step_STEP-DIGEST in an object store, its marker last, and print the URL."""
    from eval_service.fleet_config import load_fleet
    from eval_service.objects.store import ObjectStore
    from eval_service.objects.upload import upload as copy

    config = load_fleet(fleet).objects if fleet is not None else None
    done = copy(snapshot, prefix, store=ObjectStore(config) if config is not None else None)
    manifest = done.manifest
    told: dict[str, Any] = {"url": done.url, "digest": manifest.digest, "run": manifest.run, "step": manifest.step}
    told |= {"size_bytes": done.size_bytes, "reused": done.reused}
    if dispatch:
        request = DispatchRequest(
            run=manifest.run,
            step=manifest.step,
            kind=Kind.MANUAL,
            force=True,
            reservation=str(uuid.uuid4()),
            snapshot=done.url,
            digest=manifest.digest,
        )
        with options.connect(url) as client:
            reply = client.dispatch(request)
        told["points"] = [point.model_dump(mode="json") for point in reply.points]
    print_json(told) if as_json else say(done.url)
