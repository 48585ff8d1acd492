"""A suite's chat messages as prompts of one snapshot, rendered in the scorers' processes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

from eval_service.suites.chat import chat_options
from eval_service.suites.datasets import Prompt
from eval_service.suites.scoring import Rendered, ScorerPool
from eval_service.suites.suite import Suite


async def rendered_prompts(suite: Suite, snapshot: Path, pool: ScorerPool) -> list[Prompt]:
    """The suite's prompts, each with text and token ids, or with the error that there was in their place.

    Raises:
        NoTemplate: the snapshot has none.
        ScorerPoolFailed: they can't be rendered now.
    """
    options = await asyncio.to_thread(chat_options, snapshot)
    prompts = suite.prompts()
    found = await pool.render(options, [json.dumps(prompt.messages) for prompt in prompts])
    return [_as_rendered(prompt, rendered) for prompt, rendered in zip(prompts, found, strict=True)]


def _as_rendered(prompt: Prompt, rendered: Rendered) -> Prompt:
    if rendered.error is None and not rendered.ids:
        return replace(prompt, text=rendered.text, error="the chat template renders it as nothing")
    text = rendered.text if rendered.error is None else prompt.messages[-1]["content"]
    return replace(prompt, text=text, ids=rendered.ids, error=rendered.error)
