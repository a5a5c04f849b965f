"""The report of a check: of an adapter that is loaded, or of one that cannot be, as far as it can be read."""
from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .adapter_read import Progress
from .adapters.adapter import Adapter
from .adapters.describe import CHANGES_NOTHING
from .adapters.open import NEWEST_OPENED
from .adapters.peft import SAFETENSORS
from .adapters.verdicts import field_verdicts
from .base_parts import BaseFile
from .beside import Work
from .deltas import WeightSquares, delta_norms
from .effect import NotFinite, effect_run
from .inspect import inspect_path
from .protocol import AdapterInfo, CheckReport, DeltaNorm, Finding, PromptEffect, ScaleGroup
from .weights import gguf, safetensors

if TYPE_CHECKING:
    from .engine import Engine

NO_EFFECT_KL = 1e-7
"""nats a position: below it nothing but rounding differs (1.2e-9 was seen between equal rows of one batch on a processor whose products
round by the row's place)"""
SMALLEST_SHARE = 1e-6
"""of the length of a weight: an adapter of which no part moves anything so far changes nothing"""
_PACKING = re.compile(r"[-_. ](?:i?q\d\w*|mxfp4|bf16|fp?16|fp?32|gguf|ggml|dequant\w*|bnb|awq|gptq|[48]bit|hf)(?![^-_. ])", re.IGNORECASE)
"""what is appended to a base's name when it is converted"""


_NAMES = ("name", "source.url", "url")
"""details of a base that name it"""


@dataclass(frozen=True, slots=True)
class OfDisk:
    """What the check of a loaded adapter has of the disk: its tensors, where no tier had them, and what the headers say."""

    adapter: Adapter
    facts: Mapping[str, Any]


def read_for_check(adapter: Work[Adapter], info: AdapterInfo, progress: Progress, cancelled: Callable[[], bool]) -> OfDisk:
    """Any thread may. Raises what `adapter` does."""
    return OfDisk(adapter(progress, cancelled), _of_file(info.path))


def check_loaded(engine: Engine, name: str, of_disk: OfDisk, effect: bool, squares: WeightSquares) -> Generator[str, None, CheckReport]:
    """Check the loaded adapter `name`; a piece of work is done for every text that is yielded.

    With `effect` raises what `effect_run` does.
    """
    model, adapter = engine.model, of_disk.adapter
    info = model.store.infos[name]
    deltas = yield from delta_norms(squares, adapter)
    findings = [*_note_findings(info), *_base_findings(info, model.base)]
    parts: tuple[PromptEffect, ...] = ()
    if effect:
        try:
            parts = yield from effect_run(engine, name)
        except NotFinite as error:
            findings.insert(0, Finding("refused", str(error)))
        findings += _effect_findings(parts)
    findings[:0] = _nothing_findings(info, deltas, parts)
    return CheckReport(
        path=info.path, name=name, model=model.info.name, findings=tuple(findings), info=info, **of_disk.facts,
        modules=tuple(adapter.modules), unmatched=info.unmatched, scales=_scales(adapter), deltas=deltas, effect=parts)


def report_refused(path: str | os.PathLike[str], reason: str, model: str) -> CheckReport:
    """What can be known of an adapter that cannot be loaded; `reason` stands first."""
    name = os.path.basename(os.path.abspath(path))
    return CheckReport(path=os.fspath(path), name=name, model=model, findings=(Finding("refused", reason),), **_of_file(path))


def _of_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The parts of a report that follow from the headers, none for a file that has none that can be read."""
    found: dict[str, Any] = {"fields": field_verdicts(path)}
    try:
        facts = inspect_path(path)
    except (ValueError, OSError):
        return found | _of_header(Path(path))
    return found | {"about": _about(facts), "tensors": facts.get("tensors", 0), "dtypes": facts.get("dtypes", {})}


def _of_header(path: Path) -> dict[str, Any]:
    """Of weights that are no adapter as they stand: how many tensors of which types, where their header can be read."""
    weights = path / SAFETENSORS if path.is_dir() else path
    try:
        tensors = (gguf if weights.suffix == ".gguf" else safetensors).read_header(weights).tensors
    except (ValueError, OSError):
        return {}
    return {"tensors": len(tensors), "dtypes": dict(Counter(entry.type for entry in tensors.values()))}


def _about(facts: Mapping[str, Any]) -> dict[str, str]:
    """Card, metadata and the other checkpoints of the run as one table of texts."""
    about = {f"{source} {key}": value for source in ("card", "metadata") for key, value in facts.get(source, {}).items()}
    if more := facts.get("more_metadata_keys"):
        about["metadata"] = f"… {more:,} more keys"
    if names := facts.get("checkpoints"):
        about["checkpoints of its run"] = f"{len(names):,}, the newest first: {', '.join(names[::-1])}"
    return about


def _note_findings(info: AdapterInfo) -> Iterable[Finding]:
    if info.dora:
        yield Finding("note", "DoRA: scale 0 is off, the base itself; PEFT's scale 0 would keep the trained magnitudes")
    for note in info.notes:
        yield Finding("refused" if note == CHANGES_NOTHING else "note" if NEWEST_OPENED in note else "warning", note)


def _nothing_findings(info: AdapterInfo, deltas: Sequence[DeltaNorm], parts: Sequence[PromptEffect]) -> Iterable[Finding]:
    """Whether it is too small for this base to act; `parts` are none where no effect run was made."""
    if CHANGES_NOTHING in info.notes or info.added_rows or any(part.changed for part in parts):
        return
    if all(delta.share < SMALLEST_SHARE for delta in deltas):
        yield Finding("refused", "changes nothing: no part of it moves the weights by a millionth of their length; train it, or give its "
                      "scaling (alpha)")


def _base_findings(info: AdapterInfo, base: BaseFile) -> Iterable[Finding]:
    if not info.base_model:
        yield Finding("note", "the adapter does not say for which base it was trained; its shapes fit this one")
        return
    own = [base.name, str(base.path), base.path.absolute().parent.name, *(base.details.get(key, "") for key in _NAMES)]
    if plain_name(info.base_model) not in map(plain_name, own):
        yield Finding("warning", f"it was trained on {info.base_model}, the base here is {base.name}: the shapes fit, the names differ; "
                      "if it is another model, its effect means nothing")


def _effect_findings(parts: tuple[PromptEffect, ...]) -> Iterable[Finding]:
    if parts and all(part.changed == 0 and part.kl < NO_EFFECT_KL for part in parts):
        yield Finding("warning", "no effect was seen: over all prompts of the effect run it changes nothing but rounding")


def plain_name(name: str) -> str:
    """A base's name without owner, folders and the marks of its conversion, for comparing.

    `HuggingFaceTB/SmolLM2-135M.Q4_1` -> `smollm2135m`.
    """
    parts = [part for part in re.split(r"[/\\]", name) if part]
    cached = next((part for part in parts if part.startswith("models--")), "")
    last = cached.rsplit("--", 1)[-1] if cached else parts[-1] if parts else ""
    return re.sub(r"[^a-z0-9]", "", _PACKING.sub("", last).lower())


def _scales(adapter: Adapter) -> tuple[ScaleGroup, ...]:
    groups: dict[float, Counter[str]] = {}
    for module, pair in adapter.modules.items():
        groups.setdefault(pair.scaling, Counter())[module.rsplit(".", 1)[-1]] += 1
    return tuple(ScaleGroup(scale, dict(kinds)) for scale, kinds in sorted(groups.items()))
