"""All admission checks of one snapshot, the cheap ones first.

`find_faults` blocks (it reads every byte of the snapshot once), so callers run it off the event loop.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eval_service.admission import content, tensors, texts
from eval_service.admission.architectures import HfConfig
from eval_service.admission.faults import Fault, FaultCode, Findings, distinct
from eval_service.admission.place import check_inside, list_files, resolve
from eval_service.admission.texts import ModelFacts
from eval_service.contract import names
from eval_service.contract.errors import SnapshotFault, SnapshotUnsafe
from eval_service.contract.manifest import Manifest, read_manifest
from eval_service.contract.snapshot import is_of_model, is_pickle
from eval_service.contract.wire import Source

DESCRIBED_BY = "evalfleet admission"


@dataclass(frozen=True, slots=True)
class Asked:
    """What a snapshot is compared with; None is not compared."""

    source: Source
    roots: tuple[Path, ...] | None = None
    digest: str | None = None
    run: str | None = None
    step: int | None = None
    allow_auto_map: bool = False
    known_as: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What the checks came to. `manifest` and `facts` are None where they could not be had."""

    directory: Path
    manifest: Manifest | None
    facts: ModelFacts | None
    faults: tuple[Fault, ...]
    described: bool = False  # the manifest was made here, the directory has none

    @property
    def ok(self) -> bool:
        """Whether the snapshot may be pinned."""
        return not self.faults

    def admitted(self) -> Admitted:
        """The snapshot as one that may be pinned.

        Raises:
            SnapshotFault: the first fault, of the class that its code names, where there is one.
        """
        if self.faults:
            raise self.faults[0].error(others=len(self.faults) - 1)
        assert self.manifest is not None
        assert self.facts is not None
        return Admitted(self.directory, self.manifest, self.facts, self.described)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A snapshot that may be pinned, with its links resolved."""

    directory: Path
    manifest: Manifest
    facts: ModelFacts
    described: bool


def admit(
    directory: Path,
    *,
    source: Source,
    roots: Sequence[Path],
    expect_digest: str | None = None,
    run: str | None = None,
    step: int | None = None,
    allow_auto_map: bool = False,
) -> Admitted:
    """Check a snapshot; nothing is read in full once a cheap check has failed.

    Use `find_faults` where a bad snapshot's manifest is wanted too (GC needs its nonce to ever delete it).

    Raises:
        SnapshotMissing: the directory, marker or manifest is not there; ask again within the visibility timeout.
        SnapshotUnsafe: outside the roots, a link that leads out, or code of its own.
        SnapshotFault: anything else; the first fault, by name.
    """
    return find_faults(
        directory,
        source=source,
        roots=roots,
        expect_digest=expect_digest,
        run=run,
        step=step,
        allow_auto_map=allow_auto_map,
    ).admitted()


def find_faults(
    directory: Path,
    *,
    source: Source,
    roots: Sequence[Path] | None = None,
    expect_digest: str | None = None,
    run: str | None = None,
    step: int | None = None,
    allow_auto_map: bool = False,
    thorough: bool = False,
    known_as: str | None = None,
) -> Report:
    """Check a snapshot and tell everything that is wrong with it.

    Args:
        source: `staging` and `reuse` need marker and manifest; a `caller`'s directory gets a manifest here.
        roots: the allowed ones; None checks no root, and then no link may leave the directory.
        expect_digest: what was dispatched.
        run: whose snapshot it should be (compared for `staging` alone: a fork may reuse another run's checkpoint).
        step: of which step it should be (not compared for a `caller`).
        thorough: go on to the bytes, and past a missing marker, after a fault.
        known_as: the name of the directory that it was sent as, where that is not `directory`'s own.
    """
    bound = None if roots is None else tuple(roots)
    asked = Asked(source, bound, expect_digest, run, step, allow_auto_map, known_as)
    return _Examination(asked, thorough).of(directory)


class _Examination:
    """One run of the checks; each step adds to the findings."""

    def __init__(self, asked: Asked, thorough: bool) -> None:
        self.asked = asked
        self.thorough = thorough
        self.findings = Findings()

    def of(self, directory: Path) -> Report:
        located = self._locate(directory)
        if located is None:
            return Report(directory, None, None, tuple(self.findings.faults))
        place, bound = located
        sizes = list_files(place, bound, self.findings)
        manifest = self._manifest(place, sizes)
        described = manifest is None
        facts, config = None, None
        if not self._stop():
            facts, config = self._check_model(place, sizes)
        if manifest is not None:
            self._check_claims(place, manifest, facts)
        if not self._stop():
            read = self._read(place, sizes, manifest, tied=config is not None and config.tie_word_embeddings)
            if described:
                manifest = self._describe(place, read, facts)
        return Report(place, manifest, facts, distinct(self.findings.faults), described and manifest is not None)

    def _stop(self) -> bool:
        return bool(self.findings) and not self.thorough

    def _locate(self, directory: Path) -> tuple[Path, Path] | None:
        """The resolved directory, and the bound that its links may not leave."""
        try:
            if self.asked.roots is None:
                place = root = resolve(directory)
            else:
                place, root = check_inside(directory, self.asked.roots)
            present = place.is_dir()
        except SnapshotUnsafe as exc:
            self.findings.unsafe("snapshot", exc.message, exc.hint or "send its real path")
            return None
        if not present:
            what = "is no directory" if place.exists() else "is not there"
            self.findings.missing("snapshot", f"{directory} {what}", "was it deleted, or not exported yet?")
            return None
        # What we export holds no links; a caller's model may be laid out with links inside its root (a cache, say).
        return place, root if self.asked.source is Source.CALLER else place

    def _manifest(self, place: Path, sizes: Mapping[str, int]) -> Manifest | None:
        marked = names.COMPLETE in sizes
        if self.asked.source is Source.CALLER and not (marked and names.MANIFEST in sizes):
            return None
        if not marked:
            self.findings.missing(names.COMPLETE, "the marker is not there", "is the export still being written?")
        if names.MANIFEST not in sizes:
            self.findings.missing(names.MANIFEST, "is not there", "is the export still being written?")
            return None
        try:
            manifest = read_manifest(place)
        except SnapshotFault as exc:
            self.findings.raised(exc, names.MANIFEST)
            return None
        self._check_listing(manifest, sizes)
        return manifest

    def _check_listing(self, manifest: Manifest, sizes: Mapping[str, int]) -> None:
        for entry in manifest.files:
            if entry.name not in sizes:
                self.findings.invalid(
                    entry.name, "the manifest lists it, and it is not there", "export it anew", may_appear=True
                )
            elif sizes[entry.name] != entry.size_bytes:
                self.findings.invalid(
                    entry.name,
                    f"has {sizes[entry.name]} bytes; the manifest says {entry.size_bytes}",
                    "export it anew",
                    may_appear=sizes[entry.name] < entry.size_bytes,
                )
        listed = {entry.name for entry in manifest.files}
        # Beside a caller's checkpoint there may be an optimizer's state, which is left out; what we export brings none.
        ours = set() if self.asked.source is Source.CALLER else set(sizes)
        for name in sorted(filter(is_pickle, listed | ours)):
            self.findings.unsafe(name, "is a pickle, which runs code when it is read", "export safetensors alone")
        for name in sorted(sizes.keys() - listed):
            if name.endswith(tensors.SUFFIX) or name in texts.READ_BY_NAME or name == names.INDEX:
                self.findings.invalid(name, "is not in the manifest, and an engine would read it", "remove it")

    def _check_model(self, place: Path, sizes: Mapping[str, int]) -> tuple[ModelFacts | None, HfConfig | None]:
        allow = self.asked.allow_auto_map
        config = texts.read_config(place, sizes, self.findings, allow_auto_map=allow)
        held = tensors.read_headers(place, sizes, self.findings)
        tensors.check_index(place, sizes, held, self.findings)
        vocab_size = config.vocab_size if config else None
        texts.check_tokenizer(place, sizes, vocab_size, self.findings, allow_auto_map=allow)
        if config is None:
            return None, None
        ends = texts.end_ids(place, sizes, config, self.findings)
        if held:
            tensors.check_table(config, held, self.findings)
        facts = ModelFacts(
            architecture=config.architecture,
            dtype=tensors.weight_dtype(config, held),
            vocab_size=config.vocab_size,
            context_length=config.max_position_embeddings,
            eos_token_ids=ends,
            num_parameters=sum(math.prod(tensor.shape) for tensor in held.values()),
        )
        return facts, config

    def _read(self, place: Path, sizes: Collection[str], manifest: Manifest | None, *, tied: bool) -> content.Content:
        if manifest is None:
            listed = [name for name in sizes if is_of_model(name)]
        else:
            listed = [entry.name for entry in manifest.files if entry.name in sizes]
        read = content.read_content(place, listed, self.findings)
        if tied:
            content.check_tied(read.tensors, self.findings)
        if manifest is not None:
            content.check_content(read, manifest, self.findings)
        return read

    def _describe(self, place: Path, read: content.Content, facts: ModelFacts | None) -> Manifest | None:
        """The manifest of a caller's sound directory; ours must bring their own."""
        if self.asked.source is not Source.CALLER or self.findings:
            return None
        manifest = Manifest.build(
            run=self.asked.run or "none",
            step=self.asked.step or 0,
            files=read.files.values(),
            tensors=read.tensors.values(),
            exporter=DESCRIBED_BY,
        )
        self._check_claims(place, manifest, facts)
        return manifest

    def _check_claims(self, place: Path, manifest: Manifest, facts: ModelFacts | None) -> None:
        """The manifest is of what was asked for, and its canary can be sent to an engine."""
        asked, ours = self.asked, self.asked.source is not Source.CALLER
        if asked.digest is not None and manifest.digest != asked.digest:
            self.findings.invalid("digest", f"is {manifest.digest}; {asked.digest} was dispatched", "dispatch it anew")
        if asked.source is Source.STAGING and asked.run is not None and manifest.run != asked.run:
            self.findings.invalid(
                "run", f"the manifest is of run {manifest.run!r}, not of {asked.run!r}", "is it the right path?"
            )
        if ours and asked.step is not None and manifest.step != asked.step:
            self.findings.invalid(
                "step", f"the manifest is of step {manifest.step}, not of {asked.step}", "is it the right path?"
            )
        name = asked.known_as or place.name
        parsed = names.parse_step_dir(name)
        if ours and parsed is not None and parsed != (manifest.step, manifest.digest[:8]):
            self.findings.invalid("snapshot", f"{name} is not the name of its step and digest", "don't rename it")
        if facts is not None and manifest.canary is not None:
            highest = max((max(row, default=0) for row in manifest.canary.token_ids), default=0)
            if highest >= facts.vocab_size or min(min(row, default=0) for row in manifest.canary.token_ids) < 0:
                self.findings.invalid(
                    "canary", f"token ids must be in the vocabulary of {facts.vocab_size}", "export it anew"
                )


__all__ = ["Admitted", "FaultCode", "ModelFacts", "Report", "admit", "find_faults"]
