"""`python -m router.proxy --config proxy.toml`: serves until SIGTERM or SIGINT, then lets what is at work finish.

Prints one line, `listening on HOST:PORT`, once it does. An upstream that was ejected is readmitted as soon as it is
found alive: in this mode nobody can prove more of it than that.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import sys
from pathlib import Path

import uvloop

from router.health import Prober
from router.proxy import GC_THRESHOLDS
from router.proxy.config import ProxyConfig, load_config
from router.proxy.server import Server
from router.proxy.service import Service
from router.proxy.table import Targets
from router.router import Router

_GRACE_S = 30.0


async def serve(config: ProxyConfig) -> None:
    """Serve until told to stop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with Router(config.router_limits()) as router:
        targets = Targets(router)
        targets.replace(config.table())
        server = Server(Service(router, targets, config.client_limits(), keys=config.keys()), config.host, config.port)
        await server.start()
        print(f"listening on {config.host}:{server.port}", flush=True)
        watch = loop.create_task(_readmit(router, config))
        await stop.wait()
        watch.cancel()
        await server.stop(_GRACE_S)


async def _readmit(router: Router, config: ProxyConfig) -> None:
    upstreams = {upstream.id: upstream for target in config.table().targets.values() for upstream in target.upstreams}
    async with Prober(timeout_s=config.probe_timeout_s) as prober:
        while True:
            await asyncio.sleep(config.probe_interval_s)
            ejected = [upstreams[id_] for id_, stats in router.stats().upstreams.items() if not stats.healthy]
            for upstream, health in zip(ejected, await asyncio.gather(*map(prober.probe, ejected)), strict=True):
                if health.alive:
                    router.readmit(upstream.id)


def main() -> int:
    """The command; 2 for a config that can't work."""
    parser = argparse.ArgumentParser(prog="python -m router.proxy", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    try:
        config = load_config(parser.parse_args().config)
    except ValueError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 2
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
