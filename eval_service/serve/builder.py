"""What a Serve config file's `import_path` names: the application, built on the cluster that it is deployed to.

`serve deploy`, KubeRay's RayService and `serve run` call `application` with the file's `args`. Serve does it in a task
on some node of the cluster: the files have to be there under the same paths, as on a shared volume or in the image.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from pydantic import BaseModel, ConfigDict

from eval_service.fleet_config import load_fleet, validated
from eval_service.serve.application import build
from eval_service.serve.launch import overridden
from eval_service.serve.settings import Settings, check


class Args(BaseModel):
    """`args` of the application in the config file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    fleet: Path
    suites: Path
    revision: str = ""  # Serve deploys anew where this file has changed: another one has it read those two again


def application(args: dict[str, Any]) -> Any:
    """The application of these files; `args` as `Args` has them.

    Raises:
        ConfigError: what can't work is refused before anything of it is placed.
    """
    given = validated(Args, args, Path("the Serve config's args"))
    found = Settings.of(overridden(load_fleet(given.fleet)), given.suites.resolve(), os.environ)
    settings = replace(found, joined=True)
    check(settings)
    return build(settings.with_grades(cuda=ray.cluster_resources().get("GPU", 0) > 0))
