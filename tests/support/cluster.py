"""A Ray cluster on this host, in a process of its own: `python -m tests.support.cluster DIRECTORY WORKERS`.

Each of so many nodes beside the head has room for one engine; without any, the head has room for two.

It writes where its GCS is, and the pids of its nodes, to `cluster.json` in the directory, and ends with SIGTERM. Its
files lie there too, so that nobody finds it who was not told. The nodes have one address: this host's.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

TOLD = "cluster.json"
NODES_S = 80.0  # the nodes start beside each other, and beside other tests
_SMALL: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 << 20}


def main() -> None:
    """Start the nodes, and stay until told to end."""
    directory, count = Path(sys.argv[1]), int(sys.argv[2])
    stop: list[int] = []  # not an event, whose lock the interrupted thread may hold
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    os.environ["RAY_TMPDIR"] = str(directory)
    from ray.cluster_utils import Cluster

    room = {} if count else {"resources": {"engines": 2}}
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **_SMALL, **room})
    workers = [cluster.add_node(wait=False, resources={"engines": 1}, **_SMALL) for _ in range(count)]
    cluster.wait_for_nodes(NODES_S)
    told = {
        "address": cluster.address,
        "head": _pids(cluster.head_node, "gcs_server") + _pids(cluster.head_node, "raylet"),
        "workers": [pid for node in workers for pid in _pids(node, "raylet")],
    }
    partial = directory / f".{TOLD}"
    partial.write_text(json.dumps(told))
    partial.replace(directory / TOLD)
    while not stop:
        time.sleep(0.2)
        # A raylet that nobody waits for stays as a zombie, and its workers would take it for alive.
        for node in (cluster.head_node, *workers):
            for each in (process for kind in node.all_processes.values() for process in kind):
                each.process.poll()
    cluster.shutdown()


def _pids(node: Any, kind: str) -> list[int]:
    return [each.process.pid for each in node.all_processes[kind]]


if __name__ == "__main__":
    main()
