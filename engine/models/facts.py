"""What the engine must know of a decoder, whatever file it comes from: one shape of decoder, told apart by these facts alone."""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ..weights.files import FormatError, show

_BOUNDS: dict[str, tuple[int, int]] = {
    "layers": (1, 1024), "hidden": (1, 1 << 17), "heads": (1, 4096), "kv_heads": (1, 4096), "head_dim": (2, 4096),
    "intermediate": (1, 1 << 20), "vocab": (1, 1 << 22), "context": (2, 1 << 31),
}
"""least and greatest that a fact may be: beyond them the file lies"""


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE frequencies are stretched; kernels/rope.py says what each kind does with which of the numbers."""

    kind: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0
    attention_factor: float = 1.0
    """multiplies cos and sin (yarn, longrope)"""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn's borders between frequencies are whole dimensions"""
    short_factors: tuple[float, ...] = ()
    """longrope's divisors of each frequency up to `original_context` tokens; () when the weights hold them (rope_factors_short.weight)"""
    long_factors: tuple[float, ...] = ()
    """beyond as many tokens"""


@dataclass(frozen=True)
class Rope:
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class NormPlaces:
    """Canonical names of a layer's norms, "" where there is none; those after act on what is added to the residual stream."""

    before_attention: str
    after_attention: str
    before_mlp: str
    after_mlp: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)))


