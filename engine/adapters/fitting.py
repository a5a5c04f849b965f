"""Whether what an adapter file holds fits its config and the base: shapes, and nothing that is promised and missing. No torch."""
from __future__ import annotations

from collections.abc import Mapping

from ..models.facts import ModelFacts, module_shapes, tensor_shapes
from ..weights.files import show
from .config import LoraSettings
from .errors import AdapterError
from .file import AdapterFile
from .fused import other_shapes
from .keys import PairNames, WholeName
from .match import TOKEN_MODULES, Places

Shapes = Mapping[str, tuple[int, ...]]
_LOAD_ITS_BASE = "load the base that it was trained on"


def check_settings(file: AdapterFile, places: Places, facts: ModelFacts) -> None:
    """Raises AdapterError where config and tensors contradict each other, or the config asks for another base."""
    settings = file.settings
    if settings.replication and _repeats(settings.replication, facts.layers):
        raise AdapterError(f"{file.config_path}: layer_replication is {show(list(map(list, settings.replication)))}: it was trained on a "
                           f"stack with repeated layers, not the {facts.layers} layers of this base; not loaded")
    for pair in places.pairs.values():
        _check_part(file, pair, "use_dora", settings.dora, pair.magnitude, "magnitude vector (lora_magnitude_vector)")
        if not pair.embedding:
            _check_part(file, pair, "lora_bias", settings.lora_bias, pair.bias, "bias of lora_B")
    if settings.invocation and settings.by_config:
        _check_waiting(file, places)
    _check_wrapped_twice(file, places, facts)
    held = [path.rpartition(".")[0] for path in (*places.whole, *places.unmatched)]
    for name in settings.saved:
        # PEFT takes every module whose name ends so, with all that is inside
        if not any(f"{name}." in f"{module}." or name.endswith(f".{module}") for module in held):
            raise AdapterError(f"{file.weights_path}: modules_to_save lists {show(name)}, which the file does not hold; it is incomplete, "
                               "save or download it again")


def _check_waiting(file: AdapterFile, places: Places) -> None:
    """PEFT's aLoRA waits for its invocation with the LoRA of linears; what is trained whole beside it acts from the first token on."""
    trained = [whole.name for place, whole in places.whole.items() if _trained(place, whole, file.settings)]
    for name in (*trained, *places.rows.values()):
        raise AdapterError(f"{file.config_path}: alora_invocation_tokens beside the trained tensor {show(name, 160)}: in PEFT that acts "
                           "before the invocation too, here an adapter acts from its invocation on; not loaded, train it without "
                           "modules_to_save, bias and trainable_token_indices")


def _trained(place: str, whole: WholeName, settings: LoraSettings) -> bool:
    """Whether a whole tensor was trained, by what the config says, and is not what the base had at the time."""
    if place.endswith(".bias"):
        return settings.bias != "none" or not whole.copy
    return not whole.copy and (place.removesuffix(".weight") not in TOKEN_MODULES or any(map(whole.module.endswith, settings.saved)))


def _check_wrapped_twice(file: AdapterFile, places: Places, facts: ModelFacts) -> None:
    saved = {module for module in TOKEN_MODULES if any(name.rpartition(".")[2] == module for name in file.settings.saved)}
    if saved and facts.tied and file.settings.tying:
        saved = {*TOKEN_MODULES}
    if both := sorted(saved & places.rows.keys()):
        raise AdapterError(f"{file.config_path}: modules_to_save and trainable_token_indices both act on {both[0]}, "
                           "which PEFT saves and cannot run; train one of them")


def _repeats(replication: tuple[tuple[int, int], ...], layers: int) -> bool:
    """Whether the ranges, one after the other, are anything but the layers of the base in their order."""
    after = 0
    for first, end in replication:
        if first != after or end < first:
            return True
        after = end
    return after != layers


def vocabulary_rows(places: Places, shapes: Shapes, facts: ModelFacts) -> dict[str, int]:
    """"embed_tokens" and "lm_head" -> rows that they have with this adapter."""
    whole = {name: places.whole.get(f"{name}.weight") for name in TOKEN_MODULES}
    return {name: shapes[found.name][0] if found else facts.vocab for name, found in whole.items()}


