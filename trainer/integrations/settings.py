"""What a callback is told: the keys of `run.toml`'s `[run]` and `[eval]`, checked as strictly."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from eval_service.contract import names
from eval_service.contract.errors import ConfigError
from eval_service.contract.manifest import validation_message
from eval_service.contract.wire import Source
from trainer.config import EvalSection, RunSection

HINT = "see docs/integrations.md"


@dataclass(frozen=True, slots=True)
class Settings:
    """One run's; `reuses` is always false, since points are made of exports."""

    run: RunSection
    eval: EvalSection
    base: Path | None = None
    num_steps: int | None = None
    reuses: bool = False

    @property
    def output_dir(self) -> Path:
        """Log and receipt."""
        return self.run.output_dir or names.run_dir(self.run.root, self.run.name) / "trainer"

    def of_run(self, num_steps: int | None) -> Settings:
        """With the last step, now that the host knows it."""
        return replace(self, num_steps=num_steps)


def settings(
    *, run: str, root: str | Path, base: str | Path | None = None, output_dir: str | Path | None = None, **keys: Any
) -> Settings:
    """Check what was given.

    Args:
        run: the run's name.
        root: a directory inside the service's roots; snapshots go to <root>/<run>.
        base: the base model's directory, inside the service's roots, for step 0; None: its weights are exported.
        output_dir: log and receipt; None: <root>/<run>/trainer.
        keys: of `[eval]`, such as url, interval, suites, keep, overflow.

    Raises:
        ConfigError: names the key.
    """
    try:
        section = EvalSection.model_validate(keys)
        place = RunSection(name=run, root=Path(root).absolute(), output_dir=Path(output_dir) if output_dir else None)
    except ValidationError as exc:
        unknown = exc.errors()[0]["type"] == "extra_forbidden"
        raise ConfigError("unknown key" if unknown else validation_message(exc), field=_field(exc), hint=HINT) from exc
    if section.snapshot_source is not Source.STAGING:
        raise ConfigError(
            "a callback exports; it reuses no checkpoints",
            field="snapshot_source",
            hint="leave it out, or point `evalfleet watch` at the directory of your checkpoints",
        )
    return Settings(place, section, Path(base).absolute() if base is not None else None)


def _field(exc: ValidationError) -> str | None:
    return ".".join(str(part) for part in exc.errors()[0]["loc"]) or None
