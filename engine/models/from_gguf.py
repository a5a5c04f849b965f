"""What the readers of GGUF metadata share: the sizes, the keys that would change the mathematics, the windows of layers. No torch."""
from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..weights.entry import TensorEntry
from .fields import Fields
from .rope_facts import gguf_rope

_ABSENT = (
    "expert_count", "attention.clamp_kqv", "attention.max_alibi_bias", "attention.scale", "attention.output_scale", "logit_scale",
    "residual_scale", "embedding_scale", "attn_logit_softcapping", "final_logit_softcapping", "attention.sliding_window",
    "attention.temperature_scale", "attention.temperature_length", "attention.shared_kv_layers", "attention.key_length_mla",
    "use_parallel_residual", "rope.freq_base_swa", "deepstack_mapping", "hidden_activation",
    "num_loops", "rescale_every_n_layers",
)
"""keys that change what a model computes unless they are 0; an architecture names those that it honours"""
_KNOWN = frozenset({
    *_ABSENT, "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.key_length_swa", "attention.value_length_swa", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon",
    "attention.causal",
    "attention.sliding_window_pattern", "rope.dimension_count", "rope.dimension_count_swa", "rope.dimension_sections", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor", "rope.scaling.alpha", "rope.scaling.attn_factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
})
"""keys of attention and RoPE of which it is known what they do; any other one, of another converter, would change what is computed"""


def open_gguf(metadata: Mapping[str, Any], path: Path, architecture: str, honours: Collection[str] = ()) -> Fields:
    """The keys of `architecture`. Raises FormatError for one that changes the mathematics and is not among those it `honours`."""
    source = Fields(metadata, path, f"{architecture}.")
    for key in _ABSENT:
        if key not in honours and source.get(key) and not (key == "attention.sliding_window" and _outgrows(source)):
            raise source.error(key, source.get(key), f"which is not supported: other {architecture} models have 0 there")
    for key in metadata:
        own = key.removeprefix(source.prefix)
        if own != key and own.startswith(("attention.", "rope.")) and own not in _KNOWN and source.get(own):
            raise source.error(own, source.get(own), "a key that is not known here and may change what the model computes; use a GGUF that "
                               "llama.cpp's own converter made")
    if source.get("attention.causal") is False:
        raise source.error("attention.causal", False, "only causal language models are supported")
    return source


def _outgrows(source: Fields) -> bool:
    window = source.get("attention.sliding_window")
    return type(window) is int and window >= source.count("context_length")


def gguf_facts(source: Fields, tensors: Mapping[str, TensorEntry], partial_rotary: bool = False) -> dict[str, Any]:
    """The facts that all architectures state alike, RoPE with one base for all layers among them."""
    hidden, heads, context = source.count("embedding_length"), source.count("attention.head_count"), source.count("context_length")
    head_dim = _head_size(source, hidden, heads)
    rotary = source.count("rope.dimension_count", head_dim)
    if rotary != head_dim and not partial_rotary:
        raise source.error("rope.dimension_count", rotary, f"the head dimension {head_dim} is expected; only equal ones are supported")
    embedding = tensors.get("token_embd.weight")
    rope = gguf_rope(source, tensors, max(context, 1))
    return {
        "architecture": source.prefix.removesuffix("."), "layers": source.count("block_count"), "hidden": hidden, "heads": heads,
        "kv_heads": source.count("attention.head_count_kv", heads), "head_dim": head_dim,
        "intermediate": source.count("feed_forward_length"),
        "vocab": embedding.shape[0] if embedding and len(embedding.shape) == 2 else source.count("vocab_size"), "context": context,
        "rms_eps": source.number("attention.layer_norm_rms_epsilon"), "rope_theta": rope.theta, "rope_scaling": rope.scaling,
        "rope_freq_factors": "rope_freqs.weight" in tensors, "rotary_dim": 0 if rotary == head_dim else rotary,
        "tied": "output.weight" not in tensors, "attention_bias": "blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        "output_bias": "blk.0.attn_output.bias" in tensors, "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
    }


def _head_size(source: Fields, hidden: int, heads: int) -> int:
    size = source.count("attention.key_length", hidden // heads if heads > 0 and hidden % heads == 0 else 0)
    if not size:
        raise source.error("embedding_length", hidden, f"a multiple of {source.prefix}attention.head_count {heads} is expected where "
                           f"{source.prefix}attention.key_length is missing: it is not divisible; the file is corrupt")
    if source.count("attention.value_length", size) != size:
        raise source.error("attention.value_length", source.get("attention.value_length"), f"the key length {size} is expected; "
                           "only equal ones are supported")
    for key in ("attention.key_length_swa", "attention.value_length_swa"):
        if source.count(key, size) != size:
            raise source.error(key, source.get(key), f"the head dimension {size} of the other layers is expected")
    return size


def gguf_windows(source: Fields, window: int, pattern: int) -> tuple[int, ...]:
    """The windows of layers: all but every `pattern`-th, or as attention.sliding_window_pattern says; () when none is shorter than the
    context."""
    layers = max(0, min(source.count("block_count"), 1024))
    stated: Any = source.get("attention.sliding_window_pattern", pattern)
    if type(stated) is int and 0 <= stated <= 1024:
        stated = [stated == 0 or (layer + 1) % stated != 0 for layer in range(layers)]
    if isinstance(stated, int) or not hasattr(stated, "__len__") or len(stated) != layers or any(slides not in (0, 1) for slides in stated):
        raise source.error("attention.sliding_window_pattern", stated, f"a number or true or false for each of {layers} layers is expected")
    if window < 0:
        raise source.error("attention.sliding_window", window, "a number of tokens is expected")
    used = window if window < source.count("context_length") else 0
    return tuple(used if slides else 0 for slides in stated) if used and any(stated) else ()
