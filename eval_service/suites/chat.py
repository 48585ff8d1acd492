"""A snapshot's own chat template: where it lies, and how it is rendered.

Finding it is reading text, which anybody may do. Rendering runs what the snapshot brings, in jinja's sandbox as
transformers does it, and belongs into a scorer's process with its limits. The text is tokenized here as well, without
the tokenizer's own special tokens: a template writes them itself, and an engine that is sent the text adds them again.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_MAX_BYTES = 64 << 20


class NoTemplate(Exception):
    """The snapshot can't be asked chat messages; says why."""


def chat_options(snapshot: Path) -> dict[str, Any]:
    """What `Renderer` is made of.

    Raises:
        NoTemplate: there is no template, or no `tokenizer.json` to make tokens of what it renders.
    """
    config = _json(snapshot / "tokenizer_config.json")
    template = _template(snapshot, config)
    tokenizer = snapshot / "tokenizer.json"
    if not tokenizer.is_file():
        raise NoTemplate(f"{snapshot} has no tokenizer.json, which makes tokens of rendered chat messages")
    special = {name: text for name in _SPECIAL if (text := _text_of(config.get(name))) is not None}
    return {"template": template, "special": special, "tokenizer": str(tokenizer)}


def _template(snapshot: Path, config: dict[str, Any]) -> str:
    file = snapshot / "chat_template.jinja"
    try:
        if file.is_file() and file.stat().st_size <= _MAX_BYTES:
            return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise NoTemplate(f"{file} can't be read: {exc}") from exc
    given = config.get("chat_template")
    if isinstance(given, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in given if isinstance(entry, dict)}
        given = named.get("default")
    if not isinstance(given, str) or not given.strip():
        raise NoTemplate(
            f"{snapshot} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json), "
            "and the suite asks chat messages"
        )
    return given


def _text_of(token: Any) -> str | None:
    """A special token, which is a text or an object that holds one."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            return {}
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


class Renderer:
    """Renders and tokenizes conversations, each with the template's generation prompt at its end."""

    def __init__(self, template: str, special: dict[str, str], tokenizer: str) -> None:
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # noqa: DTZ005 - as theirs
        self._template = environment.from_string(_without_generation(template))
        self._special = special
        self._tokenizer = Tokenizer.from_file(tokenizer)

    def render(self, messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
        """The prompt as text and as token ids.

        Raises:
            jinja2.TemplateError: the template refuses it, or tries what the sandbox forbids.
        """
        text = self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        return text, self._tokenizer.encode(text, add_special_tokens=False).ids


def _without_generation(template: str) -> str:
    """transformers' own tag marks the assistant's tokens and renders nothing."""
    import re

    return re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", r"{%\1 if true %}{% endif \2%}", template)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, **more: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)
