"""Effective scales of an adapter's modules, by its config. No torch."""
from __future__ import annotations

from collections.abc import Mapping

from ..weights.files import show
from .config import LoraSettings
from .errors import AdapterError
from .file import AdapterFile
from .keys import PairNames
from .patterns import ends_in, lookup, overlap


def effective_scales(file: AdapterFile, pairs: Mapping[str, PairNames], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
    """Effective scale by the keys of `pairs`. Raises AdapterError when a rank in the file is not what the config says."""
    settings = file.settings
    paths = _pattern_paths(pairs, settings)
    ranks = lookup(settings.rank_pattern, paths, settings.r, f"{file.config_path}: rank_pattern")
    alphas = lookup(settings.alpha_pattern, paths, settings.alpha, f"{file.config_path}: alpha_pattern")
    scalings = {}
    for (module, pair), rank, alpha in zip(pairs.items(), ranks, alphas, strict=True):
        scalings[module] = settings.scaling(alpha, _rank(file, pair, rank, shapes))
    return scalings


def pattern_notes(file: AdapterFile, pairs: Mapping[str, PairNames]) -> list[str]:
    """Ranks are proved by the tensors; an alpha for which two patterns compete is not."""
    paths = _pattern_paths(pairs, file.settings)
    found = overlap(file.settings.alpha_pattern, paths, f"{file.config_path}: alpha_pattern")
    if found is None:
        return []
    name, first, other = found
    return [f"alpha_pattern {show(first)} and {show(other)} both match {show(name)}: the first in the file holds, as PEFT reads it; "
            "PEFT sorts patterns when it saves them, so training may have used the other"]


def _pattern_paths(pairs: Mapping[str, PairNames], settings: LoraSettings) -> list[str]:
    """What PEFT matches patterns with: the name of a module, or of the parameter where target_parameters chose it."""
    parameters = frozenset(settings.parameters)
    return [f"{pair.path}.weight" if ends_in(f"{pair.path}.weight", parameters) else pair.path for pair in pairs.values()]


def _rank(file: AdapterFile, pair: PairNames, expected: int | None, shapes: Mapping[str, tuple[int, ...]]) -> int:
    a, b = shapes[pair.a], shapes[pair.b]
    rank = expected if expected is not None else a[0] if a else 0
    where = "the config gives it" if expected is not None else f"{show(pair.a, 160)} has"
    for name, shape, axis in ((pair.a, a, 0), (pair.b, b, 1)):
        if len(shape) != 2 or shape[axis] != rank or not rank:
            raise AdapterError(f"{file.weights_path}: tensor {show(name, 160)} has shape {list(shape)}, {where} rank {rank} "
                               f"(A [{rank}, inputs], B [outputs, {rank}]); the tensors are transposed, "
                               "or the config and the weights do not belong together")
    return rank