NORMS_BEFORE = NormPlaces("input_layernorm", "", "post_attention_layernorm", "")
NORMS_AROUND = NormPlaces("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
NORMS_AFTER = NormPlaces("", "post_attention_layernorm", "", "post_feedforward_layernorm")


@dataclass(frozen=True)
class ModelFacts:
    """A decoder: RMSNorm, rotary grouped-query attention, gated MLP. Sizes are elements, `context` is tokens."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context: int
    rms_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    rope_freq_factors: bool = False
    """the weights hold `rope_freqs.weight` [rotary_dim / 2], by which each RoPE frequency is divided"""
    rotary_dim: int = 0
    """dimensions of a head that RoPE turns, the first ones; 0 for all"""
    local_rope: Rope | None = None
    """of the layers with a window, where it is another one"""
    layers_without_rope: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    """of each layer: the tokens that one may look at, itself included, 0 for all before it; () when no layer has a window"""
    tied: bool = False
    attention_bias: bool = False
    """q, k and v projections have a bias"""
    output_bias: bool = False
    """the o projection has a bias"""
    mlp_bias: bool = False
    """gate, up and down projections have a bias"""
    fused: bool = False
    """q, k, v are one module, qkv_proj; gate and up are one, gate_up_proj"""
    norms: NormPlaces = NORMS_BEFORE
    norm_offset: float = 0.0
    """what Hugging Face files (and what PEFT saves) lack of every norm weight; GGUF files and weights in memory hold the sum, in fp32"""
    qk_norm: Literal["", "head", "all"] = ""
    """q_norm and k_norm before RoPE: of each head by itself, or of all heads together"""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    rounded_embedding_scale: bool = False
    """the scale is rounded to the dtype of the model before it is used"""
    attention_scale: float = 0.0
    """of the products of q and k; 0 for 1 / sqrt(head_dim)"""
    attention_softcap: float = 0.0
    """c of c tanh(score / c); 0 for none"""
    residual_scale: float = 1.0
    """of what attention and MLP add"""
    logit_divisor: float = 1.0
    logit_softcap: float = 0.0
    notes: tuple[str, ...] = field(default=(), compare=False)
    """how the file was understood, where a user should know"""

    @property
    def q_out(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_out(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def rotary(self) -> int:
        """Dimensions of a head that RoPE turns."""
        return self.rotary_dim or self.head_dim

    @property
    def long_after(self) -> int:
        """Requests of more tokens than this turn by longrope's long factors; 0 for models that have none."""
        scaling = self.rope_scaling
        return scaling.original_context if scaling is not None and scaling.kind == "longrope" else 0


def layer_linears(facts: ModelFacts) -> dict[str, tuple[int, int]]:
    """The linears of a layer -> (d_out, d_in)."""
    h, q, kv, inner = facts.hidden, facts.q_out, facts.kv_out, facts.intermediate
    if facts.fused:
        return {
            "self_attn.qkv_proj": (q + 2 * kv, h), "self_attn.o_proj": (h, q),
            "mlp.gate_up_proj": (2 * inner, h), "mlp.down_proj": (h, inner)}
    return {
        "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h), "self_attn.o_proj": (h, q),
        "mlp.gate_proj": (inner, h), "mlp.up_proj": (inner, h), "mlp.down_proj": (h, inner)}


def linear_layout(facts: ModelFacts) -> dict[str, tuple[str, ...]]:
    """The decoder's matrix products in a layer -> the modules whose outputs each holds, one under the other."""
    return {
        "qkv_proj": ("self_attn.qkv_proj",) if facts.fused else ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o_proj": ("self_attn.o_proj",),
        "gate_up_proj": ("mlp.gate_up_proj",) if facts.fused else ("mlp.gate_proj", "mlp.up_proj"),
        "down_proj": ("mlp.down_proj",),
    }


def layer_norms(facts: ModelFacts) -> dict[str, int]:
    """The norms of a layer -> the length of their weight."""
    norms = dict.fromkeys(facts.norms.names, facts.hidden)
    if facts.qk_norm:
        q, k = (facts.q_out, facts.kv_out) if facts.qk_norm == "all" else (facts.head_dim, facts.head_dim)
        norms |= {"self_attn.q_norm": q, "self_attn.k_norm": k}
    return norms


def module_shapes(facts: ModelFacts) -> dict[str, tuple[int, int]]:
    """Canonical name of every linear -> (d_out, d_in): those of each layer, then `lm_head` (also when tied)."""
    of_layer = layer_linears(facts)
    shapes = {f"layers.{i}.{name}": shape for i in range(facts.layers) for name, shape in of_layer.items()}
    shapes["lm_head"] = (facts.vocab, facts.hidden)
    return shapes


def tensor_shapes(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Canonical name of every tensor that the weights must hold -> its shape."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (facts.vocab, facts.hidden), "norm.weight": (facts.hidden,)}
    for module, shape in module_shapes(facts).items():
        if module == "lm_head" and facts.tied:
            continue
        shapes[f"{module}.weight"] = shape
        if _has_bias(module, facts):
            shapes[f"{module}.bias"] = shape[:1]
    norms = layer_norms(facts)
    shapes |= {f"layers.{i}.{norm}.weight": (length,) for i in range(facts.layers) for norm, length in norms.items()}
    if facts.rope_freq_factors:
        shapes["rope_freqs.weight"] = (facts.rotary // 2,)
    if facts.long_after and not facts.rope_scaling.long_factors:
        shapes |= {"rope_factors_long.weight": (facts.rotary // 2,), "rope_factors_short.weight": (facts.rotary // 2,)}
    return shapes


def _has_bias(module: str, facts: ModelFacts) -> bool:
    if module.endswith(".o_proj"):
        return facts.output_bias
    return facts.attention_bias and ".self_attn." in module or facts.mlp_bias and ".mlp." in module


def validate(facts: ModelFacts, source: object) -> ModelFacts:
    """`facts`, when they can be those of a model. Raises FormatError naming `source` and the first fact that cannot."""
    for name, (least, greatest) in _BOUNDS.items():
        value = getattr(facts, name)
        if type(value) is not int or not least <= value <= greatest:
            raise FormatError(f"{source}: {LABELS[name]} is {show(value)}, expected a whole number from {least:,} to {greatest:,}; "
                              f"the file is corrupt or not a {facts.architecture} model")
    if facts.heads % facts.kv_heads:
        raise FormatError(f"{source}: {facts.heads} attention heads cannot share {facts.kv_heads} key/value heads evenly; "
                          "the file is corrupt")
    if facts.rotary % 2 or not 0 < facts.rotary <= facts.head_dim:
        raise FormatError(f"{source}: RoPE turns {facts.rotary} of head_dim {facts.head_dim} dimensions, an even number up to head_dim "
                          "is needed; the file is corrupt")
    _check_numbers(facts, source)
    _check_layers(facts, source)
    return facts


def _check_numbers(facts: ModelFacts, source: object) -> None:
    positive = ("rms_eps", "rope_theta", "embedding_scale", "residual_scale", "logit_divisor")
    for name in (*positive, "attention_scale", "attention_softcap", "logit_softcap"):
        value = getattr(facts, name)
        if not isinstance(value, float) or not math.isfinite(value) or value < 0 or value == 0 and name in positive:
            raise FormatError(f"{source}: {LABELS[name]} is {show(value)}, a positive number is expected")
    for rope in (Rope(facts.rope_theta), facts.local_rope):
        if rope is not None and not 1 < rope.theta:
            raise FormatError(f"{source}: {LABELS['rope_theta']} is {rope.theta}, a number over 1 is expected")


def _check_layers(facts: ModelFacts, source: object) -> None:
    if facts.windows and (len(facts.windows) != facts.layers or min(facts.windows) < 0):
        raise FormatError(f"{source}: the sliding windows of the layers are {show(list(facts.windows))}, one for each of {facts.layers} "
                          "layers is needed; the file is corrupt")
    if any(not 0 <= layer < facts.layers for layer in facts.layers_without_rope):
        raise FormatError(f"{source}: layers without RoPE are {show(list(facts.layers_without_rope))} of {facts.layers}; "
                          "the file is corrupt")


LABELS = {
    "layers": "the number of layers (block_count, num_hidden_layers)", "hidden": "the embedding length (hidden_size)",
    "heads": "the number of attention heads (head_count)", "kv_heads": "the number of key/value heads (head_count_kv)",
    "head_dim": "head_dim", "intermediate": "the feed-forward length (intermediate_size)", "vocab": "the vocabulary size",
    "context": "the context length", "rms_eps": "the RMSNorm epsilon", "rope_theta": "the RoPE base frequency (rope_theta)",
    "embedding_scale": "the embedding scale (embedding_multiplier)", "residual_scale": "the residual scale (residual_multiplier)",
    "logit_divisor": "the logit scale (logits_scaling)",
    "attention_scale": "the attention scale (attention_multiplier, query_pre_attn_scalar)",
    "attention_softcap": "the attention softcap (attn_logit_softcapping)", "logit_softcap": "the logit softcap (final_logit_softcapping)",
}
"""what a fact is called in files, for messages"""
