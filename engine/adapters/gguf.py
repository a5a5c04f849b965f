"""Adapters in a GGUF file, as llama.cpp's convert_lora_to_gguf.py writes them. Headers only, no torch.

Keys: general.type "adapter", adapter.type "lora", general.architecture of the base, adapter.lora.alpha, and optionally
adapter.lora.task_name, adapter.lora.prompt_prefix, adapter.alora.invocation_tokens. Tensors: NAME.lora_a [r, d_in] and NAME.lora_b
[d_out, r], NAME being that of the base's tensor; rows of q and k lie as in GGUF bases; token_embd's lora_a is transposed, [vocab, r].
"""
from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from ..models.facts import ModelFacts
from ..models.names import gguf_layer_names, gguf_module
from ..weights.files import show
from ..weights.gguf import read_header
from .card import MAX_PREFIX, cut_metadata
from .config import LoraSettings, check_invocation
from .errors import AdapterError
from .file import AdapterFile
from .keys import PairNames, TensorNames, WholeName
from .peft import check_types

FORMAT = "GGUF"
TYPES = ("F32", "F16", "BF16", "Q8_0")
_EMBEDDING = "token_embd.weight"
_OF_THE_BASE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""tensors of the base that converters leave in an adapter"""
_MISTRAL = ("llama", "mistral3")
"""what converters call it, by their age; q and k are permuted in both"""
_ARCHITECTURES = {"mistral": _MISTRAL, "ministral": _MISTRAL, "mistral3": _MISTRAL, "gemma3_text": ("gemma3",)}
"""architecture of a base -> general.architecture of its adapters, where they differ"""


def open_gguf(path: Path) -> AdapterFile:
    """The adapter in the file `path`. Raises AdapterError, FormatError or OSError naming the key or tensor."""
    header = read_header(path)
    metadata = header.metadata
    _check_kind(metadata, path)
    check_types(header.tensors.values(), path, TYPES)
    names = _sort(header.tensors, path)
    notes = []
    alpha = _alpha(metadata.get("adapter.lora.alpha", 0.0), path)
    if alpha is None:
        notes.append("adapter.lora.alpha is absent or 0: the effective scale is 1, as llama.cpp reads it")
    if names.unused:
        notes.append(f"{', '.join(map(show, names.unused))} is a tensor of the base: not read, the loaded base's own is used")
    prefix = metadata.get("adapter.lora.prompt_prefix", "")
    if isinstance(prefix, str) and len(prefix) > MAX_PREFIX:
        notes.append(f"adapter.lora.prompt_prefix has {len(prefix):,} characters, more than the {MAX_PREFIX:,} that are offered: left out")
        prefix = ""
    settings = LoraSettings(
        r=None, alpha=alpha, invocation=_invocation(metadata, path),
        base_model=str(metadata.get("general.base_model.0.name") or metadata.get("general.base_model.0.repo_url") or "")[:300])
    return AdapterFile(
        path, path, path, FORMAT, settings, header.tensors, names, header.file_bytes, tuple(notes),
        architecture=str(metadata.get("general.architecture", ""))[:100], metadata=cut_metadata(metadata), metadata_keys=len(metadata),
        task=_text(metadata, "adapter.lora.task_name")[:300], prompt_prefix=prefix if isinstance(prefix, str) else "")


def canonical(names: TensorNames, architecture: str, facts: ModelFacts, path: Path) -> TensorNames:
    """`names` with the paths that the base's modules have. Raises AdapterError for an adapter of another architecture."""
    own = _ARCHITECTURES.get(facts.architecture, (facts.architecture,))
    if architecture not in own:
        raise AdapterError(f"{path}: is an adapter for the architecture {show(architecture)}, the base is {' or '.join(own)}; load "
                           "the base that it was trained on")
    in_layer = {name: module for module, name in gguf_layer_names(facts).items()}
    outside = {gguf_module(module, facts): module for module in ("embed_tokens", "norm", "lm_head")}

    def rename(path: str) -> str:
        found = re.fullmatch(r"blk\.(\d{1,9})\.(\w+)", path)
        return f"layers.{int(found[1])}.{in_layer[found[2]]}" if found and found[2] in in_layer else outside.get(path, path)

    return replace(
        names, pairs=tuple(replace(pair, path=rename(pair.path)) for pair in names.pairs),
        whole={f"{rename(key.rpartition('.')[0])}.weight": whole for key, whole in names.whole.items()})


def _check_kind(metadata: Mapping[str, Any], path: Path) -> None:
    kind = metadata.get("general.type")
    if kind != "adapter":
        raise AdapterError(f"{path}: general.type is {show(kind) if kind is not None else 'missing'}, of an adapter it is 'adapter'; "
                           "load a base as the base, or convert the adapter again")
    if metadata.get("adapter.type", "lora") != "lora":
        raise AdapterError(f"{path}: adapter.type is {show(metadata['adapter.type'])}; only lora is read")


def _alpha(value: Any, path: Path) -> float | None:
    if type(value) not in (int, float) or not abs(value) < 1e30 or not isfinite(value):
        raise AdapterError(f"{path}: adapter.lora.alpha is {show(value)}; a finite number is expected")
    return float(value) or None


def _invocation(metadata: Mapping[str, Any], path: Path) -> tuple[int, ...]:
    value = metadata.get("adapter.alora.invocation_tokens")
    if value is None:
        return ()
    return check_invocation(list(value) if hasattr(value, "__iter__") else value, f"{path}: adapter.alora.invocation_tokens")


def _text(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(key, "")
    return value if isinstance(value, str) else ""


def _sort(tensors: Mapping[str, Any], path: Path) -> TensorNames:
    """The tensors by what they are; paths are GGUF's names of modules ("blk.0.attn_q")."""
    halves: dict[str, dict[str, str]] = {}
    whole, unused = {}, []
    for name in sorted(tensors):
        base, _, half = name.rpartition(".")
        if half in ("lora_a", "lora_b"):
            halves.setdefault(base, {})[half] = name
        elif name in _OF_THE_BASE:
            unused.append(name)
        elif name.endswith("_norm.weight"):
            whole[name] = WholeName(name)
        else:
            raise AdapterError(f"{path}: tensor {show(name, 160)} is unexpected in an adapter, lora_a and lora_b of the base's tensors are "
                               "expected; convert the adapter again")
    if not halves and not whole:
        raise AdapterError(f"{path}: holds no tensors of an adapter (no lora_a, no lora_b); convert the adapter again")
    turned = frozenset({halves[_EMBEDDING]["lora_a"]}) if "lora_a" in halves.get(_EMBEDDING, {}) else frozenset()
    return TensorNames(tuple(_pair(base, found, path) for base, found in halves.items()), whole, unused=tuple(unused), turned=turned)


def _pair(base: str, found: Mapping[str, str], path: Path) -> PairNames:
    if len(found) < 2:
        half, name = next(iter(found.items()))
        raise AdapterError(f"{path}: has {show(name, 160)} but {'lora_b' if half == 'lora_a' else 'lora_a'} of the pair is missing; "
                           "the file is incomplete, convert or download it again")
    return PairNames(base.removesuffix(".weight"), found["lora_a"], found["lora_b"], embedding=base == _EMBEDDING)
