"""Facts of llama models out of GGUF metadata and out of config.json."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..weights.entry import TensorEntry
from ..weights.files import FormatError, show
from .facts import ModelFacts, RopeScaling, validate

_GGUF_MUST_BE_ABSENT = ("attention.sliding_window", "expert_count", "attention.clamp_kqv", "attention.scale", "logit_scale", "residual_scale",
                        "embedding_scale", "attention.alibi_bias_max")
"""keys that change the mathematics when they are not 0; a plain llama has none"""
_CONFIG_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"), "partial_rotary_factor": (None, 1, 1.0), "num_local_experts": (None, 0, 1),
    "quantization_config": (None,), "auto_map": (None,), "is_encoder_decoder": (None, False),
}
"""fields of config.json that must have one of these values"""
_MISTRAL_WINDOW = 4096
"""what transformers takes for mistral when config.json names no sliding window"""
_CONFIG_WHY = {
    "quantization_config": "quantised safetensors are not supported; use the unquantised model or a GGUF of it",
    "auto_map": "custom code in a model folder is never run; use a model that needs none",
}


def facts_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, TensorEntry], path: Path) -> ModelFacts:
    """Facts of a GGUF of architecture "llama". Raises FormatError naming the key that is missing, wrong or not supported."""
    source = _Fields(metadata, path, "llama.")
    for key in _GGUF_MUST_BE_ABSENT:
        if metadata.get(f"llama.{key}"):
            raise FormatError(f"{path}: metadata llama.{key} is {show(metadata[f'llama.{key}'])}, which is not supported; a plain llama has 0 there")
    hidden, heads = source.count("embedding_length"), source.count("attention.head_count")
    head_dim = source.count("attention.key_length", hidden // heads if heads and hidden % heads == 0 else 0)
    if not head_dim:
        raise FormatError(f"{path}: llama.embedding_length {hidden} is not divisible by llama.attention.head_count {heads} "
                          "and llama.attention.key_length is missing; the file is corrupt")
    for key in ("attention.value_length", "rope.dimension_count"):
        if source.count(key, head_dim) != head_dim:
            raise FormatError(f"{path}: metadata llama.{key} is {source.count(key)} and the head dimension {head_dim}; only equal ones are supported")
    embedding = tensors.get("token_embd.weight")
    vocab = embedding.shape[0] if embedding and len(embedding.shape) == 2 else source.count("vocab_size")
    return validate(ModelFacts(
        architecture="llama", layers=source.count("block_count"), hidden=hidden, heads=heads,
        kv_heads=source.count("attention.head_count_kv", heads), head_dim=head_dim, intermediate=source.count("feed_forward_length"),
        vocab=vocab, context=source.count("context_length"),
        rms_eps=source.number("attention.layer_norm_rms_epsilon"), rope_theta=source.number("rope.freq_base", 10000.0),
        rope_scaling=_gguf_scaling(source), rope_freq_factors="rope_freqs.weight" in tensors, tied="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors, output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
    ), path)


def facts_from_config(config: Mapping[str, Any], path: Path) -> ModelFacts:
    """Facts out of config.json of model_type "llama", or "mistral" without a sliding window, as older and newer libraries write it.

    Raises FormatError naming the field that is missing, wrong or not supported.
    """
    _refuse_config(config, path)
    source = _Fields(config, path, "")
    hidden, heads = source.count("hidden_size"), source.count("num_attention_heads")
    if heads == 0:
        raise FormatError(f"{path}: num_attention_heads is 0; a model has at least one head")
    context = source.count("max_position_embeddings", 2048)
    rope = _config_rope(config, path)
    head_dim = source.count("head_dim", 0) or (hidden // heads if hidden % heads == 0 else 0)
    if not head_dim:
        raise FormatError(f"{path}: hidden_size {hidden} is not divisible by num_attention_heads {heads} and head_dim is missing")
    mistral = config.get("model_type") == "mistral"
    return validate(ModelFacts(
        architecture=str(config["model_type"]), layers=source.count("num_hidden_layers"), hidden=hidden, heads=heads,
        kv_heads=source.count("num_key_value_heads", 8 if mistral else heads), head_dim=head_dim,
        intermediate=source.count("intermediate_size"), vocab=source.count("vocab_size"), context=context,
        rms_eps=source.number("rms_norm_eps", 1e-6), rope_theta=_Fields(rope, path, "").number("rope_theta", 10000.0),
        rope_scaling=_config_scaling(rope, context, path), tied=source.flag("tie_word_embeddings"),
        attention_bias=not mistral and source.flag("attention_bias"), output_bias=not mistral and source.flag("attention_bias"),
        mlp_bias=not mistral and source.flag("mlp_bias"),
    ), path)


class _Fields:
    """Typed look-ups in a mapping that nobody vouches for."""

    def __init__(self, fields: Mapping[str, Any], path: Path, prefix: str) -> None:
        self.fields, self.path, self.prefix = fields, path, prefix

    def count(self, key: str, default: int | None = None) -> int:
        value = self._get(key, default)
        if type(value) is not int:
            raise FormatError(f"{self.path}: {self.prefix}{key} is {show(value)}, a whole number is expected")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if type(value) not in (int, float) or abs(value) > 1e300:
            raise FormatError(f"{self.path}: {self.prefix}{key} is {show(value)}, a number is expected")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._get(key, False)
        if type(value) is not bool:
            raise FormatError(f"{self.path}: {self.prefix}{key} is {show(value)}, true or false is expected")
        return value

    def _get(self, key: str, default: Any) -> Any:
        value = self.fields.get(self.prefix + key)
        if value is None and default is None:
            raise FormatError(f"{self.path}: {self.prefix}{key} is missing; the file is incomplete or not of a llama model")
        return default if value is None else value


def _gguf_scaling(source: _Fields) -> RopeScaling | None:
    kind = source.fields.get("llama.rope.scaling.type")
    factor = source.number("rope.scaling.factor", source.number("rope.scale_linear", 0.0))
    if kind in (None, "none", "linear") and (factor in (0.0, 1.0) or kind == "none"):
        return None
    if kind in (None, "linear"):
        return RopeScaling("linear", _positive(factor, "llama.rope.scaling.factor", source.path))
    raise FormatError(f"{source.path}: metadata llama.rope.scaling.type is {show(kind)}; RoPE scaling of kind linear is supported in GGUF files, "
                      "and llama3's by rope_freqs.weight")


def _refuse_config(config: Mapping[str, Any], path: Path) -> None:
    for key, allowed in _CONFIG_NEUTRAL.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise FormatError(f"{path}: {key} is {show(value)}: {_CONFIG_WHY.get(key, f'only {show(allowed[0])} is supported')}")
    names = config.get("architectures") or []
    if not isinstance(names, list) or names and not any(name in ("LlamaForCausalLM", "MistralForCausalLM") for name in names):
        raise FormatError(f"{path}: architectures is {show(names)}; a language model (LlamaForCausalLM) is expected")
    window = config.get("sliding_window", _MISTRAL_WINDOW)
    context = config.get("max_position_embeddings")
    if config.get("model_type") == "mistral" and window is not None and not (type(window) is type(context) is int and window >= context):
        raise FormatError(f"{path}: model_type mistral with sliding_window {show(window)} is not supported; mistral models without a "
                          "sliding window are")


def _config_rope(config: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """rope_parameters of newer files; of older ones the same out of rope_theta and rope_scaling."""
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    rope = newer if newer is not None else older if older is not None else {}
    if not isinstance(rope, dict):
        raise FormatError(f"{path}: the RoPE parameters are {show(rope)}, an object is expected")
    return {"rope_theta": config.get("rope_theta")} | {key: value for key, value in rope.items() if value is not None}


def _config_scaling(rope: Mapping[str, Any], context: int, path: Path) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    source = _Fields(rope, path, "")
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise FormatError(f"{path}: RoPE scaling of kind {show(kind)} is not supported; default, linear and llama3 are")
    factor = _positive(source.number("factor"), "the RoPE scaling factor", path)
    if kind == "linear":
        return RopeScaling("linear", factor)
    low, high = source.number("low_freq_factor"), source.number("high_freq_factor")
    original = source.count("original_max_position_embeddings", context)
    if not 0 < low < high or original <= 0:
        raise FormatError(f"{path}: llama3 RoPE scaling needs 0 < low_freq_factor < high_freq_factor and a positive original context, "
                          f"got {low}, {high} and {original}")
    return RopeScaling("llama3", factor, low, high, original)


def _positive(value: float, what: str, path: Path) -> float:
    if not 0 < value < 1e6:
        raise FormatError(f"{path}: {what} is {value}, a positive number is expected")
    return value
