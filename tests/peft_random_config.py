"""Random LoraConfigs, and random files of what they train, in the ways that PEFT and trainers write them."""
from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from lora_bench.engine.adapters.peft import CONFIG, PICKLE, SAFETENSORS

SPLIT = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
TOKENS = ["embed_tokens", "lm_head"]
NORMS = ["norm", "input_layernorm", "post_attention_layernorm", "q_norm", "model.norm"]
INVOCATION = [5, 6, 7]


@dataclass(frozen=True, slots=True)
class Saving:
    """How an adapter is written."""

    added: int
    """rows by which embedding and head were resized before the training"""
    embeddings: bool | str
    """save_embedding_layers"""
    safetensors: bool
    dtypes: tuple[torch.dtype, ...]
    """each tensor is stored in one of them"""


def random_saving(chance: random.Random, exact: bool) -> Saving:
    """`exact`: copies of the base in the file are the base's, bit for bit."""
    added = chance.randint(1, 4) if not exact and chance.random() < 0.12 else 0
    dtypes = chance.choice([(torch.float32,)] * 3 + [(torch.bfloat16,), (torch.float16,), (torch.float32, torch.bfloat16, torch.float16)])
    dtypes = (torch.float32,) if exact else dtypes
    return Saving(added, True if added else chance.choice(["auto", "auto", True, False]), chance.random() < 0.8, dtypes)


def random_config(chance: random.Random, fused: bool, vocab: int, names: list[str]) -> dict[str, Any]:
    """Keywords of a LoraConfig for a model with the modules `names`; some combinations PEFT refuses."""
    linears = FUSED if fused else SPLIT
    rank = chance.randint(1, 9)
    config: dict[str, Any] = {
        "r": rank, "lora_alpha": chance.choice([rank, 2 * rank, 16, 0.7, 5.5, -3]), "use_rslora": chance.random() < 0.25,
        "use_dora": chance.random() < 0.3, "lora_bias": chance.random() < 0.15, "bias": chance.choice(["none"] * 5 + ["all", "lora_only"]),
        "target_modules": _targets(chance, linears), "fan_in_fan_out": chance.random() < 0.05,
        "init_lora_weights": chance.choice([True, True, False, "gaussian", *(["orthogonal"] if rank % 2 == 0 else [])]),
        "lora_dropout": chance.choice([0.0, 0.1]),
        "task_type": chance.choice(["CAUSAL_LM", None]), "ensure_weight_tying": chance.random() < 0.15,
        "rank_pattern": chance.choice([{}] * 3
                                      + [{linears[0]: 3, r"layers\.1\.mlp\..*": 2}, {r"model\.layers\.[01]\..*\.o_proj": 7, "o_proj": 1}]),
        "alpha_pattern": chance.choice([{}] * 3 + [{"down_proj": 9, r".*\.0\..*": -2.5}, {f"^model.layers.2.self_attn.{linears[0]}": 1}]),
    }
    optional = {
        "exclude_modules": lambda: chance.choice([[linears[1]], r".*\.1\..*", ["layers.0.mlp.down_proj"]]),
        "layers_to_transform": lambda: chance.choice([1, [0, 2], [1, 2]]),
        "modules_to_save": lambda: chance.sample([name for name in (*TOKENS, *NORMS) if any(path.endswith(name) for path in names)],
                                                 chance.randint(1, 3)),
        "trainable_token_indices": lambda: _token_rows(chance, vocab),
        "target_parameters": lambda: [f"{chance.choice(linears)}.weight"],
        "alora_invocation_tokens": lambda: INVOCATION,
    }
    for name, make in optional.items():
        if chance.random() < 0.12:
            config[name] = make()
    return _coherent(config)


def _coherent(config: dict[str, Any]) -> dict[str, Any]:
    """Without most of what PEFT refuses beside something else."""
    if "alora_invocation_tokens" in config:
        config |= {"task_type": "CAUSAL_LM", "use_dora": False}
    if config["use_dora"] or "target_parameters" in config:
        config["lora_bias"] = False
    if "target_parameters" in config:
        config |= {"use_dora": False, "lora_dropout": 0.0}
        if isinstance(config["target_modules"], list):
            ends = tuple(name.split(".")[0] for name in config["target_parameters"])
            config["target_modules"] = [name for name in config["target_modules"] if not name.endswith(ends)] or ["embed_tokens"]
    if config["lora_bias"] or config["rank_pattern"]:
        config["init_lora_weights"] = True
    if isinstance(config["target_modules"], str):
        config.pop("layers_to_transform", None)
    return config


def _targets(chance: random.Random, linears: list[str]) -> object:
    some = chance.sample([*linears, *TOKENS], chance.randint(1, 5))
    return chance.choice([
        chance.sample(linears, chance.randint(1, len(linears))), chance.sample(linears, chance.randint(1, len(linears))), some,
        "all-linear", rf".*layers\.[02]\..*({linears[0]}|down_proj)",
        ["layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj", linears[0]],
        r"(.*\.)?(embed_tokens|o_proj|lm_head)"])


def _token_rows(chance: random.Random, vocab: int) -> object:
    ids = chance.sample(range(vocab), chance.randint(1, 6))
    return chance.choice([ids, {"embed_tokens": ids}, {"embed_tokens": ids, "lm_head": chance.sample(ids, len(ids))}, {"lm_head": ids},
                          {"model.embed_tokens": ids}])


def save_adapter(chance: random.Random, model: PeftModel, folder: Path, saving: Saving) -> None:
    model.save_pretrained(folder, save_embedding_layers=saving.embeddings)
    whole = chance.choice(saving.dtypes)  # of embedding and head alike: of two that are tied PEFT takes the last
    tensors = {name: tensor.to(whole if "lora_" not in name else chance.choice(saving.dtypes)).contiguous()
               for name, tensor in load_file(folder / SAFETENSORS).items()}
    (folder / SAFETENSORS).unlink()
    if saving.safetensors:
        save_file(tensors, folder / SAFETENSORS, {"format": "pt"})
    else:
        torch.save(tensors, folder / PICKLE)
    config = json.loads((folder / CONFIG).read_text())
    if chance.random() < 0.3:  # as older versions wrote them
        config = {name: value for name, value in config.items() if value not in (None, False, {}) or name == "bias"}
    (folder / CONFIG).write_text(json.dumps(config))
