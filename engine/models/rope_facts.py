"""RoPE of a model out of config.json and out of GGUF metadata. No torch.

config.json: `rope_parameters` of newer files, `rope_scaling` with `rope_theta` beside it of older ones, as transformers reads both.
GGUF: `<architecture>.rope.*`, and the tensors rope_freqs, rope_factors_long, rope_factors_short.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ..weights.files import FormatError, show
from .facts import Rope, RopeScaling
from .fields import Fields

_CHANGES_MORE = ("llama_4_scaling_beta", "mrope_section", "mrope_interleaved", "alpha", "extrapolation_factor")
"""fields of RoPE parameters that change what no fact here describes"""


def config_rope(config: Fields, rotary: int, context: int) -> Rope:
    """The one RoPE of a config.json; `rotary` dimensions of a head turn. Raises FormatError for kinds and fields that are not supported."""
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise FormatError(f"{config.path}: the RoPE parameters are {show(given)}, an object is expected")
    original = config.get("original_max_position_embeddings")
    beside = {"rope_theta": config.get("rope_theta")} | {key: value for key, value in given.items() if value is not None}
    return rope_of(beside if original is None else beside | {"original_max_position_embeddings": original}, config, rotary, context)


def rope_of(given: Mapping[str, Any], config: Fields, rotary: int, context: int) -> Rope:
    """The RoPE that an object of parameters states, its theta among them."""
    nested = next((key for key, value in given.items() if isinstance(value, dict)), None)
    changed = next((key for key in _CHANGES_MORE if given.get(key) not in (None, False)), nested)
    if changed is not None:
        raise FormatError(f"{config.path}: the RoPE parameters have {show(changed)} {show(given[changed])}, which is not supported "
                          "for this model")
    source = Fields(given, config.path)
    kind = given.get("rope_type", given.get("type", "default"))
    if not isinstance(kind, str) or kind not in CONFIG_KINDS:
        raise FormatError(f"{config.path}: RoPE scaling of kind {show(kind)} is not supported; {', '.join(CONFIG_KINDS)} are")
    return Rope(source.positive("rope_theta", 10000.0), CONFIG_KINDS[kind](source, rotary, context))


def _linear(source: Fields, rotary: int, context: int) -> RopeScaling:
    return RopeScaling("linear", _factor(source))


def _dynamic(source: Fields, rotary: int, context: int) -> RopeScaling:
    return RopeScaling("dynamic", _factor(source), original_context=context)


def _llama3(source: Fields, rotary: int, context: int) -> RopeScaling:
    low, high = source.number("low_freq_factor"), source.number("high_freq_factor")
    original = _original(source, context)
    if not 0 < low < high:
        raise FormatError(f"{source.path}: llama3 RoPE scaling needs 0 < low_freq_factor < high_freq_factor, got {low} and {high}")
    return RopeScaling("llama3", _factor(source), low, high, original)


def _yarn(source: Fields, rotary: int, context: int) -> RopeScaling:
    original = _original(source, context)
    factor = _factor(source, context / original)
    mscale, all_dims = source.at_least_0("mscale", 0.0), source.at_least_0("mscale_all_dim", 0.0)
    implied = magnitude(factor, mscale) / magnitude(factor, all_dims) if mscale and all_dims else magnitude(factor)
    return RopeScaling(
        "yarn", factor, original_context=original, attention_factor=source.positive("attention_factor", implied),
        beta_fast=source.at_least_0("beta_fast", 0.0) or 32.0, beta_slow=source.at_least_0("beta_slow", 0.0) or 1.0,
        truncate=source.flag("truncate", True))


def _longrope(source: Fields, rotary: int, context: int) -> RopeScaling:
    original = _original(source, context)
    factor = _factor(source, context / original)
    implied = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return RopeScaling(
        "longrope", factor, original_context=original, attention_factor=source.positive("attention_factor", implied),
        short_factors=source.numbers("short_factor", rotary // 2), long_factors=source.numbers("long_factor", rotary // 2))


CONFIG_KINDS: dict[str, Callable[[Fields, int, int], RopeScaling | None]] = {
    "default": lambda source, rotary, context: None, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn,
    "longrope": _longrope, "su": _longrope,
}
"""rope_type (older files: type) -> its reader; "su" is what longrope was called first"""


def magnitude(factor: float, scale: float = 1.0) -> float:
    """What yarn multiplies cos and sin with for a context `factor` times as long."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _factor(source: Fields, default: float | None = None) -> float:
    factor = source.positive("factor", default)
    if factor >= 1e6:
        raise source.error("factor", factor, "a RoPE scaling factor is smaller")
    return factor


def _original(source: Fields, context: int) -> int:
    return _tokens(source, "original_max_position_embeddings", context)


def gguf_rope(source: Fields, tensors: Collection[str], context: int) -> Rope:
    """The RoPE of a GGUF; a window's own base is not part of it. Raises FormatError naming the key that is not supported."""
    for key in ("rope.scaling.alpha", "rope.dimension_sections", "rope.dimension_count_swa"):
        if source.get(key):
            raise source.error(key, source.get(key), "which is not supported")
    theta = source.positive("rope.freq_base", 10000.0)
    kind = source.get("rope.scaling.type", "linear")
    factor = source.number("rope.scaling.factor", source.number("rope.scale_linear", 0.0)) or 1.0
    if "rope_factors_long.weight" in tensors and kind in ("none", "linear", "longrope") and factor == 1.0:
        original = _gguf_original(source, context)
        return Rope(theta, RopeScaling("longrope", 1.0, original_context=original, attention_factor=_gguf_attention(source)))
    if kind == "linear" and factor != 1.0:
        return Rope(theta, RopeScaling("linear", _gguf_factor(source, factor)))
    if kind == "yarn":
        return Rope(theta, _gguf_yarn(source, _gguf_factor(source, factor), context))
    if kind not in ("none", "linear"):
        raise source.error("rope.scaling.type", kind, "which is not supported here; none, linear, yarn and longrope with its factors are, "
                           "and llama3's by rope_freqs.weight")
    return Rope(theta)


def _gguf_yarn(source: Fields, factor: float, context: int) -> RopeScaling:
    """As llama.cpp computes it, which passes over rope.scaling.yarn_attn_factor: converters copy a field there that transformers does
    not read either."""
    if source.number("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise source.error("rope.scaling.yarn_ext_factor", source.get("rope.scaling.yarn_ext_factor"), "only 1 is supported")
    log_multiplier = source.at_least_0("rope.scaling.yarn_log_multiplier", 0.0)
    implied = magnitude(factor) / magnitude(factor, log_multiplier) if log_multiplier else magnitude(factor)
    return RopeScaling(
        "yarn", factor, original_context=_gguf_original(source, context),
        attention_factor=implied * _gguf_attention(source),
        beta_fast=source.positive("rope.scaling.yarn_beta_fast", 32.0), beta_slow=source.positive("rope.scaling.yarn_beta_slow", 1.0))


def _gguf_attention(source: Fields) -> float:
    return source.positive("rope.scaling.attn_factor", 1.0)


def _gguf_original(source: Fields, context: int) -> int:
    return _tokens(source, "rope.scaling.original_context_length", context)


def _tokens(source: Fields, key: str, default: int) -> int:
    tokens = source.count(key, default)
    if not 0 < tokens <= 1 << 31:
        raise source.error(key, tokens, "a positive number of tokens is expected")
    return tokens


def _gguf_factor(source: Fields, factor: float) -> float:
    if not 0 < factor < 1e6:
        raise source.error("rope.scaling.factor", factor, "a positive number is expected")
    return factor
