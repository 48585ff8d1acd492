"""A checkpoint eval function over an SGLang server that is not the service's: load, read back, verify, then ask.

`function.toml` beside this file is its suite. The server must be nobody else's meanwhile: give it to one function of
one service.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx

from eval_service.contract.canary import canary_tolerance
from eval_service.functions import EvalContext, EvalSkip


class Attached:
    """Evaluates on the server at `url`; rows are {"prompt", "answer"}. The files hold its keys, if it has any."""

    def __init__(
        self,
        url: str,
        questions: str,
        key_file: str | None = None,
        admin_key_file: str | None = None,
        max_new_tokens: int = 16,
    ) -> None:
        self._http = httpx.Client(base_url=url, headers=_bearer(key_file), timeout=300.0)
        self._admin = _bearer(admin_key_file or key_file)
        path = Path(questions)
        path = path if path.is_absolute() else Path(__file__).parent / path
        self._rows = [json.loads(line) for line in path.read_text().splitlines() if line]
        self._max_new_tokens = max_new_tokens

    def evaluate_checkpoint(self, snapshot_dir: Path, context: EvalContext) -> None:
        """Pin the checkpoint, and ask each question once."""
        try:
            self._http.get("/model_info").raise_for_status()
        except httpx.TransportError as exc:
            raise EvalSkip(f"the server does not answer: {exc}") from exc
        version = f"{context.point}.{time.time_ns()}"  # a label like no other, so that an old load can't pass for it
        self._pin(snapshot_dir, version, context)
        right = 0
        for row in self._rows:
            began = time.monotonic()
            sampling = {"max_new_tokens": self._max_new_tokens, "temperature": 0.0}
            answer = self._post("/generate", {"text": row["prompt"], "sampling_params": sampling})
            meta = answer["meta_info"]
            if meta["weight_version"] != version:
                raise RuntimeError(f"somebody else loaded {meta['weight_version']!r} meanwhile")
            score = float(str(answer["text"]).strip() == row["answer"])
            right += int(score)
            context.sample(
                prompt=row["prompt"],
                output=str(answer["text"]),
                answer=row["answer"],
                score=score,
                prompt_tokens=meta["prompt_tokens"],
                output_tokens=meta["completion_tokens"],
                latency_s=time.monotonic() - began,
            )
        count, mean = len(self._rows), right / len(self._rows)
        stderr = (mean * (1 - mean) / (count - 1)) ** 0.5 if count > 1 else None
        context.metric("accuracy", mean, n=count, stderr=stderr)

    def dispose(self) -> None:
        """The server goes on; it is somebody else's."""
        self._http.close()

    def _pin(self, snapshot_dir: Path, version: str, context: EvalContext) -> None:
        """A 200 of the load is no proof: SGLang takes tensors that are missing. The canary is."""
        # An SGLang that is to load before it has put away what it answered last would end itself.
        self._http.post("/flush_cache", params={"timeout": 60}, headers=self._admin).raise_for_status()
        body = {"model_path": str(snapshot_dir), "weight_version": version, "flush_cache": True}
        loaded = self._post("/update_weights_from_disk", body, self._admin)
        found = self._http.get("/model_info").raise_for_status().json()["weight_version"]
        if not loaded.get("success") or found != version:
            raise RuntimeError(f"it was asked for {version} and holds {found!r}")
        if context.canary is None:
            context.pinned(version, "unproven")
            return
        differences = []
        for ids, expected in zip(context.canary["token_ids"], context.canary["logprobs"], strict=True):
            sampling = {"max_new_tokens": 1, "temperature": 0.0}
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
            rows = self._post("/generate", body)["meta_info"]["input_token_logprobs"][1:]
            differences += [abs(row[0] - value) for row, value in zip(rows, expected, strict=True)]
        difference = sum(differences) / len(differences)
        if not difference <= canary_tolerance(context.canary["logprobs"], context.canary["dtype"]):
            raise RuntimeError(f"the canary's log-probs differ by {difference:.3g} nats: it holds other weights")
        context.pinned(version, "canary")

    def _post(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Any:
        return self._http.post(path, json=body, headers=headers).raise_for_status().json()


def _bearer(file: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {Path(file).read_text().strip()}"} if file else {}
