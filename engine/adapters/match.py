"""Where the tensors of an adapter belong in a base: by the ends of their names. No torch."""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..models.facts import ModelFacts, module_shapes, tensor_shapes
from ..models.names import usual_name
from ..weights.files import show
from .errors import AdapterError
from .fused import other_shapes
from .keys import PairNames, TensorNames, WholeName

_OTHER_TOWER = re.compile(r"(?:^|\.)(?:vision|visual|audio|encoder|image)[^.]*\.")
"""prefixes of the parts of a multimodal model that are not its language model"""
_LAYER = re.compile(r"(?:^|\.)layers\.\d")
TOKEN_MODULES = ("embed_tokens", "lm_head")
"""modules with a row for each token"""


@dataclass(frozen=True, slots=True)
class Places:
    """The tensors of a file by where they act. `modules` may name those of the other layout (q_proj of a base that has qkv_proj)."""

    modules: Mapping[str, PairNames]
    embedding: PairNames | None
    whole: Mapping[str, WholeName]
    """by canonical name of the tensor of the base"""
    rows: Mapping[str, str]
    """"embed_tokens" / "lm_head" -> tensor of trained rows"""
    unmatched: tuple[str, ...]
    """paths of what is not in the base, in a layer it has"""
    outside: Mapping[str, str] = field(default_factory=dict)
    """path of a LoRA that the config leaves out -> the field that does"""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """whole tensor that PEFT would not use with this config -> why"""

    @property
    def pairs(self) -> dict[str, PairNames]:
        """Every LoRA, that of the embedding as "embed_tokens"."""
        return dict(self.modules) | ({"embed_tokens": self.embedding} if self.embedding else {})


def match(names: TensorNames, facts: ModelFacts, file: Path) -> Places:
    """The tensors of `file` by the modules and tensors of the base whose names end theirs.

    Raises AdapterError for two tensors with one place, for layers beyond the base's, for whole tensors without a place, and when
    nothing matches.
    """
    finder = _Finder(facts, file)
    linears = {pair.path: pair for pair in names.pairs if not pair.embedding}
    modules, unmatched = finder.place(linears, finder.modules)
    embeddings, others = finder.place({pair.path: pair for pair in names.pairs if pair.embedding}, {"embed_tokens"})
    whole, strange = finder.place(names.whole, finder.tensors)
    for path in strange:
        _refuse_whole(path, names.whole[path].name, facts, file)
    rows, lost = finder.place(names.rows, set(TOKEN_MODULES))
    unmatched += others + strange + lost
    if not modules and not embeddings and not whole and not rows:
        raise AdapterError(f"{file}: no module of it matches the base (0/{len(unmatched)}): the file has {_examples(unmatched)}, "
                           f"the base has {_examples(module_shapes(facts))}; load the base that it was trained on")
    return Places(modules, embeddings.get("embed_tokens"), whole, rows, tuple(unmatched))


class _Finder:
    """What a base has, and where in it a path ends."""

    def __init__(self, facts: ModelFacts, file: Path) -> None:
        self.facts, self.file = facts, file
        self.modules = {*module_shapes(facts), *other_shapes(facts)}
        self.tensors = {*tensor_shapes(facts), "lm_head.weight"} - {"rope_freqs.weight"}
        self.kinds = {name.split(".", 2)[2] for name in (*self.modules, *self.tensors) if name.startswith("layers.")}

    def place(self, items: Mapping[str, object], known: Iterable[str]) -> tuple[dict, list[str]]:
        """`items` by the name in `known` that their paths end in, and the paths that end in none."""
        found: dict[str, object] = {}
        paths: dict[str, str] = {}
        unmatched = []
        for path, item in items.items():
            name = ending(path, known)
            if name is None:
                self._refuse_layer_beyond(path)
                unmatched.append(path)
            elif name in found:
                raise AdapterError(f"{self.file}: {show(paths[name], 160)} and {show(path, 160)} both name the module {name} "
                                   "of the base; it is ambiguous which to use")
            else:
                found[name], paths[name] = item, path
        return found, unmatched

    def _refuse_layer_beyond(self, path: str) -> None:
        found = re.search(r"(?:^|\.)layers\.(\d{1,9})\.(.+)\Z", path)
        if found and found[2] in self.kinds and int(found[1]) >= self.facts.layers and not _other_tower(path[:found.start()]):
            raise AdapterError(f"{self.file}: has deltas for layers.{int(found[1])}, the base has layers.0 to "
                               f"layers.{self.facts.layers - 1}; load the base that it was trained on")


def ending(path: str, known: Iterable[str]) -> str | None:
    """The longest of `known` that is `path` or ends it after a dot; None also for the vision or audio part of a model."""
    parts = usual_name(path).split(".")
    for start in range(len(parts) if len(parts) <= 64 else 0):
        name = ".".join(parts[start:])
        if name in known:
            before = ".".join(parts[:start])
            # "layers.3.mlp.norm" of another model is not this one's last norm
            return None if _other_tower(before) or _LAYER.search(before) else name
    return None


def _other_tower(before: str) -> bool:
    return _OTHER_TOWER.search(before + ".") is not None


def _refuse_whole(path: str, name: str, facts: ModelFacts, file: Path) -> None:
    """A whole tensor acts by itself: one that has no place would be missed, unless it is of a part that the base is not."""
    if _other_tower(path):
        return
    module, _, end = path.rpartition(".")
    what = "has no place in the base, perhaps as a head for another task (modules_to_save)"
    if end == "bias" and ending(module, module_shapes(facts)):
        what = "is a trained bias of a module that has none in the base"
    elif ending(module, other_shapes(facts)):
        what = "is a whole linear that the base has fused or split (modules_to_save)"
    raise AdapterError(f"{file}: tensor {show(name, 160)} {what}; without it the adapter would act otherwise than trained, "
                       "so it is not loaded")


def _examples(names: Iterable[str]) -> str:
    """A few names, the numbers of layers left out, for a message."""
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name in names))
    return ", ".join(show(kind, 80) for kind in kinds[:4]) + (f" and {len(kinds) - 4} more kinds" if len(kinds) > 4 else "")
