"""The default GGUF base as a Hugging Face model and tokenizer, for training and for reference numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFReader, TokenType, get_tensor_name_map
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def load_base(path: Path | None, dtype: torch.dtype) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Dequantises a llama-architecture GGUF into a frozen model of `dtype` with eager attention, and its tokenizer.

    `path` None means the default model, fetched when it is not here yet. OSError when it cannot be had.
    """
    if path is None:
        from ..engine.default_model import ensure_default_model  # only this case needs the product's cache

        path = ensure_default_model()
    reader = GGUFReader(path)
    values = {key: field.contents() for key, field in reader.fields.items()}
    config = _config(values)
    model = LlamaForCausalLM.from_pretrained(
        None, config=config, state_dict=_weights(reader, config), dtype=dtype, attn_implementation="eager"
    )
    model.config.name_or_path = path.stem
    return model.requires_grad_(False).eval(), _tokenizer(values)


def _config(values: dict[str, Any]) -> LlamaConfig:
    end = values["tokenizer.ggml.eos_token_id"]
    return LlamaConfig(
        vocab_size=values["llama.vocab_size"],
        hidden_size=values["llama.embedding_length"],
        intermediate_size=values["llama.feed_forward_length"],
        num_hidden_layers=values["llama.block_count"],
        num_attention_heads=values["llama.attention.head_count"],
        num_key_value_heads=values["llama.attention.head_count_kv"],
        max_position_embeddings=values["llama.context_length"],
        rms_norm_eps=values["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=values["llama.rope.freq_base"],
        tie_word_embeddings=True,
        bos_token_id=values["tokenizer.ggml.bos_token_id"],
        eos_token_id=end,
        pad_token_id=end,
    )


def _weights(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """fp32 tensors by the model's names; the output matrix of this base is its embedding."""
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    with torch.device("meta"):
        wanted = LlamaForCausalLM(config).state_dict()
    found = {}
    for name in wanted:
        tensor = tensors[names.get_name("model.embed_tokens.weight" if name == "lm_head.weight" else name, (".weight",))]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        kind = name.split(".")[-2]
        found[name] = _unpermute(weight, heads[kind]) if kind in heads else weight
    return found


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps a head's rotary pairs as neighbouring rows, Hugging Face as two halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer(values: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The BPE of a GGUF with `tokenizer.ggml.pre` = smollm.

    Built by hand: transformers' own GGUF tokenizer leaves out the splitting of digits that this base was trained with.
    """
    tokens, kinds, merges = (values[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "merges"))
    bpe = models.BPE({token: i for i, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges])
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    end = tokens[values["tokenizer.ggml.eos_token_id"]]
    template = values["tokenizer.chat_template"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=end, chat_template=template)
