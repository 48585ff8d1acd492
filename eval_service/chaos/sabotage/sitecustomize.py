"""Switches off what the kit must be able to miss: `EVALFLEET_CHAOS_DISABLE=epoch` or `scan`.

Python imports this at the start of each process of a service that the kit's own test sabotages: only there is this
directory on the path. Nothing of the service knows of it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _without_epoch(module: ModuleType) -> None:
    """A controller that was replaced may write."""
    module.Database.fence = lambda self, connection, epoch: None


def _without_stop(module: ModuleType) -> None:
    """A controller that was hung goes on for a while, deaf to Serve: else it would end before it could do harm."""
    module.Controller.stop = lambda self: None


def _without_scan(module: ModuleType) -> None:
    """What nobody POSTed is found by nobody."""

    async def scan(_self: Any) -> None:
        return None

    module.Housekeeping._scan = scan


_SWITCHES: dict[str, dict[str, Callable[[ModuleType], None]]] = {
    "epoch": {"eval_service.ledger.database": _without_epoch, "eval_service.controller.core": _without_stop},
    "scan": {"eval_service.controller.housekeeping": _without_scan},
}


class _Loader(importlib.abc.Loader):
    """The module's own loader, and then the change."""

    def __init__(self, own: importlib.abc.Loader, change: Callable[[ModuleType], None]) -> None:
        self._own = own
        self._change = change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        self._change(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module that is changed, and leaves the rest to the others."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._change)
        return spec


for _switch in filter(None, os.environ.get("EVALFLEET_CHAOS_DISABLE", "").split(",")):
    for _name, _change in _SWITCHES[_switch].items():
        sys.meta_path.insert(0, _Finder(_name, _change))
