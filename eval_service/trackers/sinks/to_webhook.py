"""POSTs to a webhook, signed. `verify` is what its receiver does, and the docs show.

The signature is of the time and the body, so that neither can be changed, and an old delivery not be sent again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import time
from collections.abc import Mapping
from typing import Any

import httpx

from eval_service.trackers.told import Item, Refusal

SIGNATURE = "Evalfleet-Signature"
DELIVERY = "Evalfleet-Delivery"
EVENT = "Evalfleet-Event"
_AGAIN = frozenset({408, 425, 429})


class Sink:
    """Sends one item after another; follows no redirect, reads no answer's body, uses no proxy of the environment."""

    def __init__(self, config: Mapping[str, Any], state_dir: str) -> None:
        del state_dir
        self._url = config["url"]
        self._secret = os.environ[config["secret_env"]].encode()
        timeout = httpx.Timeout(config["timeout_s"] * 0.8)
        self._client = httpx.Client(timeout=timeout, follow_redirects=False, trust_env=False)

    def write(self, item: Item) -> None:
        """One POST.

        Raises:
            Refusal: a redirect, or a 4xx that will be the same again.
            OSError, httpx.HTTPError: it may go better later.
        """
        told = {name: item[name] for name in ("id", "event", "run", "at", "data")} | {"point": item.get("point")}
        body = json.dumps(told).encode()
        headers = {
            "content-type": "application/json",
            SIGNATURE: sign(self._secret, body, int(time.time())),
            DELIVERY: item["id"],
            EVENT: item["event"],
        }
        with self._client.stream("POST", self._url, content=body, headers=headers) as answer:
            status = answer.status_code
        if status >= 500 or status in _AGAIN:
            raise OSError(f"it answered {status}")
        if status >= 300:
            raise Refusal(f"it answered {status}")

    def flush(self) -> None:
        """Nothing is held back."""


def sign(secret: bytes, body: bytes, at: int) -> str:
    """The signature header's value."""
    mac = hmac.new(secret, f"{at}.".encode() + body, hashlib.sha256).hexdigest()
    return f"t={at},v1={mac}"
