"""A server that is a process, to be killed or stopped by signals: prints its URL; `hold` never answers a POST."""

from __future__ import annotations

import asyncio
import sys

from aiohttp import web


async def _serve(hold: bool) -> None:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        if hold:
            await asyncio.Event().wait()
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/generate", answer)
    app.router.add_get("/health", lambda _: asyncio.sleep(0, web.Response()))
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started it is gone


if __name__ == "__main__":
    asyncio.run(_serve("hold" in sys.argv))
