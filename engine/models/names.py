"""What the modules and tensors of a base are called in its files, and in which order GGUF files hold their rows. No torch."""
from __future__ import annotations

from .facts import ModelFacts, layer_linears, layer_norms

_GGUF = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output",
    "rope_freqs": "rope_freqs", "rope_factors_long": "rope_factors_long", "rope_factors_short": "rope_factors_short",
}
_GGUF_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.gate_up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {"shared_mlp.input_linear": "mlp.gate_up_proj", "shared_mlp.output_linear": "mlp.down_proj"}
"""what granitemoehybrid calls modules of a layer -> as they are called here"""
_GGUF_INTERLEAVED = frozenset({"llama", "mistral", "ministral", "mistral3", "granite", "smollm3"})
"""architectures whose GGUF files hold the two halves of each q and k head alternately: row 2i is the i-th of the first half, row 2i + 1
of the second. The other architectures' files keep Hugging Face's order (llama.cpp's converter, LlamaModel.permute)."""


def gguf_layer_names(facts: ModelFacts) -> dict[str, str]:
    """Every module of a layer (linears and norms, canonical, the layer's part left out) -> its GGUF name ("attn_q", "ffn_norm")."""
    places = facts.norms
    norms = {
        places.before_attention: "attn_norm", places.after_attention: "post_attention_norm",
        places.before_mlp: "ffn_norm", places.after_mlp: "post_ffw_norm",
    }
    known = _GGUF_LAYER | norms
    return {module: known[module] for module in (*layer_linears(facts), *layer_norms(facts))}


def gguf_module(module: str, facts: ModelFacts) -> str:
    """"layers.3.self_attn.q_proj" -> "blk.3.attn_q", "lm_head" -> "output"."""
    if not module.startswith("layers."):
        return _GGUF[module]
    _, layer, inner = module.split(".", 2)
    return f"blk.{layer}.{gguf_layer_names(facts)[inner]}"


def gguf_name(canonical: str, facts: ModelFacts) -> str:
    """"layers.3.self_attn.q_proj.weight" -> "blk.3.attn_q.weight"."""
    module, _, kind = canonical.rpartition(".")
    return f"{gguf_module(module, facts)}.{kind}"


def config_name(canonical: str) -> str:
    """"layers.3.mlp.up_proj.weight" -> "model.layers.3.mlp.up_proj.weight"; lm_head stays."""
    return canonical if canonical.startswith("lm_head.") else f"model.{canonical}"


def usual_name(path: str) -> str:
    """The path of a module with the end that it has here."""
    for other, usual in OTHER_NAMES.items():
        if path.endswith(f".{other}"):
            return path.removesuffix(other) + usual
    return path


def permuted_heads(facts: ModelFacts, module: str) -> int | None:
    """Heads of `module` whose halves GGUF files (bases, and B of adapters) of this architecture hold alternately; None where no row moves.

    Of such a file, `rows.view(heads, head_dim / 2, 2, -1).transpose(1, 2)` has the rows in Hugging Face order.
    """
    if facts.architecture not in _GGUF_INTERLEAVED:
        return None
    return {"q_proj": facts.heads, "k_proj": facts.kv_heads}.get(module.rpartition(".")[2])
