"""The tensors of an adapter file, read and fitted to a base."""
from __future__ import annotations

from collections.abc import Mapping

from ..models.facts import ModelFacts, module_shapes
from ..weights.files import show
from .adapter import Adapter, AdapterWeights
from .describe import describe
from .errors import AdapterError
from .file import AdapterFile
from .keys import PairNames, match_modules, pair_names
from .scales import effective_scales, pattern_notes
from .tensors import Advance, read_pairs


def load_adapter(file: AdapterFile, facts: ModelFacts, name: str, advance: Advance = lambda count: None) -> Adapter:
    """Read the tensors of `file` into RAM and fit them to the base `facts`. Errors as of `open_adapter`.

    `advance` is told the bytes of every piece that was read; what it raises ends the load.
    """
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
    return Adapter(describe(file, name, weights, unmatched, pairs, facts, pattern_notes(file, matched)), weights)


def _check_invocation(file: AdapterFile, vocab: int) -> None:
    for token in file.settings.invocation:
        if token >= vocab:
            raise AdapterError(f"{file.config_path}: alora_invocation_tokens has the token {token}, the base's vocabulary ends "
                               f"at {vocab - 1}; load the base that it was trained on")


def _check_shape(file: AdapterFile, shapes: Mapping[str, tuple[int, ...]], base: tuple[int, int], pair: PairNames) -> None:
    outputs, inputs = shapes[pair.b][0], shapes[pair.a][1]
    if (outputs, inputs) != base:
        raise AdapterError(f"{file.weights_path}: {show(pair.path, 160)} is for a linear of {inputs} inputs and {outputs} outputs, "
                           f"in the base that module has {base[1]} and {base[0]} (shape mismatch); load the base that it was trained on")
    if pair.copy and shapes[pair.copy] != base:
        raise AdapterError(f"{file.weights_path}: {show(pair.copy, 160)} has shape {list(shapes[pair.copy])}, in the base that "
                           f"module has {list(base)}; load the base that it was trained on")
