"""What the readers of config.json share: the sizes, the fields that would change the mathematics, the windows of layers. No torch."""
from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..weights.files import FormatError, show
from .facts import RopeScaling
from .fields import Fields
from .rope_facts import config_rope

COMMON = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""what transformers takes for a field that is missing, where an architecture has no default of its own"""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,), "is_encoder_decoder": (None, False), "add_cross_attention": (None, False),
    "partial_rotary_factor": (None, 1, 1.0), "num_local_experts": (None, 0, 1), "num_experts": (None, 0, 1), "n_routed_experts": (None, 0),
    "attention_multiplier": (None,), "embedding_multiplier": (None, 1, 1.0), "residual_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0), "query_pre_attn_scalar": (None,), "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_sliding_window": (None, False), "layer_types": (None,), "no_rope_layers": (None,), "no_rope_layer_interval": (None,),
    "use_bidirectional_attention": (None, False), "use_qk_norm": (None, False), "qk_layernorm": (None, False), "clip_qkv": (None,),
    "lm_head_bias": (None, False), "scale_emb": (None, 1, 1.0), "scale_depth": (None,), "alibi": (None, False), "text_config": (None,),
}
"""fields that change what a model computes -> the values with which they do not"""
_EXPERTS = "mixtures of experts are not supported, only models whose layers have one MLP are"
_WHY = {
    "quantization_config": "quantised safetensors are not supported; use the unquantised model or a GGUF of it",
    "num_local_experts": _EXPERTS, "num_experts": _EXPERTS, "n_routed_experts": _EXPERTS,
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
SLIDING, FULL = "sliding_attention", "full_attention"


def open_config(
    config: Mapping[str, Any], path: Path, defaults: Mapping[str, Any], classes: Collection[str], honours: Collection[str] = (),
) -> Fields:
    """The fields of a config.json over `defaults`.

    Raises FormatError for another class than `classes`, and for every field that would change the mathematics and is not among those that
    the architecture `honours`.
    """
    for key, allowed in _NEUTRAL.items():
        value = config.get(key)
        if key in honours or value in allowed or key == "layer_types" and isinstance(value, list) and all(item == FULL for item in value):
            continue
        raise FormatError(f"{path}: {key} is {show(value)}: {_WHY.get(key, f'only {show(allowed[-1])} is supported for this model')}")
    names = config.get("architectures") or []
    if not isinstance(names, list) or names and not any(name in classes for name in names):
        raise FormatError(f"{path}: architectures is {show(names)}; a language model ({', '.join(classes)}) is expected")
    return Fields(COMMON | dict(defaults) | dict(config), path)


def config_facts(
    config: Fields, architecture: str, rotary: int = 0, activation: tuple[str, str] = ("hidden_act", "silu"),
) -> dict[str, Any]:
    """The facts that all architectures state alike, RoPE with one base for all layers among them. `activation`: its field and default."""
    hidden, heads, context = config.count("hidden_size"), config.count("num_attention_heads"), config.count("max_position_embeddings")
    head_dim = head_size(config)
    rope = config_rope(config, rotary or head_dim, max(context, 1))
    return {
        "architecture": architecture, "layers": config.count("num_hidden_layers"), "hidden": hidden, "heads": heads,
        "kv_heads": config.count("num_key_value_heads", heads), "head_dim": head_dim, "intermediate": config.count("intermediate_size"),
        "vocab": config.count("vocab_size"), "context": context, "rms_eps": config.number("rms_norm_eps"), "rotary_dim": rotary,
        "rope_theta": rope.theta, "rope_scaling": rope.scaling, "tied": config.flag("tie_word_embeddings"),
        "activation": _activation(config, *activation), "notes": _notes(config, architecture, rope.scaling),
    }


def head_size(config: Fields) -> int:
    """head_dim, or hidden_size shared by the heads."""
    hidden, heads = config.count("hidden_size"), config.count("num_attention_heads")
    if heads <= 0:
        raise FormatError(f"{config.path}: num_attention_heads is {heads}; a model has at least one head")
    size = config.count("head_dim", 0) or (hidden // heads if hidden % heads == 0 else 0)
    if not size:
        raise FormatError(f"{config.path}: hidden_size {hidden} is not divisible by num_attention_heads {heads} and head_dim is missing")
    return size


def _activation(config: Fields, key: str, default: str) -> str:
    name = config.get(key, default)
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise config.error(key, name, f"{', '.join(_ACTIVATIONS)} are supported")
    return _ACTIVATIONS[name]


def _notes(config: Fields, architecture: str, scaling: RopeScaling | None) -> tuple[str, ...]:
    notes = []
    if config.get("auto_map"):
        notes.append(f"config.json names code in the folder (auto_map): it is never run, the model is computed as every "
                     f"{architecture} model")
    if scaling is not None and scaling.kind == "dynamic":
        notes.append(f"dynamic RoPE scaling acts beyond {scaling.original_context:,} tokens (max_position_embeddings), which is the "
                     "longest context here: the model computes as without it")
    return tuple(notes)


def windows(config: Fields, sliding: list[bool]) -> tuple[int, ...]:
    """The windows of layers by `layer_types`, or by `sliding` where the config has none; () when none is shorter than the context.

    Raises FormatError for other types of layers, and for sliding layers without a sliding_window.
    """
    types = layer_types(config) or [SLIDING if slides else FULL for slides in sliding]
    if len(types) != len(sliding) or any(kind not in (SLIDING, FULL) for kind in types):
        raise config.error("layer_types", types, f"{SLIDING} or {FULL} for each of {len(sliding)} layers is expected")
    if SLIDING not in types:
        return ()
    return clipped([config.count("sliding_window") if kind == SLIDING else 0 for kind in types], config)


def clipped(sizes: list[int], config: Fields, context: int = 0) -> tuple[int, ...]:
    """`sizes` with 0 for windows that no request outgrows."""
    if any(size < 0 for size in sizes):
        raise config.error("sliding_window", min(sizes), "a number of tokens is expected")
    context = context or config.count("max_position_embeddings")
    sizes = [0 if size >= context else size for size in sizes]
    return tuple(sizes) if any(sizes) else ()


def late_windows(config: Fields) -> tuple[int, ...]:
    """qwen's windows: with use_sliding_window, the layers from max_window_layers on."""
    used, count = config.flag("use_sliding_window"), bounded_layers(config)
    first = config.count("max_window_layers", 28)
    sliding = [used and config.get("sliding_window") is not None and layer >= first for layer in range(count)]
    refuse_unused_windows(config, used)
    return windows(config, sliding)


def refuse_unused_windows(config: Fields, used: bool) -> None:
    """Raises FormatError when `layer_types` has sliding layers though no window is `used`."""
    if not used and SLIDING in layer_types(config):
        raise config.error("layer_types", layer_types(config), "no sliding window is used: the two contradict each other")


def layer_types(config: Fields) -> list[Any]:
    """The field of that name; [] when it is missing."""
    types = config.get("layer_types", [])
    if not isinstance(types, list):
        raise config.error("layer_types", types, "a list with the type of each layer is expected")
    return types


def bounded_layers(config: Fields) -> int:
    """num_hidden_layers, small enough to make a list of; `validate` says what is wrong with a greater one."""
    return max(0, min(config.count("num_hidden_layers"), 1024))
