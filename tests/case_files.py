"""Models and adapters that the terminal cases of a bank open."""
from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file

SCRIPTS = {"emoji": "Hi😀ok", "wide": "漢字", "loop": "ticktock"}
"""what a script writes, without spaces: lines are broken where they end"""
_GO = "{{ '<|im_start|>assistant\n' }}{{ '<|go:' + messages[-1]['content'] + '|>' }}"


def scripted_base(folder: Path, source: Path) -> Path:
    """A copy of the bank's scripted base whose chat template lets a message that names a script begin it; its context is longer."""
    shutil.copytree(source, folder)
    _edit(folder / "tokenizer_config.json", lambda config: config | {
        "chat_template": config["chat_template"].replace("{{ '<|im_start|>assistant\n' }}", _GO)})
    _edit(folder / "config.json", lambda config: config | {"max_position_embeddings": 8192})
    return folder


def big_base(folder: Path, source: Path, megabytes: int) -> Path:
    """The base with MLP matrices that take so much: zeros, which lie in no block of the disk."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    hidden = config["hidden_size"]
    width = (megabytes << 20) // (3 * hidden * 2)
    _edit(folder / "config.json", lambda config: config | {"intermediate_size": width})
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header, body = json.loads(data[8:8 + size]), data[8 + size:]
    end = len(body)
    for name in header:
        if ".mlp." in name:
            shape = [hidden, width] if "down_proj" in name else [width, hidden]
            header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [end, end := end + hidden * width * 2]}
    kept = sorted((entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__")
    moved, packed = 0, b""
    for (start, stop), name in kept:  # without a gap where the small matrices lay
        if start < len(body):
            packed += body[start:stop]
        header[name]["data_offsets"] = [moved, moved := moved + stop - start]
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + packed)
    os.truncate(file, 8 + len(head) + moved)
    return folder


def named_adapter(folder: Path, text: str) -> Path:
    """An adapter of the scripted base that does nothing much; its folder is called `text`, without what no name holds."""
    made = folder / text.replace("/", "")
    made.mkdir(parents=True)
    (made / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q_proj"]}))
    prefix = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    save_file({f"{prefix}A.weight": torch.full((1, 64), 0.01), f"{prefix}B.weight": torch.full((64, 1), 0.01)},
              made / "adapter_model.safetensors")
    return made


def _edit(file: Path, change) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text(encoding="utf-8"))), ensure_ascii=False), encoding="utf-8")
