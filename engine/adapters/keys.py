"""Tensor names of adapter files: which module of the base each belongs to. No torch."""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..weights.files import show
from .errors import AdapterError

PREFIX = "base_model.model."
_COPY = ".base_layer.weight"
_KEY = re.compile(r"(?P<path>.+)\.lora_(?P<half>[AB])(?:\.(?P<adapter>[^.]+))?\.weight", re.DOTALL)
_OTHER_TOWER = re.compile(r"(?:^|\.)(?:vision|visual|audio|encoder|image)[^.]*\.")
"""prefixes of the parts of a multimodal model that are not its language model"""
_STRAY = (
    ("lora_embedding_", "a LoRA on the embedding"),
    ("lora_magnitude_vector", "the magnitude vector of DoRA"),
    ("lora_B.bias", "a bias on lora_B (lora_bias)"),
    ("embed_tokens", "a full copy of the embedding, perhaps with another vocabulary (modules_to_save)"),
    ("lm_head", "a full copy of lm_head, perhaps with another vocabulary (modules_to_save)"),
)


@dataclass(frozen=True, slots=True)
class PairNames:
    """The tensors of one module: `path` as PEFT named it (after `base_model.model.`), tensor names of A and B.

    `copy` names a copy of the module's base weight that PEFT saved beside them (it does so for lm_head), "" mostly.
    """

    path: str
    a: str
    b: str
    copy: str = ""


def pair_names(names: Iterable[str], file: Path) -> list[PairNames]:
    """The A/B pairs among the tensor names of `file`, by path.

    Raises AdapterError for a half without its other, a module named twice, and any tensor that is neither A nor B.
    """
    halves: dict[str, dict[str, str]] = {}
    copies: dict[str, str] = {}
    for name in sorted(names):
        match = _KEY.fullmatch(name)
        if match is None and name.endswith(_COPY):
            copies[name.removesuffix(_COPY).removeprefix(PREFIX)] = name
            continue
        if match is None:
            raise AdapterError(f"{file}: tensor {show(name, 160)} is {_what(name)}, not honoured yet; without it the adapter would act "
                               "otherwise than trained, so it is not loaded")
        found = halves.setdefault(match["path"].removeprefix(PREFIX), {})
        if match["half"] in found:
            raise AdapterError(f"{file}: tensors {show(found[match['half']], 160)} and {show(name, 160)} are the same half of one module; "
                               "save one adapter to a file")
        found[match["half"]] = name
    if not halves:
        raise AdapterError(f"{file}: holds no tensors; save the adapter again")
    for path, found in halves.items():
        if len(found) == 1:
            half, name = next(iter(found.items()))
            other = "B" if half == "A" else "A"
            raise AdapterError(f"{file}: module {show(path, 160)} has {show(name, 160)} but lora_{other} of the pair is missing; "
                               "the file is incomplete, save or download it again")
    if alone := copies.keys() - halves.keys():
        raise AdapterError(f"{file}: tensor {show(copies[min(alone)], 160)} is a full copy of a module without LoRA, not honoured yet")
    return [PairNames(path, found["A"], found["B"], copies.get(path, "")) for path, found in halves.items()]


def _what(name: str) -> str:
    return next((what for part, what in _STRAY if part in name), "neither lora_A nor lora_B of a linear")


def match_modules(
    pairs: Iterable[PairNames], modules: Mapping[str, object], layers: int, file: Path,
) -> tuple[dict[str, PairNames], list[str]]:
    """Pairs by the canonical module of the base whose name ends their path, and the paths that end in none.

    Raises AdapterError for two paths with one module, for a layer beyond the base's, and when nothing matches.
    """
    matched: dict[str, PairNames] = {}
    unmatched: list[str] = []
    kinds = {module.split(".", 2)[2] for module in modules if module.startswith("layers.")}
    for pair in pairs:
        module = _module_of(pair.path, modules)
        if module is None:
            _refuse_layer_beyond(pair.path, kinds, layers, file)
            unmatched.append(pair.path)
        elif module in matched:
            raise AdapterError(f"{file}: {show(matched[module].path, 160)} and {show(pair.path, 160)} both name the module {module} "
                               "of the base; it is ambiguous which to use")
        else:
            matched[module] = pair
    if not matched:
        raise AdapterError(f"{file}: no module of it matches the base (0/{len(unmatched)}): the file has {_examples(unmatched)}, "
                           f"the base has {_examples(modules)}; load the base that it was trained on")
    return matched, unmatched


def _module_of(path: str, modules: Mapping[str, object]) -> str | None:
    """The longest module name that is `path` or ends it after a dot; None also for the vision or audio part of a model."""
    parts = path.split(".")
    for start in range(len(parts) if len(parts) <= 64 else 0):
        name = ".".join(parts[start:])
        if name in modules:
            return None if _OTHER_TOWER.search(".".join(parts[:start]) + ".") else name
    return None


def _refuse_layer_beyond(path: str, kinds: set[str], layers: int, file: Path) -> None:
    found = re.search(r"(?:^|\.)layers\.(\d{1,9})\.(.+)\Z", path)
    if found and found[2] in kinds and int(found[1]) >= layers and not _OTHER_TOWER.search(path[:found.start()] + "."):
        raise AdapterError(f"{file}: has deltas for layers.{int(found[1])}, the base has layers.0 to layers.{layers - 1}; "
                           "load the base that it was trained on")


def _examples(names: Iterable[str]) -> str:
    """A few names, the numbers of layers left out, for a message."""
    kinds = list(dict.fromkeys(re.sub(r"\.\d+\.", ".N.", name) for name in names))
    return ", ".join(show(kind, 80) for kind in kinds[:4]) + (f" and {len(kinds) - 4} more kinds" if len(kinds) > 4 else "")
