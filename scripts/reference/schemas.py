"""JSON schemas as Markdown tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

_BOUNDS = {
    "minimum": ">= {}",
    "exclusiveMinimum": "> {}",
    "maximum": "<= {}",
    "exclusiveMaximum": "< {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {}",
    "maxItems": "at most {}",
    "pattern": "`{}`",
}


@dataclass(frozen=True, slots=True)
class Schemas:
    """Schemas that refer to each other by name; `link` is what comes before a name in a link, None: no links."""

    all: Mapping[str, Mapping[str, Any]]
    link: str | None = None

    def section(self, name: str) -> str:
        """A heading, the description, and a table of fields or a list of values."""
        schema = self.all[name]
        parts = [f"### {name}", _plain(schema.get("description", ""))]
        if "enum" in schema:
            parts.append(f"One of {', '.join(f'`{value}`' for value in schema['enum'])}.")
        if schema.get("properties"):
            parts.append(self.table(schema))
        return "\n\n".join(filter(None, parts))

    def table(self, schema: Mapping[str, Any]) -> str:
        """A row a field."""
        required = schema.get("required", ())
        rows = [
            f"| `{name}` | {self.kind(field)} | {self.default(field, required=name in required)} | "
            f"{_plain(field.get('description', ''))} |"
            for name, field in schema["properties"].items()
        ]
        return "| field | type | default | |\n| --- | --- | --- | --- |\n" + "\n".join(rows)

    def kind(self, schema: Mapping[str, Any]) -> str:
        """What a value may be, with its bounds."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if self.link is not None:
                return f"[{name}]({self.link}{name.lower()})"
            return name if "properties" in self.all[name] else self.kind(self.all[name])
        if "enum" in schema or "const" in schema:
            return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
        if several := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
            return " or ".join(dict.fromkeys(self.kind(one) for one in several))
        kind = str(schema.get("type", ""))
        if kind == "array":
            kind = self._array(schema)
        elif kind == "object" and isinstance(inner := schema.get("additionalProperties"), Mapping):
            kind = f"object of {self.kind(inner)}" if inner else kind
        bounds = [text.format(_cell(schema[key])) for key, text in _BOUNDS.items() if key in schema]
        fixed = "prefixItems" in schema
        return kind if fixed or not bounds else f"{kind} ({', '.join(bounds)})"

    def _array(self, schema: Mapping[str, Any]) -> str:
        if "prefixItems" in schema:
            return f"[{', '.join(self.kind(one) for one in schema['prefixItems'])}]"
        inner = self.kind(schema.get("items", {}))
        return f"array of {inner}" if inner else "array"

    def default(self, schema: Mapping[str, Any], *, required: bool) -> str:
        """`required`, or the default as JSON."""
        if required:
            return "required"
        if "default" not in schema:
            return ""
        found = schema["default"]
        return "table" if isinstance(found, dict) and found else f"`{_cell(json.dumps(found, ensure_ascii=False))}`"


def sections(model: type[BaseModel]) -> Iterator[str]:
    """A section for a model and each that it holds."""
    document = model.model_json_schema()
    schemas = Schemas({model.__name__: document, **document.get("$defs", {})})
    for name, schema in schemas.all.items():
        if schema.get("properties"):
            yield f"### {name}\n\n{_plain(schema.get('description', ''))}\n\n{_keys(schemas, schema)}"


def _keys(schemas: Schemas, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        f"| `{name}` | {schemas.kind(field)}{' (required)' if name in required else ''} |"
        for name, field in schema["properties"].items()
    ]
    return "| key | type and bounds |\n| --- | --- |\n" + "\n".join(rows)


def _cell(value: object) -> str:
    text = f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)
    return text.replace("|", "\\|")


def _plain(text: str) -> str:
    """In one line, with what looks like markup kept as it is."""
    return _cell(re.sub(r"\s+", " ", text.strip())).replace("<", "&lt;")
