"""Tensor names of adapter files: what each tensor is, and of which module. No torch."""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ..weights.files import show
from .errors import AdapterError

PREFIX = "base_model.model."
Value = TypeVar("Value")

_ADAPTER = r"(?:\.(?!weight\Z|bias\Z)[^.]+)?"
"""the name that the adapter had in PEFT, where a file keeps it"""
_ENDINGS = {
    "lora_A": rf"lora_A{_ADAPTER}\.weight",
    "lora_B": rf"lora_B{_ADAPTER}\.weight",
    "lora_B.bias": rf"lora_B{_ADAPTER}\.bias",
    "lora_embedding_A": rf"lora_embedding_A{_ADAPTER}",
    "lora_embedding_B": rf"lora_embedding_B{_ADAPTER}",
    "lora_magnitude_vector": rf"lora_magnitude_vector{_ADAPTER}(?:\.weight)?",
    "rows": rf"token_adapter\.trainable_tokens_delta{_ADAPTER}",
    "unused": r"original_module\.(?:weight|bias)",
    "copy": r"(?:token_adapter\.)?base_layer\.(?P<end>weight|bias)",
    "saved": rf"modules_to_save{_ADAPTER}\.(?P<end>weight|bias)",
    "whole": r"(?P<end>weight|bias)",
}
"""what follows the path of a module, by the kind of tensor; the first that fits"""
_KINDS = tuple((kind, re.compile(rf"(?P<path>.+?)\.{ending}", re.DOTALL)) for kind, ending in _ENDINGS.items())
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""what torch.compile, FSDP and activation checkpointing leave in the names of what they wrap"""


@dataclass(frozen=True, slots=True)
class PairNames:
    """The tensors of one LoRA: `path` of its module as PEFT named it (after `base_model.model.`), the names of A and B.

    `bias` (of lora_B) and `magnitude` (DoRA) are "" where there is none. `embedding`: A [r, rows of the embedding], B [width, r].
    """

    path: str
    a: str
    b: str
    bias: str = ""
    magnitude: str = ""
    embedding: bool = False


@dataclass(frozen=True, slots=True)
class WholeName:
    """A tensor that stands in the place of one of the base.

    `module`: path of its module. `copy`: saved as the base's own below what PEFT wrapped it in. `saved`: its name says modules_to_save.
    """

    name: str
    module: str = ""
    copy: bool = False
    saved: bool = False


@dataclass(frozen=True, slots=True)
class TensorNames:
    """What the tensors of a file are. `whole` by the path of the tensor ("model.norm.weight"), `rows` by that of the module."""

    pairs: tuple[PairNames, ...]
    whole: Mapping[str, WholeName] = field(default_factory=dict)
    rows: Mapping[str, str] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    """tensors that have no effect: what the base had where a whole tensor stands"""
    turned: frozenset[str] = frozenset()
    """names of the tensors that the file holds transposed"""


def sort_names(names: Iterable[str], file: Path) -> TensorNames:
    """The tensor names of a file that PEFT wrote, by what they are.

    Raises AdapterError for half a pair, a module named twice, a tensor of another kind, and a file without any.
    """
    parts: dict[str, dict[str, str]] = {}
    whole: dict[str, WholeName] = {}
    saved: dict[str, WholeName] = {}
    rows: dict[str, str] = {}
    unused = []
    for name in sorted(names):
        kind, path, end = _parse(name, file)
        if kind in ("copy", "whole"):
            _put(whole, f"{path}.{end}", WholeName(name, path, copy=kind == "copy"), name, file)
        elif kind == "saved":
            _put(saved, f"{path}.{end}", WholeName(name, path, saved=True), name, file)
        elif kind == "rows":
            _put(rows, path, name, name, file)
        elif kind == "unused":
            unused.append(name)
        else:
            _put(parts.setdefault(path, {}), kind, name, name, file)
    # with save_embedding_layers PEFT writes the same tensor under both names
    unused += [saved[place].name for place in saved.keys() & whole.keys()]
    whole = saved | whole
    if not parts and not whole and not rows:
        raise AdapterError(f"{file}: holds no tensors; save the adapter again")
    return TensorNames(tuple(_pair(path, found, file) for path, found in parts.items()), whole, rows, tuple(unused))


def _parse(name: str, file: Path) -> tuple[str, str, str]:
    """(kind, path of the module, "weight" or "bias" of whole tensors)"""
    for kind, pattern in _KINDS:
        if match := pattern.fullmatch(name):
            path = _WRAPPERS.sub("", match["path"])
            path = path.partition(PREFIX)[2] or path
            # a module may be wrapped twice: trained rows of tokens around what modules_to_save names
            return kind, path.removesuffix(".base_layer").removesuffix(".token_adapter"), match.groupdict().get("end", "")
    raise AdapterError(f"{file}: tensor {show(name, 160)} is neither lora_A nor lora_B of a module, nor any other that PEFT saves with a "
                       "LoRA; without it the adapter would act otherwise than trained, so it is not loaded")


def _put(places: dict[str, Value], key: str, value: Value, name: str, file: Path) -> None:
    if key in places:
        other = places[key]
        raise AdapterError(f"{file}: tensors {show(other.name if isinstance(other, WholeName) else other, 160)} and {show(name, 160)} are "
                           "the same of one module; save one adapter to a file")
    places[key] = value


def _pair(path: str, found: Mapping[str, str], file: Path) -> PairNames:
    embedding = "lora_embedding_A" in found or "lora_embedding_B" in found
    a, b = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
    for half, other in ((a, b), (b, a)):
        if half not in found:
            has = found.get(other) or next(iter(found.values()))
            raise AdapterError(f"{file}: module {show(path, 160)} has {show(has, 160)} but {half} of the pair is missing; "
                               "the file is incomplete, save or download it again")
    if embedding and (mixed := found.keys() - {a, b, "lora_magnitude_vector"}):
        raise AdapterError(f"{file}: module {show(path, 160)} has {show(found[min(mixed)], 160)} beside a LoRA of an embedding; "
                           "it is ambiguous what the module is, save one adapter to a file")
    return PairNames(path, found[a], found[b], found.get("lora_B.bias", ""), found.get("lora_magnitude_vector", ""), embedding)
