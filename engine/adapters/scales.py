"""Effective scales of an adapter's modules, by its config. No torch."""
from __future__ import annotations

from collections.abc import Mapping

from ..weights.files import show
from .errors import AdapterError
from .file import AdapterFile
from .keys import PairNames
from .patterns import lookup, overlap


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


def pattern_notes(file: AdapterFile, matched: Mapping[str, PairNames]) -> list[str]:
    """Ranks are proved by the tensors; an alpha for which two patterns compete is not."""
    found = overlap(file.settings.alpha_pattern, [pair.path for pair in matched.values()], f"{file.config_path}: alpha_pattern")
    if found is None:
        return []
    name, first, other = found
    return [f"alpha_pattern {show(first)} and {show(other)} both match {show(name)}: the first in the file holds, as PEFT reads it; "
            "PEFT sorts patterns when it saves them, so training may have used the other"]
