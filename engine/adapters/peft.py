"""Adapters as PEFT saves them: `adapter_config.json` beside `adapter_model.safetensors` or `.bin`.

`open_adapter` reads headers only and needs no torch; `load_adapter` reads the tensors and checks them against a base.
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..weights.entry import TensorEntry
from ..weights.files import open_regular, show
from ..weights.safetensors import read_header
from .config import read_settings
from .errors import AdapterError
from .file import AdapterFile
from .keys import PairNames, match_modules, pair_names
from .patterns import lookup, overlap

if TYPE_CHECKING:
    from ..models.facts import ModelFacts
    from .adapter import Adapter
    from .tensors import Advance

CONFIG = "adapter_config.json"
SAFETENSORS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
FLOATS = ("F32", "F16", "BF16", "F64")


def open_adapter(path: str | os.PathLike[str]) -> AdapterFile:
    """The adapter in the folder `path`, or the one that the file `path` (config or weights) belongs to.

    Raises AdapterError, FormatError or OSError with a sentence that names the file.
    """
    given = Path(os.path.expanduser(path))
    folder, weights = _locate(given)
    settings = read_settings(folder / CONFIG)
    notes = list(settings.notes)
    if weights is None:
        weights = _weights_in(folder)
        if weights.name == SAFETENSORS and os.path.lexists(folder / PICKLE):
            notes.append(f"{SAFETENSORS} is used; {PICKLE} beside it is not read")
    if weights.suffix == ".safetensors":
        header = read_header(weights)
        entries = header.tensors
        _check_entries(entries, weights)
        pair_names(entries, weights)
        return AdapterFile(given, folder / CONFIG, weights, "PEFT safetensors", settings, entries, header.file_bytes, tuple(notes))
    with open_regular(weights) as stream:
        size = os.fstat(stream.fileno()).st_size
    return AdapterFile(given, folder / CONFIG, weights, "PEFT bin", settings, None, size, tuple(notes))


def load_adapter(file: AdapterFile, facts: ModelFacts, name: str, advance: Advance = lambda count: None) -> Adapter:
    """Read the tensors of `file` into RAM and fit them to the base `facts`. Errors as of `open_adapter`.

    `advance` is told the bytes of every piece that was read; what it raises ends the load.
    """
    from ..models.facts import module_shapes
    from .adapter import Adapter, AdapterWeights
    from .describe import describe
    from .tensors import read_pairs

    modules = module_shapes(facts)
    _check_invocation(file, facts.vocab)
    source = read_pairs(file, advance)
    pairs = pair_names(source.names, file.weights_path)
    matched, unmatched = match_modules(pairs, modules, facts.layers, file.weights_path)
    scalings = effective_scales(file, matched, source.shapes)
    loaded = {}
    for module, pair in sorted(matched.items()):
        _check_shape(file, source.shapes, modules[module], pair)
        loaded[module] = source.read(pair, scalings[module])
    weights = AdapterWeights(loaded)
    return Adapter(describe(file, name, weights, unmatched, pairs, facts, _pattern_notes(file, matched)), weights)


def _locate(given: Path) -> tuple[Path, Path | None]:
    """The folder of an adapter, and its weights when `given` names them."""
    if not os.path.lexists(given):
        raise AdapterError(f"{given}: no such file or folder (adapters are local, nothing is fetched); give the path of a PEFT adapter")
    if given.is_dir():
        folder, weights = given, None
    elif given.name == CONFIG:
        folder, weights = given.parent, None
    elif given.suffix in (".safetensors", ".bin"):
        folder, weights = given.parent, given
    else:
        raise AdapterError(f"{given}: is no PEFT adapter; give a folder with {CONFIG} and {SAFETENSORS}, or one of these files"
                           + (" (GGUF adapters are not read yet)" if given.suffix == ".gguf" else ""))
    if not os.path.lexists(folder / CONFIG):
        raise AdapterError(f"{folder}: has no {CONFIG}{_what_else(folder)}; give the folder that PEFT saved the adapter to")
    return folder, weights


def _what_else(folder: Path) -> str:
    if os.path.lexists(folder / "adapters.safetensors"):
        return " (it looks like an MLX adapter, a format that is not read yet)"
    if os.path.lexists(folder / "config.json"):
        return " (it looks like a base model: load it as the base)"
    return ""


def _weights_in(folder: Path) -> Path:
    for name in (SAFETENSORS, PICKLE):
        if os.path.lexists(folder / name):
            return folder / name
    raise AdapterError(f"{folder}: has {CONFIG} but neither {SAFETENSORS} nor {PICKLE}{_what_else(folder)}; the weights are missing, "
                       "save or download them again")


def _check_entries(entries: Mapping[str, TensorEntry], weights: Path) -> None:
    for entry in entries.values():
        if entry.type not in FLOATS:
            raise AdapterError(f"{weights}: tensor {show(entry.name, 160)} has dtype {entry.type}; the weights of an adapter are "
                               "F32, F16 or BF16, save it again in one of these")


def _check_invocation(file: AdapterFile, vocab: int) -> None:
    for token in file.settings.invocation:
        if token >= vocab:
            raise AdapterError(f"{file.config_path}: alora_invocation_tokens has the token {token}, the base's vocabulary ends "
                               f"at {vocab - 1}; load the base that it was trained on")


def effective_scales(file: AdapterFile, pairs: Mapping[str, PairNames], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
    """Effective scale by the keys of `pairs`. Raises AdapterError when a rank in the file is not what the config says."""
    settings = file.settings
    paths = [pair.path for pair in pairs.values()]
    ranks = lookup(settings.rank_pattern, paths, settings.r, f"{file.config_path}: rank_pattern")
    alphas = lookup(settings.alpha_pattern, paths, settings.alpha, f"{file.config_path}: alpha_pattern")
    scalings = {}
    for (module, pair), rank, alpha in zip(pairs.items(), ranks, alphas, strict=True):
        for name, axis in ((pair.a, 0), (pair.b, 1)):
            shape = shapes[name]
            if len(shape) != 2 or shape[axis] != rank:
                raise AdapterError(f"{file.weights_path}: tensor {show(name, 160)} has shape {list(shape)}, the config gives it "
                                   f"rank {rank} (lora_A [{rank}, inputs], lora_B [outputs, {rank}]); the config and the weights do not "
                                   "belong together")
        scalings[module] = settings.scaling(alpha, rank)
    return scalings


def _pattern_notes(file: AdapterFile, matched: Mapping[str, PairNames]) -> list[str]:
    """Ranks are proved by the tensors; an alpha for which two patterns compete is not."""
    found = overlap(file.settings.alpha_pattern, [pair.path for pair in matched.values()], f"{file.config_path}: alpha_pattern")
    if found is None:
        return []
    name, first, other = found
    return [f"alpha_pattern {show(first)} and {show(other)} both match {show(name)}: the first in the file holds, as PEFT reads it; "
            "PEFT sorts patterns when it saves them, so training may have used the other"]


def _check_shape(file: AdapterFile, shapes: Mapping[str, tuple[int, ...]], base: tuple[int, int], pair: PairNames) -> None:
    outputs, inputs = shapes[pair.b][0], shapes[pair.a][1]
    if (outputs, inputs) != base:
        raise AdapterError(f"{file.weights_path}: {show(pair.path, 160)} is for a linear of {inputs} inputs and {outputs} outputs, "
                           f"in the base that module has {base[1]} and {base[0]} (shape mismatch); load the base that it was trained on")
    if pair.copy and shapes[pair.copy] != base:
        raise AdapterError(f"{file.weights_path}: {show(pair.copy, 160)} has shape {list(shapes[pair.copy])}, in the base that "
                           f"module has {list(base)}; load the base that it was trained on")
