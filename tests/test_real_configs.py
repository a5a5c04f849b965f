"""config.json as popular checkpoints have it, in the spellings of transformers 4.28 to 5, only smaller: read as transformers reads it."""
from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny_tokenizer
from torch import Tensor

from lora_bench.engine.base_file import open_base
from lora_bench.engine.batch import Chunk, step_inputs
from lora_bench.engine.blocks import BlockTable
from lora_bench.engine.models.decoder import Decoder
from lora_bench.engine.weights.load import load_weights

CONTEXT = 128
SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5, "initializer_range": 0.02,
    "use_cache": True, "attention_dropout": 0.0,
}
GONE = "gone"
"""of a field that the file has not; None is one that it has as null"""
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16, "rope_type": "llama3"}
LONG = {"long_factor": [1.0, 2.5, 9.0, 30.0], "short_factor": [1.0, 1.0, 1.1, 2.0], "type": "longrope"}
DUMPED = {"return_dict": True, "torchscript": False, "pruned_heads": {}, "is_encoder_decoder": False, "add_cross_attention": False,
          "max_length": 20, "temperature": 1.0, "id2label": {"0": "LABEL_0"}, "tie_encoder_decoder": False, "chunk_size_feed_forward": 0}
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama 1 (4.28)": {"model_type": "llama", "num_key_value_heads": GONE, "max_position_embeddings": GONE, "max_sequence_length": 2048,
                       "pad_token_id": -1, "torch_dtype": "float16"},
    "Llama 2 (4.31)": {"model_type": "llama", "num_key_value_heads": 4, "pretraining_tp": 2, "rope_scaling": None,
                       "tie_word_embeddings": False},
    "Yarn-Llama-2": {"model_type": "llama", "rope_scaling": {
        "factor": 8.0, "original_max_position_embeddings": 16, "type": "yarn", "finetuned": True}},
    "Llama 3.2 by unsloth": {"model_type": "llama", "head_dim": 16, "rope_scaling": LLAMA3, "rope_theta": 500000.0, "unsloth_fixed": True,
                             "tie_word_embeddings": True, "eos_token_id": [2, 4], "mlp_bias": False, "unsloth_version": "2024.11"},
    "Llama 3.2 (5.0)": {"model_type": "llama", "head_dim": 16, "rope_parameters": LLAMA3 | {"rope_theta": 500000.0}, "dtype": "bfloat16"},
    "SmolLM2": {"model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "rope_theta": 100000,
                "tie_word_embeddings": True, "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
    "Mistral 7B v0.1": {"model_type": "mistral", "sliding_window": 16, "rope_theta": 10000.0},
    "Mistral 7B v0.3": {"model_type": "mistral", "sliding_window": None, "rope_theta": 1000000.0, "head_dim": None} | DUMPED,
    "Qwen 2.5 7B": {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": False, "max_window_layers": 2,
                    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32, "type": "yarn"}},
    "Qwen 2.5 Math": {"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": False, "max_window_layers": 1,
                      "use_mrope": False},
    "Qwen 3 (4.54)": {"model_type": "qwen3", "head_dim": 16, "attention_bias": False, "layer_types": ["full_attention"] * 3,
                      "max_window_layers": 3, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True},
    "DeepSeek-R1-0528-Qwen3": {"model_type": "qwen3", "head_dim": 16, "rope_scaling": {
        "attn_factor": 0.88, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "rope_type": "yarn"}},
    "Gemma 2 27B": {"model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 9, "sliding_window": 16, "sliding_window_size": 16,
                    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0,
                    "final_logit_softcapping": 30.0, "cache_implementation": "hybrid"},
    "Gemma 3 1B": {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 7,
                   "sliding_window_pattern": 6, "rope_local_base_freq": 10000, "rope_theta": 1000000, "rope_scaling": None,
                   "attn_logit_softcapping": None, "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh"},
    "Gemma 3 270M": {"model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 7,
                     "_sliding_window_pattern": 6, "rope_local_base_freq": 10000.0, "rope_theta": 1000000.0,
                     "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
                     "use_bidirectional_attention": False},
    "Gemma 3 4B": {"model_type": "gemma3", "mm_tokens_per_image": 4, "image_token_index": 3, "boi_token_index": 3, "eoi_token_index": 3,
                   "text_config": {"model_type": "gemma3_text", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 7,
                                   "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 8, "vocab_size": 50},
                   "vision_config": EYES | {"model_type": "siglip_vision_model", "vision_use_head": False}},
    "Granite 3.3": {"model_type": "granite", "attention_multiplier": 0.1, "embedding_multiplier": 12.0, "logits_scaling": 3,
                    "residual_multiplier": 0.22, "mlp_bias": False, "rope_theta": 10000000.0, "tie_word_embeddings": True},
    "Granite 4.0 micro": {"model_type": "granitemoehybrid", "attention_multiplier": 0.1, "embedding_multiplier": 12, "logits_scaling": 3,
                          "residual_multiplier": 0.22, "layer_types": ["attention"] * 3, "num_local_experts": 0, "num_experts_per_tok": 0,
                          "position_embedding_type": "rope", "shared_intermediate_size": 40, "normalization_function": "rmsnorm",
                          "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "init_method": "mup", "tie_word_embeddings": True},
    "Phi 3 mini 4k": {"model_type": "phi3", "original_max_position_embeddings": CONTEXT, "pad_token_id": 0, "sliding_window": 15,
                      "rope_scaling": None, "resid_pdrop": 0.0, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}},
    "Phi 3.5 mini": {"model_type": "phi3", "original_max_position_embeddings": 16, "pad_token_id": 0, "rope_scaling": LONG,
                     "sliding_window": 512},
    "Phi 4 mini (5.1)": {"model_type": "phi3", "hidden_size": 40, "pad_token_id": 0, "tie_word_embeddings": True, "rope_parameters": {
        **LONG, "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.8, "original_max_position_embeddings": 16}},
    "SmolLM3": {"model_type": "smollm3", "no_rope_layers": [1, 0, 1], "no_rope_layer_interval": 4, "layer_types": ["full_attention"] * 3,
                "bos_token_id": None, "pad_token_id": 0, "pretraining_tp": 2, "max_window_layers": 28, "use_sliding_window": False,
                "rope_scaling": {"factor": 2.0, "original_max_position_embeddings": 64, "rope_type": "yarn"}, "rope_theta": 5000000.0},
    "OLMo 2": {"model_type": "olmo2", "pad_token_id": 0, "rope_theta": 500000, "tie_word_embeddings": False},
}
"""what differs from SIZES"""


@pytest.mark.parametrize("checkpoint", CONFIGS)
def test_a_checkpoint_of_this_config_computes_what_transformers_does(checkpoint: str, tmp_path: Path, seed: int) -> None:
    changes = CONFIGS[checkpoint]
    inside = "text_config" in changes
    config = changes if inside else {key: value for key, value in (SIZES | changes).items() if value != GONE}
    model = _saved(config | {"transformers_version": "4.31.0"}, tmp_path / "m", inside)
    base = open_base(tmp_path / "m")
    decoder = Decoder(base.facts, load_weights(base, "cpu", torch.float32), CONTEXT)
    for length in (7, 100):
        ids = [random.randrange(5, 50) for _ in range(length)]
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([ids])).logits[0]
        torch.testing.assert_close(_logits(decoder, ids), expected, atol=1e-4, rtol=1e-4)


def _saved(config: dict[str, Any], folder: Path, inside: bool) -> Any:
    """The model that transformers makes of this config.json, with random weights, saved beside the very file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    kind = transformers.AutoModelForImageTextToText if inside else transformers.AutoModelForCausalLM
    read = transformers.AutoConfig.from_pretrained(folder)
    model = kind.from_config(read, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = torch.randn(weight.shape)
            whole = 0.0 if "gemma" in config["model_type"] else 1.0
            scaled = whole + spread * 0.2 if "norm" in name else spread / math.sqrt(weight.shape[-1])
            weight.copy_(scaled if weight.dim() > 1 or "norm" in name else spread * 0.3)
    model.generation_config.pad_token_id = None  # some versions refuse to save the -1 of old configs
    model.save_pretrained(folder, max_shard_size="40KB")
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer()))
    return model


def _logits(decoder: Decoder, ids: list[int]) -> Tensor:
    blocks = CONTEXT // 16
    caches, table, parts = decoder.kv_cache(blocks, 16), BlockTable(tuple(range(blocks))), []
    for first, end in ((0, len(ids) - 2), (len(ids) - 2, len(ids) - 1), (len(ids) - 1, len(ids))):
        chunk = Chunk(ids[first:end], first, table, True, every=True, rope_start=decoder.rope.start(len(ids)))
        parts.append(decoder.forward(step_inputs([chunk], torch.device("cpu")), caches, None, lambda op: None))
    return torch.cat(parts)
