"""What is in deploy/ is what the project really is: its builder, its config keys, its versions; and linters take it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from eval_service.access.needs import needed
from eval_service.fleet_config import load_fleet
from eval_service.suites.config import SuiteConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
TOOLS = Path(sys.executable).parent  # of the locked environment
LOCK = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements/cpu.lock").read_text(), re.MULTILINE))
DOCKERFILES = sorted(path for path in (DEPLOY / "docker").iterdir() if path.suffix in (".cpu", ".gpu"))


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def kuberay() -> tuple[dict[str, str], dict[str, Any]]:
    """The files of the config map, and the RayService's spec."""
    config, service = documents("kuberay/rayservice.yaml")
    return config["data"], service["spec"]


def serve_configs() -> dict[str, dict[str, Any]]:
    """Every Serve config, by where it is."""
    found = {path.name: yaml.safe_load(path.read_text()) for path in sorted((DEPLOY / "serve").glob("*.yaml"))}
    return {**found, "rayservice.yaml": yaml.safe_load(kuberay()[1]["serveConfigV2"])}


# In a process of its own: importing Serve warns of what pydantic has deprecated.
LOADS = """
import json, sys
from ray._common.utils import import_attr
from ray.serve.schema import ServeDeploySchema
from eval_service.contract.errors import ConfigError
from eval_service.serve.builder import Args, application

for given in json.load(sys.stdin):
    [found] = ServeDeploySchema.model_validate(given).applications
    assert (found.name, found.route_prefix) == ("evalfleet", None), found
    assert import_attr(found.import_path) is application, found
    Args.model_validate(found.args)
    assert not found.deployments, "what a deployment is like is the application's affair"
files = dict(zip(("fleet", "suites"), sys.argv[1:]))
for args in (files | {"flet": "c"}, files):
    try:
        application(args)
    except ConfigError as error:
        print(error.field)
"""


def test_serve_takes_each_config_and_the_builder_that_it_names_refuses_what_can_not_work(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text('[service]\nroots = ["gone"]\n[groups.eval]\nmodel = "m"\n')
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "suites.toml").write_text('[suites.s]\ndatasets = [{ name = "d", path = "rows.jsonl" }]\n')
    configs = list(serve_configs().values())
    assert len(configs) == 3
    end = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADS, tmp_path / "fleet.toml", tmp_path / "suites.toml"],
        input=json.dumps(configs),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=100,
        check=False,
    )
    assert end.returncode == 0, end.stderr
    assert end.stdout.split() == ["flet", "service.roots"]


@pytest.mark.parametrize("name", ["one-node.toml", "many-nodes.toml"])
def test_a_fleet_file_loads_and_its_gpus_add_up(name: str) -> None:
    fleet = load_fleet(DEPLOY / "fleet" / name)
    assert sum(group.gpus for group in fleet.groups.values()) == fleet.num_gpus


def test_kuberays_parts_fit_one_another(tmp_path: Path) -> None:
    files, spec = kuberay()
    (tmp_path / "fleet.toml").write_text(files["fleet.toml"])
    fleet = load_fleet(tmp_path / "fleet.toml")
    for suite in tomllib.loads(files["suites.toml"])["suites"].values():
        SuiteConfig.model_validate(suite)
    cluster = spec["rayClusterConfig"]
    assert cluster["rayVersion"] == LOCK["ray"]
    [workers] = cluster["workerGroupSpecs"]
    groups = [cluster["headGroupSpec"], workers]
    [head, worker] = [group["template"]["spec"] for group in groups]
    assert workers["maxReplicas"] * int(gpus_of(worker)) == fleet.num_gpus
    assert {"containerPort": fleet.service.port, "name": "api"} in head["containers"][0]["ports"]
    [args] = [app["args"] for app in serve_configs()["rayservice.yaml"]["applications"]]
    assert {Path(args["fleet"]).name, Path(args["suites"]).name} == files.keys()
    storage = {each["metadata"]["name"]: each for each in documents("kuberay/storage.yaml")}
    for pod in (head, worker):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert set(mounts.values()) == volumes.keys()
        assert str(Path(args["fleet"]).parent) in mounts
        assert str(fleet.service.state_dir) in mounts
        claims = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if _is_claim(volume)}
        assert claims <= storage.keys()
        assert all(any(root.is_relative_to(mount) for mount in mounts) for root in fleet.service.roots)
    assert storage["evalfleet-shared"]["spec"]["accessModes"] == ["ReadWriteMany"]
    redis = {each["kind"]: each for each in documents("kuberay/redis.yaml")}
    service = redis["Service"]
    tolerant = cluster["gcsFaultToleranceOptions"]
    assert tolerant["redisAddress"] == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert spec["upgradeStrategy"] == {"type": "None"}, "two clusters would have one ledger"


def _is_claim(volume: dict[str, Any]) -> bool:
    return "persistentVolumeClaim" in volume


def gpus_of(pod: dict[str, Any]) -> str:
    return str(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_takes_a_dockerfile_and_all_that_it_copies_is_there(path: Path) -> None:
    subprocess.run([TOOLS / "hadolint", "--no-color", path], check=True, timeout=60)
    for sources in re.findall(r"^COPY (?!--from)(.+) \S+$", path.read_text(), re.MULTILINE):
        for source in sources.split():
            assert (ROOT / source).exists(), source
            assert f"!{source}" in path.with_name(f"{path.name}.dockerignore").read_text().splitlines(), source


def test_images_have_the_versions_of_the_lock() -> None:
    gpu = (DEPLOY / "docker/Dockerfile.gpu").read_text()
    assert f"SGLANG=v{LOCK['sglang']}\n" in gpu
    assert f'"ray[serve]=={LOCK["ray"]}"' in gpu
    assert '".[service,postgres,objects]"' in gpu, "whatever fleet.toml may ask for"


def test_compose_mounts_and_builds_what_is_there() -> None:
    services = documents("compose/compose.yaml")[0]["services"]
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert not source.startswith("..") or (DEPLOY / "compose" / source).is_dir(), volume
    build = services["evalfleet"]["build"]
    assert (DEPLOY / "compose" / build["context"]).resolve() == ROOT
    assert documents("compose/gpu.yaml")[0]["services"].keys() <= services.keys()


def test_composes_health_check_needs_no_token() -> None:
    check = documents("compose/compose.yaml")[0]["services"]["evalfleet"]["healthcheck"]["test"]
    assert needed("GET", urlsplit(check[-1]).path) is None


def test_shellcheck_takes_the_slurm_script() -> None:
    subprocess.run([TOOLS / "shellcheck", DEPLOY / "slurm/evalfleet.sbatch"], check=True, timeout=60)


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze (Debian: systemd) is not installed"
)
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd/evalfleet.service").read_text()
    here = re.sub(r"^ExecStart=\S+", f"ExecStart={sys.executable}", unit, flags=re.MULTILINE)
    (tmp_path / "evalfleet.service").write_text(re.sub(r"^WorkingDirectory=.*", "", here, flags=re.MULTILINE))
    end = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "evalfleet.service"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (end.returncode, end.stderr) == (0, "")


def test_the_docs_say_of_every_file_how_it_was_checked() -> None:
    page = (ROOT / "docs/deploy.md").read_text()
    for path in sorted(DEPLOY.rglob("*")):
        if path.is_file() and path.suffix not in (".md", ".dockerignore"):
            assert f"`{path.relative_to(DEPLOY)}`" in page, path.name
