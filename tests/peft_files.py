"""Adapters that PEFT saves on tiny models, edited, and what is read of them against PEFT on the same base."""
from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lora_bench.engine.adapters.adapter import Adapter, AdapterWeights, LoraPair
from lora_bench.engine.adapters.load import load_adapter
from lora_bench.engine.adapters.open import open_adapter
from lora_bench.engine.adapters.peft import CONFIG, SAFETENSORS
from lora_bench.engine.models.facts import ModelFacts

PLAIN = ModelFacts(architecture="llama", layers=2, hidden=24, heads=6, kv_heads=2, head_dim=6, intermediate=40, vocab=50, context=64,
                   rms_eps=1e-5, rope_theta=1e4)
TIED = dataclasses.replace(PLAIN, tied=True)
BIASED = dataclasses.replace(PLAIN, attention_bias=True, output_bias=True, mlp_bias=True)


def llama(facts: ModelFacts) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=facts.vocab, hidden_size=facts.hidden, intermediate_size=facts.intermediate, num_hidden_layers=facts.layers,
        num_attention_heads=facts.heads, num_key_value_heads=facts.kv_heads, head_dim=facts.head_dim, tie_word_embeddings=facts.tied,
        attention_bias=facts.attention_bias, mlp_bias=facts.mlp_bias, attn_implementation="eager")).eval()


def trained(base: LlamaForCausalLM, folder: Path, save: dict[str, object] | None = None, **config: object) -> PeftModel:
    """An adapter on `base` whose trainable numbers are random, saved to `folder`."""
    model = get_peft_model(base, LoraConfig(**({"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"} | config)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, **(save or {}))
    return model.eval()


def tensors_of(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """By canonical name, the head's also where it is tied."""
    found = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    return found | {"lm_head.weight": model.lm_head.weight.detach()}


def changed(weight: Tensor, pair: LoraPair) -> Tensor:
    """`weight` [d_out, d_in] with the delta of `pair` at scale 1."""
    whole = weight + pair.scaling * (pair.b.float() @ pair.a.float())
    return whole if pair.magnitude is None else whole * (pair.magnitude / whole.norm(dim=1))[:, None]


def acted(base: dict[str, Tensor], weights: AdapterWeights) -> dict[str, Tensor]:
    """The tensors of a base with all that an adapter changes of them."""
    result = base | dict(weights.replaced)
    for name, rows in weights.rows.items():
        result[name] = result[name].index_copy(0, rows.ids, rows.values)
    for module, pair in weights.modules.items():
        result[f"{module}.weight"] = changed(result[f"{module}.weight"], pair)
        if pair.bias is not None:
            result[f"{module}.bias"] = result[f"{module}.bias"] + pair.scaling * pair.bias
    if weights.embedding is not None:
        result["embed_tokens.weight"] = changed(result["embed_tokens.weight"].T, weights.embedding).T
    return result


def logits(model: torch.nn.Module, vocab: int) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(vocab)[None].flip(1)).logits


def compare(folder: Path, facts: ModelFacts) -> Adapter:
    """The adapter in `folder` as we read it, after its logits on a base were found equal to PEFT's on the same base."""
    base = llama(facts)  # not the one it was trained on: what the file holds must come out of the file
    adapter = load_adapter(open_adapter(folder), facts, "it")
    weights = acted(tensors_of(base), adapter.weights)
    rows = weights["embed_tokens.weight"].shape[0]
    ours = llama(dataclasses.replace(facts, tied=False, vocab=rows))
    ours.load_state_dict({name if name.startswith("lm_head") else f"model.{name}": tensor for name, tensor in weights.items()})
    base.resize_token_embeddings(rows)
    theirs = PeftModel.from_pretrained(base, folder).eval()
    torch.testing.assert_close(logits(ours, rows), logits(theirs, rows), rtol=1e-4, atol=1e-4)
    return adapter


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object] = lambda tensors: None, **config: object) -> Path:
    """The adapter in `folder` with other tensors and fields."""
    tensors = load_file(folder / SAFETENSORS)
    change(tensors)
    save_file(tensors, folder / SAFETENSORS)
    (folder / CONFIG).write_text(json.dumps(json.loads((folder / CONFIG).read_text()) | config))
    return folder
