"""The whole path of a snapshot in an S3 (moto's server): published, evaluated, cached, and collected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from eval_service.contract import names
from eval_service.contract.errors import StoreUnavailable
from eval_service.contract.states import PointState, Reason
from eval_service.ledger.orders import Orders
from eval_service.objects.cache import Lease
from eval_service.objects.config import ObjectsConfig
from eval_service.objects.places import Places
from eval_service.objects.store import ObjectStore
from eval_service.objects.upload import Uploaded, upload
from tests.support.bounded import go
from tests.support.controller_stand import Export, Stand

BUCKET = "checkpoints"
PREFIX = f"s3://{BUCKET}/evals"


@dataclass
class S3:
    """A bucket of its own."""

    url: str
    client: Any

    @property
    def config(self) -> dict[str, Any]:
        """`[objects]` of a fleet's file."""
        named = {"key": "OUR_S3_KEY", "secret": "OUR_S3_SECRET"}
        options = {"endpoint_url": self.url}
        return {"prefixes": (PREFIX,), "options": {"s3": options}, "options_env": {"s3": named}, "attempts": 1}

    def names(self) -> list[str]:
        """All that it holds."""
        return [item["Key"] for item in self.client.list_objects_v2(Bucket=BUCKET).get("Contents", [])]

    def upload(self, export: Export) -> Uploaded:
        """As a trainer does."""
        return upload(export.path, PREFIX, store=ObjectStore(ObjectsConfig.model_validate(self.config)))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Where an S3 listens."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """Empty."""
    for name in ("OUR_S3_KEY", "OUR_S3_SECRET"):
        monkeypatch.setenv(name, "only-in-the-environment")
    keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=server, **keys)
    client.create_bucket(Bucket=BUCKET)
    s3 = S3(server, client)
    yield s3
    for key in s3.names():
        client.delete_object(Bucket=BUCKET, Key=key)
    client.close()


def test_snapshots_in_s3_are_published_evaluated_cached_and_collected(tmp_path: Path, s3: S3) -> None:
    async def body() -> None:
        stand = Stand(tmp_path, objects=s3.config, scan_interval_s=0.5)
        async with stand.running(engines=1):
            stand.put_run("r", keep=0, collect_objects=True)
            for step in (1, 2, 3):
                export = stand.export("r", step)
                there = s3.upload(export)
                stand.exports[there.url] = export
                digest = export.manifest.digest
                [view] = await stand.until_done(stand.dispatch_path("r", step, there.url, digest=digest, force=True))
                assert view.snapshot == there.url
                assert len(list((tmp_path / "state" / "objects").glob(f"{digest}-*.lock"))) == 1
            # One is the best, and one is in the engine: what is left is nobody's.
            await stand.until(lambda: sum(name.endswith(names.MANIFEST) for name in s3.names()) == 2)
            assert sum(name.endswith(names.COMPLETE) for name in s3.names()) == 2
            Orders(stand.database).delete_run("r")
            await stand.until(lambda: not s3.names())
            assert all(export.path.exists() for export in stand.exports.values())  # what is not ours to know of

    go(body)


def uploaded(tmp_path: Path, s3: S3) -> tuple[Stand, Export, Uploaded]:
    """A stand that knows the store, and a snapshot of step 1 that lies in it."""
    stand = Stand(tmp_path, objects=s3.config)
    export = stand.export("r", 1)
    there = s3.upload(export)
    stand.exports[there.url] = export
    return stand, export, there


def test_a_second_point_on_the_same_snapshot_fetches_nothing(tmp_path: Path, s3: S3) -> None:
    async def body() -> None:
        stand, export, there = uploaded(tmp_path, s3)
        async with stand.running(engines=1):
            stand.put_run("r", keep=0)
            await stand.until_done(stand.dispatch_path("r", 1, there.url, digest=export.manifest.digest))
            assert s3.names()  # a run that does not say so keeps its objects
            for key in s3.names():
                s3.client.delete_object(Bucket=BUCKET, Key=key)
            await stand.until_done(stand.dispatch_path("r", 1, there.url, digest=export.manifest.digest))

    go(body)


def test_an_object_that_was_cut_short_is_a_fault_and_no_engine_is_touched(tmp_path: Path, s3: S3) -> None:
    async def body() -> None:
        stand, export, there = uploaded(tmp_path, s3)
        name = next(entry.name for entry in export.manifest.files if entry.name.endswith(".safetensors"))
        key = f"{there.url.removeprefix(f's3://{BUCKET}/')}/{name}"
        s3.client.put_object(Bucket=BUCKET, Key=key, Body=(export.path / name).read_bytes()[:-1])
        async with stand.running(engines=1):
            stand.put_run("r")
            [view] = await stand.until_ended(stand.dispatch_path("r", 1, there.url, digest=export.manifest.digest))
            assert (view.state, view.reason) == (PointState.SKIPPED, Reason.SNAPSHOT_INVALID)
            assert "snapshot_altered" in (view.detail or "")
            assert name in (view.detail or "")
            assert view.attempts == 0
            assert b"only-in-the-environment" not in (tmp_path / "ledger.db").read_bytes()
            s3.client.put_object(Bucket=BUCKET, Key=key, Body=(export.path / name).read_bytes())
            Orders(stand.database).retry(view.id)
            await stand.until_state(view.id, PointState.DONE)

    go(body)


class OtherNode(Places):
    """Of an engine on a node of its own, from which the store can't be reached at first."""

    tries = 0

    def hold(self, url: str, digest: str | None) -> Lease:
        """As on any node, from the third try on."""
        self.tries += 1
        if self.tries < 3:
            raise StoreUnavailable(f"{url} can't be had")
        return super().hold(url, digest)


def test_a_store_that_an_engines_node_can_not_reach_costs_the_point_no_attempt(tmp_path: Path, s3: S3) -> None:
    async def body() -> None:
        stand, export, there = uploaded(tmp_path, s3)
        async with stand.running(engines=1):
            there_too = tmp_path / "other-node"
            node = stand.runners["e0"]._places = OtherNode(stand.config.objects, there_too)
            stand.put_run("r")
            [view] = await stand.until_done(stand.dispatch_path("r", 1, there.url, digest=export.manifest.digest))
            assert (view.attempts, node.tries) == (1, 3)
            assert stand.engine("e0").quarantined is None
            assert len(list((there_too / "objects").glob("*.lock"))) == 2  # its own, and the one of the room

    go(body)
