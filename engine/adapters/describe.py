"""What a user should know of a loaded adapter: the facts, and the notes that keep it from being silent."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..models.facts import ModelFacts
from ..protocol import AdapterInfo
from ..weights.files import show
from .adapter import AdapterWeights, LoraPair, content_digest, layer_norms, target_counts

if TYPE_CHECKING:
    from .file import AdapterFile
    from .keys import PairNames


CHANGES_NOTHING = "changes nothing: every delta is zero (alpha 0, or weights as they were before training)"
MOST_UNMATCHED = 100


def describe(
    file: AdapterFile, name: str, weights: AdapterWeights, unmatched: Sequence[str], pairs: Sequence[PairNames], facts: ModelFacts,
    notes: Sequence[str],
) -> AdapterInfo:
    """All of AdapterInfo but the invocation as text, which needs the base's tokenizer; `notes` are added to those made here."""
    settings, modules = file.settings, weights.modules
    norms = layer_norms(modules, facts.layers)
    dtypes = sorted({str(pair.a.dtype).removeprefix("torch.") for pair in modules.values()})
    return AdapterInfo(
        name=name,
        path=file.readable_path,
        format=file.format,
        digest=content_digest(weights, settings.invocation),
        ranks=tuple(sorted({pair.rank for pair in modules.values()})),
        effective_scales=tuple(sorted({pair.scaling for pair in modules.values()})),
        matched=len(modules),
        total=len(pairs),
        targets=target_counts(modules),
        bytes=weights.nbytes,
        rslora=settings.rslora,
        dtype="+".join(dtypes),
        base_model=settings.base_model,
        invocation_tokens=settings.invocation,
        unmatched=tuple(show(path, 160) for path in unmatched[:MOST_UNMATCHED]),
        norms=norms,
        notes=(*file.notes, *notes, *_notes(file, modules, unmatched, pairs)),
    )


def _notes(file: AdapterFile, modules: Mapping[str, LoraPair], unmatched: Sequence[str], pairs: Sequence[PairNames]) -> list[str]:
    notes = []
    paths = [pair.path for pair in pairs]
    if unmatched:
        more = f" and {len(unmatched) - 3} more" if len(unmatched) > 3 else ""
        notes.append(f"{len(unmatched)} of {len(paths)} modules are not in the base and do not act: "
                     + ", ".join(show(path) for path in unmatched[:3]) + more)
    if not any(pair.scaling and pair.b.any() and pair.a.any() for pair in modules.values()):
        notes.append(CHANGES_NOTHING)
    copies = [pair.path for pair in pairs if pair.copy]
    if copies:
        notes.append(f"holds a copy of the base's {', '.join(map(show, copies[:3]))}: not read, the loaded base's own is used")
    targets = file.settings.targets
    if isinstance(targets, tuple) and targets:
        notes += _target_notes(targets, paths)
    return notes


def _target_notes(targets: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Where `target_modules` and the tensors of the file disagree; the file decides."""
    notes = []
    missing = [target for target in targets if not any(_is_target(path, target) for path in paths)]
    if missing:
        notes.append("target_modules lists " + ", ".join(map(show, sorted(missing)[:8])) + ", missing from the file: nothing acts there")
    extra = sorted({path.rsplit(".", 1)[-1] for path in paths if not any(_is_target(path, target) for target in targets)})
    if extra:
        notes.append("the file also has " + ", ".join(map(show, extra[:8])) + ", which target_modules does not list: applied")
    return notes


def _is_target(path: str, target: str) -> bool:
    return path == target or path.endswith("." + target)
