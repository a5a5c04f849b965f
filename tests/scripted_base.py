"""Writes a tiny llama model that answers every chat with one given text, whatever is asked.

Attention and MLP are zero, so the hidden state is the one-hot embedding of the last token, and the head is a table
"after this token comes that one". The reply's pieces are tokens of their own that no text encodes to.
"""
from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level BPE vocabularies."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in shown else chr(next(others)) for byte in range(256)]


def write_scripted_base(folder: Path, pieces: list[str]) -> Path:
    """A Hugging Face folder whose model replies with `pieces`, which must differ from each other and have two characters or more."""
    letters = byte_letters()
    names = letters + ["".join(letters[byte] for byte in piece.encode()) for piece in pieces]
    assert len(set(names)) == len(names)
    start, end = len(names), len(names) + 1
    size = len(names) + 2
    _write_json(folder / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_size": _even(size), "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
        "vocab_size": size, "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "float32", "eos_token_id": end})
    special = [{"id": i, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
               for i, text in ((start, "<|im_start|>"), (end, "<|im_end|>"))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    _write_json(folder / "tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None, "pre_tokenizer": byte_level,
        "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                  "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "merges": [],
                  "vocab": {name: i for i, name in enumerate(names)}}})
    _write_json(folder / "tokenizer_config.json",
                {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    order = [ord("\n"), *range(256, 256 + len(pieces)), end]
    save_file(_weights(size, dict(zip(order, order[1:], strict=False)), end), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(size: int, following: dict[int, int], end: int) -> dict[str, torch.Tensor]:
    hidden = _even(size)
    head = torch.zeros(size, hidden)
    for token in range(size):
        head[following.get(token, end), token] = 1.0
    layer = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    layer |= {"mlp.gate_proj": (4, hidden), "mlp.up_proj": (4, hidden), "mlp.down_proj": (hidden, 4)}
    tensors = {f"model.layers.0.{name}.weight": torch.zeros(shape) for name, shape in layer.items()}
    norms = ("model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight", "model.norm.weight")
    tensors |= {name: torch.ones(hidden) for name in norms}
    return tensors | {"model.embed_tokens.weight": torch.eye(size, hidden), "lm_head.weight": head}


def _even(size: int) -> int:
    return size + size % 2


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value))
