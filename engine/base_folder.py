"""A base out of a Hugging Face folder: config.json, safetensors weights, tokenizer.json."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from .base_fused import split_shared_mlp
from .base_parts import TURN_END_TEXTS, TURN_MARKS, BaseFile, TokenizerSource, pick_tensors, token_id, type_histogram
from .base_wrapped import is_wrapped, language_config, language_tensors
from .hub_cache import cache_name
from .models import ARCHITECTURES_CONFIG, WRAPPED
from .models.facts import ModelFacts
from .models.names import config_name
from .tokenizer_folder import AddedTokens, chat_template, folder_tokenizer, rowless_note
from .weights.entry import TensorEntry
from .weights.files import FormatError, present, read_json_object, show
from .weights.safetensors import read_folder


def read_folder_base(folder: Path) -> BaseFile:
    """The base in a folder. Raises FormatError with the reason when it cannot run here, OSError."""
    config_path = folder / "config.json"
    if not present(config_path):
        if (folder / "adapter_config.json").exists():
            raise FormatError(f"{folder}: is a LoRA adapter, not a base model; open a base first and add this folder as an adapter")
        raise FormatError(f"{folder}: has no config.json, so it is no Hugging Face model folder; give the folder that holds config.json, "
                          "or a GGUF file")
    config = read_json_object(config_path)
    weights = read_folder(folder)
    found, notes = _canonical_prefix(weights.tensors), []
    if is_wrapped(config):
        config = language_config(config, weights.tensors, config_path)
        found, unseen = language_tensors(weights.tensors, weights.path)
        notes += [unseen] if unseen else []
    facts = _facts(config, config_path)
    if facts.tied and "lm_head.weight" in found:
        facts = replace(facts, tied=False)
        notes.append("tie_word_embeddings is true, but the file has an lm_head.weight: it is used, beside the embedding")
    apart = split_shared_mlp(facts, found)
    tensors = pick_tensors(facts, apart, config_name, weights.path, ignored=lambda name: name.endswith("rotary_emb.inv_freq"))
    tokenizer, added = folder_tokenizer(folder, config, facts.vocab)
    notes += filter(None, [rowless_note(tokenizer.rowless)])
    return BaseFile(
        path=folder, name=cache_name(folder) or folder.resolve().name, format="safetensors", facts=facts, tensors=tensors,
        tokenizer=tokenizer,
        chat_template=chat_template(folder), end_tokens=_end_tokens(folder, config, tokenizer, added, facts),
        file_bytes=weights.file_bytes, weight_types=type_histogram(tensors), details=_details(config), notes=(*facts.notes, *notes),
    )


def _facts(config: dict[str, Any], path: Path) -> ModelFacts:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES_CONFIG:
        code = " (and its own code in auto_map is never run)" if config.get("auto_map") else ""
        names = ", ".join((*ARCHITECTURES_CONFIG, *WRAPPED))
        raise FormatError(f"{path}: model_type {show(kind)} is not a supported architecture{code}; supported: {names}")
    return ARCHITECTURES_CONFIG[kind](config, path)


def _canonical_prefix(tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Files of a bare LlamaModel lack the "model." that files of LlamaForCausalLM have."""
    if any(name.startswith("model.") for name in tensors):
        return tensors
    return {config_name(name): entry for name, entry in tensors.items()}


def _end_tokens(folder: Path, config: dict[str, Any], source: TokenizerSource, added: AddedTokens, facts: ModelFacts) -> tuple[int, ...]:
    ends = {source.eos} if source.eos is not None else set()
    ends |= {number for text, (number, special) in added.items() if text in TURN_END_TEXTS and (special or text in TURN_MARKS)}
    path = folder / "generation_config.json"
    for fields, where in ((config, folder / "config.json"), (read_json_object(path) if present(path) else {}, path)):
        value = fields.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            checked = token_id(item, facts.vocab, "eos_token_id", where)
            ends |= {checked} if checked is not None else set()
    return tuple(sorted(ends))


def _details(config: dict[str, Any]) -> dict[str, str]:
    dtype = config.get("dtype", config.get("torch_dtype"))
    fields = {"name": config.get("_name_or_path"), "dtype": dtype, "transformers_version": config.get("transformers_version")}
    return {key: value for key, value in fields.items() if isinstance(value, str) and value}
