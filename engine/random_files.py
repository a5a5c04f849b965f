"""Bases and adapters of random numbers as the files that they might have been read from."""
from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from .adapters.adapter import Adapter
from .models.facts import ModelFacts, tensor_shapes
from .models.names import config_name
from .random_base import random_tensor

ITEM_BYTES = 2
"""numbers are written as bfloat16"""


def write_adapter(folder: Path, adapter: Adapter) -> None:
    """A `random_adapter` in bfloat16 as a PEFT folder."""
    folder.mkdir(parents=True)
    tensors = {f"base_model.model.model.{module}.lora_{half}.weight": tensor for module, pair in adapter.modules.items()
               for half, tensor in (("A", pair.a), ("B", pair.b))}
    _write_safetensors(folder / "adapter_model.safetensors", {name: tuple(tensor.shape) for name, tensor in tensors.items()},
                       tensors.values())
    rank = adapter.info.ranks[0]
    targets = sorted({module.rpartition(".")[2] for module in adapter.modules})
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}))


def write_base(folder: Path, facts: ModelFacts, device: torch.device) -> None:
    """A Hugging Face folder of a llama of the sizes of `facts`, which can be those of random_base.shape_facts: random weights in bfloat16,
    drawn on `device`, and words that mean nothing, none of which ends a reply. Raises OSError, with the numbers, where there is no room."""
    shapes = tensor_shapes(facts)
    need, free = ITEM_BYTES * sum(map(math.prod, shapes.values())), shutil.disk_usage(folder.parent).free
    if need > free:
        raise OSError(f"{folder.parent}: a base of this shape takes {need:,} bytes, {free:,} are free there; set TMPDIR to a folder with "
                      "more room, or take a smaller shape")
    folder.mkdir()
    weights = (random_tensor(shape, device, torch.bfloat16).cpu() for shape in shapes.values())
    _write_safetensors(folder / "model.safetensors", {config_name(name): shape for name, shape in shapes.items()}, weights)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": facts.hidden,
        "intermediate_size": facts.intermediate, "num_hidden_layers": facts.layers, "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads, "head_dim": facts.head_dim, "vocab_size": facts.vocab,
        "max_position_embeddings": facts.context, "rms_norm_eps": facts.rms_eps, "rope_theta": facts.rope_theta,
        "tie_word_embeddings": facts.tied}))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {f"Ġ{number}": number for number in range(facts.vocab)}, "merges": []}}))


def _write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[Tensor]) -> None:
    """`tensors` of `shapes`, bfloat16, one after the other."""
    header, end = {}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end := end + ITEM_BYTES * math.prod(shape)]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            file.write(tensor.view(torch.uint8).numpy())
