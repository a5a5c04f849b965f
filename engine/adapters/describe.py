"""What a user should know of a loaded adapter: the facts, and the notes that keep it from being silent."""
from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..models.facts import ModelFacts
from ..protocol import AdapterInfo
from ..weights.files import show
from .adapter import AdapterWeights, LoraPair, content_digest, layer_norms, target_counts
from .file import AdapterFile
from .keys import TensorNames
from .match import Places
from .patterns import ends

CHANGES_NOTHING = "changes nothing: every delta is zero (alpha 0, or weights as they were before training)"
MOST_UNMATCHED = 100
MOST_NAMED = 4


def describe(
    file: AdapterFile, name: str, weights: AdapterWeights, places: Places, names: TensorNames, facts: ModelFacts, notes: Sequence[str],
) -> AdapterInfo:
    """All of AdapterInfo but the invocation as text, which needs the base's tokenizer; `notes` are added to those made here."""
    settings = file.settings
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in _tensors(weights)})
    return AdapterInfo(
        name=name,
        path=file.readable_path,
        format=file.format,
        digest=content_digest(weights, settings.invocation),
        ranks=tuple(sorted({pair.rank for pair in weights.pairs})),
        effective_scales=tuple(sorted({pair.scaling for pair in weights.pairs})),
        matched=len(places.pairs),
        total=len(names.pairs),
        outside=len(places.outside),
        targets=target_counts(weights.modules) | ({"embed_tokens": 1} if weights.embedding else {}),
        bytes=weights.nbytes,
        rslora=settings.rslora,
        dora=any(pair.magnitude is not None for pair in weights.pairs),
        dtype="+".join(dtypes),
        base_model=settings.base_model,
        invocation_tokens=settings.invocation,
        unmatched=tuple(path[:160] for path in places.unmatched[:MOST_UNMATCHED]),
        replaced=tuple(sorted(weights.replaced)),
        token_rows={place: len(rows.ids) for place, rows in weights.rows.items()},
        added_rows=max(weights.vocab_rows(facts.vocab) - facts.vocab, 0),
        task=file.task, prompt_prefix=file.prompt_prefix, card=dict(file.card), metadata=dict(file.metadata),
        norms=layer_norms(weights.modules, facts.layers),
        notes=(*file.notes, *notes, *_notes(file, weights, places, names, facts)),
    )


def _tensors(weights: AdapterWeights) -> list[Tensor]:
    rows = [part.values for part in weights.rows.values()]
    return [*(tensor for pair in weights.pairs for tensor in pair.tensors), *weights.replaced.values(), *rows]


def _notes(file: AdapterFile, weights: AdapterWeights, places: Places, names: TensorNames, facts: ModelFacts) -> list[str]:
    notes = []
    if places.unmatched:
        more = f" and {len(places.unmatched) - 3} more" if len(places.unmatched) > 3 else ""
        notes.append(f"{len(places.unmatched)} of {len(places.unmatched) + _matched(places)} modules are not in the base and do not act: "
                     + ", ".join(show(path) for path in places.unmatched[:3]) + more)
    if not weights.replaced and not weights.rows and not any(map(_acts, weights.pairs)):
        notes.append(CHANGES_NOTHING)
    notes += _whole_notes(file, weights, places, facts)
    notes += _outside_notes(places, len(names.pairs))
    if isinstance(file.settings.targets, tuple) and file.settings.targets:
        notes += _missing_notes((*file.settings.targets, *file.settings.parameters), [pair.path for pair in names.pairs])
    return notes


def _matched(places: Places) -> int:
    return len(places.pairs) + len(places.whole) + len(places.rows)


def _acts(pair: LoraPair) -> bool:
    if pair.magnitude is not None:
        return True
    return bool(pair.scaling) and bool(pair.a.any() and pair.b.any() or pair.bias is not None and pair.bias.any())


def _whole_notes(file: AdapterFile, weights: AdapterWeights, places: Places, facts: ModelFacts) -> list[str]:
    notes = []
    copies = sorted({place for place, whole in places.whole.items() if whole.copy and not place.endswith(".bias")})
    if copies:
        notes.append(f"holds its own copy of {' and '.join(copies)}: it stands in the place of the loaded base's")
    if file.settings.invocation and places.whole:
        notes.append("what it holds whole acts from its invocation on, as all of it: PEFT would put that in the base's place before it too")
    if file.settings.bias != "none" and not any(place.endswith(".bias") for place in weights.replaced):
        notes.append(f"bias is {file.settings.bias!r} but the file holds no biases: there are none to change")
    added = weights.vocab_rows(facts.vocab) - facts.vocab
    if added > 0 and not {"lm_head.weight"} & {*weights.replaced, *weights.rows}:
        notes.append(f"has {added} tokens more than the base in its embedding but not in its lm_head: they are read, never written")
    if added > 0 and weights.tokenizer_json is None:
        notes.append(f"has rows for {added} tokens more than the base but no tokenizer.json that names them: they are never read from text")
    return notes


def _outside_notes(places: Places, total: int) -> list[str]:
    """What of the file does not act because of the config, by field."""
    notes = []
    for field in dict.fromkeys(places.outside.values()):
        paths = [path for path, cause in places.outside.items() if cause == field]
        more = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
        notes.append(f"{field} leaves out {len(paths)} of the {total} modules of the file: as in PEFT they do not act: "
                     + ", ".join(show(path, 160) for path in paths[:MOST_NAMED]) + more)
    whole = list(places.passed_over.items())
    notes += [f"tensor {show(name, 160)} does not act, as in PEFT: {why}" for name, why in whole[:MOST_NAMED]]
    if len(whole) > MOST_NAMED:
        notes.append(f"{len(whole) - MOST_NAMED} more whole tensors do not act, as in PEFT")
    return notes


def _missing_notes(targets: Sequence[str], paths: Sequence[str]) -> list[str]:
    held = {end for path in paths for name in (path, f"{path}.weight") for end in ends(name)}
    missing = [target for target in targets if target not in held]
    return ["target_modules lists " + ", ".join(map(show, sorted(missing)[:8]))
            + ", missing from the file: nothing acts there"] if missing else []
