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

from eval_service.access.hosts import Resolve, checked_address, resolve
from eval_service.trackers.told import Item, Refusal

SIGNATURE = "Evalfleet-Signature"
DELIVERY = "Evalfleet-Delivery"
EVENT = "Evalfleet-Event"
_AGAIN = frozenset({408, 425, 429})


class Sink:
    """Sends one item after another; follows no redirect, reads no answer's body, uses no proxy of the environment.

    Its host is looked up and judged for each of them, and what was judged is what is called (`access/hosts.py`).
    """

    def __init__(self, config: Mapping[str, Any], state_dir: str, resolver: Resolve = resolve) -> None:
        del state_dir
        self._url = httpx.URL(config["url"])
        self._networks = config.get("networks", ())
        self._resolve = resolver
        self._secret = os.environ[config["secret_env"]].encode()
        timeout = httpx.Timeout(config["timeout_s"] * 0.8)
        self._client = httpx.Client(timeout=timeout, follow_redirects=False, trust_env=False)

    def write(self, item: Item) -> None:
        """One POST.

        Raises:
            Refusal: a redirect, or a 4xx that will be the same again.
            OSError, httpx.HTTPError: it may go better later; PermissionError: its name leads where it must not.
        """
        told = {name: item[name] for name in ("id", "event", "run", "at", "data")} | {"point": item.get("point")}
        body = json.dumps(told).encode()
        headers = {
            "content-type": "application/json",
            SIGNATURE: sign(self._secret, body, int(time.time())),
            DELIVERY: item["id"],
            EVENT: item["event"],
        }
        host = self._url.host
        port = self._url.port or (443 if self._url.scheme == "https" else 80)
        address = checked_address(host, port, self._networks, resolver=self._resolve)
        headers["host"] = self._url.netloc.decode("ascii")
        # The certificate is that of the name, and the connection goes to the address.
        named = {"sni_hostname": host}
        url = self._url.copy_with(host=address)
        with self._client.stream("POST", url, content=body, headers=headers, extensions=named) as answer:
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
