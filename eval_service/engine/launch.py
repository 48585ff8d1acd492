"""Starts SGLang in this process, from a boot that comes over standard input.

The boot is one JSON object: {argv, cpu, api_key, admin_api_key}. SGLang parses `argv` itself; the keys are set on the
parsed arguments, so they stand in no command line, and are blotted out of what SGLang logs.

On the CPU its scheduler and detokenizer are forked from here after everything is imported, rather than spawned: SGLang
is up in 10 s instead of 25 s, with 0.8 GB instead of 1.3 GB. With CUDA they are spawned, as SGLang wants it.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterable
from typing import Any


class GpuPresent(SystemExit):
    """The CPU engine was asked for where CUDA is there."""


def main() -> None:
    """Read the boot and serve until the process is ended."""
    boot = json.loads(sys.stdin.read())
    blot_out((boot["api_key"], boot["admin_api_key"]))
    if boot["cpu"]:
        refuse_cuda()
        prepare_fork()
    from sglang.srt.server_args import prepare_server_args

    arguments = prepare_server_args(boot["argv"])
    arguments.api_key = boot["api_key"]
    arguments.admin_api_key = boot["admin_api_key"]
    serve(arguments)


def blot_out(secrets: Iterable[str]) -> None:
    """Replace secrets in every log record: SGLang logs all of its arguments."""
    make = logging.getLogRecordFactory()
    held = tuple(secrets)

    def blotted(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        message = record.getMessage()
        if any(secret in message for secret in held):
            for secret in held:
                message = message.replace(secret, "***")
            record.msg, record.args = message, ()
        return record

    logging.setLogRecordFactory(blotted)


def refuse_cuda() -> None:
    """End here if CUDA is there: the stand-ins would shadow the real kernels."""
    import torch

    if torch.cuda.is_available():
        raise GpuPresent("the CPU engine is refused where CUDA is there; use grade = 'sglang'")


def prepare_fork() -> None:
    """Import what the children need, then let `multiprocessing` fork them, whatever SGLang asks for."""
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None


def serve(arguments: Any) -> None:
    """Run SGLang's HTTP server; its children end with it."""
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.utils import kill_process_tree

    try:
        launch_server(arguments)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
