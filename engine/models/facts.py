"""What the engine must know of a decoder of the llama family, whatever file it comes from."""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..weights.files import FormatError, show

_BOUNDS: dict[str, tuple[int, int]] = {
    "layers": (1, 1024), "hidden": (1, 1 << 17), "heads": (1, 4096), "kv_heads": (1, 4096), "head_dim": (2, 4096),
    "intermediate": (1, 1 << 20), "vocab": (1, 1 << 22), "context": (1, 1 << 31),
}
"""least and greatest that a fact may be: beyond them the file lies"""


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE frequencies are stretched. "linear" uses `factor` alone; "llama3" uses all."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """A decoder: RMSNorm, rotary grouped-query attention, SwiGLU. Sizes are elements, `context` is tokens."""

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
    """the weights hold `rope_freqs.weight` [head_dim / 2], by which each RoPE frequency is divided"""
    tied: bool = False
    attention_bias: bool = False
    """q, k, v and o projections have a bias"""
    mlp_bias: bool = False
    """gate, up and down projections have a bias"""

    @property
    def q_out(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_out(self) -> int:
        return self.kv_heads * self.head_dim


LAYER_LINEARS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)
NORMS = ("input_layernorm", "post_attention_layernorm")


def linear_layout(facts: ModelFacts) -> dict[str, tuple[str, ...]]:
    """The decoder's matrix products in a layer -> the modules whose outputs each holds, one under the other."""
    return {
        "qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o_proj": ("self_attn.o_proj",),
        "gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        "down_proj": ("mlp.down_proj",),
    }


def module_shapes(facts: ModelFacts) -> dict[str, tuple[int, int]]:
    """Canonical name of every linear -> (d_out, d_in): seven a layer, then `lm_head` (also when tied)."""
    h, q, kv, inner = facts.hidden, facts.q_out, facts.kv_out, facts.intermediate
    of_layer = dict(zip(LAYER_LINEARS, ((q, h), (kv, h), (kv, h), (h, q), (inner, h), (inner, h), (h, inner)), strict=True))
    shapes = {f"layers.{i}.{name}": shape for i in range(facts.layers) for name, shape in of_layer.items()}
    shapes["lm_head"] = (facts.vocab, h)
    return shapes


def tensor_shapes(facts: ModelFacts) -> dict[str, tuple[int, ...]]:
    """Canonical name of every tensor that the weights must hold -> its shape."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (facts.vocab, facts.hidden), "norm.weight": (facts.hidden,)}
    for module, shape in module_shapes(facts).items():
        if module == "lm_head" and facts.tied:
            continue
        shapes[f"{module}.weight"] = shape
        if facts.attention_bias and ".self_attn." in module or facts.mlp_bias and ".mlp." in module:
            shapes[f"{module}.bias"] = shape[:1]
    for i in range(facts.layers):
        shapes |= {f"layers.{i}.{norm}.weight": (facts.hidden,) for norm in NORMS}
    if facts.rope_freq_factors:
        shapes["rope_freqs.weight"] = (facts.head_dim // 2,)
    return shapes


def validate(facts: ModelFacts, source: object) -> ModelFacts:
    """`facts`, when they can be those of a model. Raises FormatError naming `source` and the first fact that cannot."""
    for name, (least, greatest) in _BOUNDS.items():
        value = getattr(facts, name)
        if type(value) is not int or not least <= value <= greatest:
            raise FormatError(f"{source}: {LABELS[name]} is {show(value)}, expected a whole number from {least:,} to {greatest:,}; "
                              "the file is corrupt or not a llama model")
    if facts.heads % facts.kv_heads:
        raise FormatError(f"{source}: {facts.heads} attention heads cannot share {facts.kv_heads} key/value heads evenly; the file is corrupt")
    if facts.head_dim % 2:
        raise FormatError(f"{source}: head_dim is {facts.head_dim}, an even number is needed for RoPE; the file is corrupt")
    for name, value in (("rms_eps", facts.rms_eps), ("rope_theta", facts.rope_theta)):
        if not isinstance(value, float) or not math.isfinite(value) or value <= 0:
            raise FormatError(f"{source}: {LABELS[name]} is {show(value)}, a positive number is expected")
    return facts


LABELS = {
    "layers": "the number of layers (block_count, num_hidden_layers)", "hidden": "the embedding length (hidden_size)",
    "heads": "the number of attention heads (head_count)", "kv_heads": "the number of key/value heads (head_count_kv)",
    "head_dim": "head_dim", "intermediate": "the feed-forward length (intermediate_size)", "vocab": "the vocabulary size",
    "context": "the context length", "rms_eps": "the RMSNorm epsilon", "rope_theta": "the RoPE base frequency (rope_theta)",
}
"""what a fact is called in files, for messages"""