def check_whole(file: AdapterFile, places: Places, shapes: Shapes, facts: ModelFacts) -> None:
    """Raises AdapterError for a whole tensor that is not honoured or has another shape than the base's."""
    expected = tensor_shapes(facts) | {"lm_head.weight": (facts.vocab, facts.hidden)}
    linears = {f"{module}.weight" for module in module_shapes(facts)} - {"lm_head.weight"}
    rows = set()
    for place, whole in places.whole.items():
        shape, base = shapes[whole.name], expected[place]
        if place in linears:
            raise AdapterError(f"{file.weights_path}: tensor {show(whole.name, 160)} is a whole linear (modules_to_save); whole "
                               "embed_tokens, lm_head, norms and biases are honoured, so it is not loaded")
        if place.removesuffix(".weight") in TOKEN_MODULES:
            rows.add(shape[0] if shape else 0)
            _check_vocabulary(file, whole.name, shape, base)
        elif shape != base:
            raise AdapterError(f"{file.weights_path}: tensor {show(whole.name, 160)} has shape {list(shape)}, in the base it has "
                               f"{list(base)} (shape mismatch); {_LOAD_ITS_BASE}")
    if len(rows) > 1:
        raise AdapterError(f"{file.weights_path}: its embedding and its lm_head have {' and '.join(map(str, sorted(rows)))} rows; they are "
                           "of two vocabularies, save the adapter again")


def check_pairs(file: AdapterFile, places: Places, shapes: Shapes, vocab: Mapping[str, int], facts: ModelFacts) -> None:
    """Raises AdapterError for a LoRA, its bias or its magnitude that is not of the base's shapes."""
    expected = module_shapes(facts) | other_shapes(facts) | {"lm_head": (vocab["lm_head"], facts.hidden)}
    for module, pair in places.pairs.items():
        outputs, inputs = expected[module] if module in expected else (facts.hidden, vocab["embed_tokens"])
        a, b = shapes[pair.a], shapes[pair.b]
        if len(a) == len(b) == 2 and (b[0], a[1]) != (outputs, inputs):
            raise AdapterError(f"{file.weights_path}: {show(pair.path, 160)} is for {a[1]} inputs and {b[0]} outputs, in the base that "
                               f"module has {inputs} and {outputs} (shape mismatch); {_LOAD_ITS_BASE}")
        for name in filter(None, (pair.bias, pair.magnitude)):
            if shapes[name] != (outputs,):
                raise AdapterError(f"{file.weights_path}: tensor {show(name, 160)} has shape {list(shapes[name])}, expected [{outputs}]; "
                                   f"{_LOAD_ITS_BASE}")
    for token in file.settings.invocation:
        if token >= max(vocab.values()):
            raise AdapterError(f"{file.config_path}: alora_invocation_tokens has the token {token}, the base's vocabulary ends "
                               f"at {max(vocab.values()) - 1}; {_LOAD_ITS_BASE}")


def _check_part(file: AdapterFile, pair: PairNames, field: str, wanted: bool | None, name: str, what: str) -> None:
    if wanted and not name:
        raise AdapterError(f"{file.weights_path}: {field} is true but {show(pair.path, 160)} has no {what}; "
                           "the file is incomplete, save or download it again")
    if wanted is False and name:
        raise AdapterError(f"{file.weights_path}: tensor {show(name, 160)} is a {what}, but the config does not set {field}; it is not "
                           "known which is right, set it in the config or save the adapter again")


def _check_vocabulary(file: AdapterFile, name: str, shape: tuple[int, ...], base: tuple[int, ...]) -> None:
    if len(shape) != 2 or shape[1] != base[1]:
        raise AdapterError(f"{file.weights_path}: tensor {show(name, 160)} has shape {list(shape)}, in the base it has {list(base)} "
                           f"(shape mismatch); {_LOAD_ITS_BASE}")
    if shape[0] < base[0]:
        raise AdapterError(f"{file.weights_path}: tensor {show(name, 160)} has {shape[0]} rows, fewer than the {base[0]} tokens of the "
                           f"base's vocabulary; {_LOAD_ITS_BASE}, with the vocabulary that it had then")
