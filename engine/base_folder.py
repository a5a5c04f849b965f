"""A base out of a Hugging Face folder: config.json, safetensors weights, tokenizer.json."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from .base_parts import TURN_END_TEXTS, BaseFile, TokenizerSource, pick_tensors, token_id, type_histogram
from .models import ARCHITECTURES_CONFIG
from .models.facts import ModelFacts
from .models.llama import config_name
from .weights.entry import TensorEntry
from .weights.files import FormatError, read_bounded, read_json_object, show
from .weights.safetensors import read_folder

MAX_TEMPLATE_BYTES = 1 << 20
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_folder_base(folder: Path) -> BaseFile:
    """The base in a folder. Raises FormatError with the reason when it cannot run here, OSError."""
    config_path = folder / "config.json"
    if not config_path.exists():
        if (folder / "adapter_config.json").exists():
            raise FormatError(f"{folder}: is a LoRA adapter, not a base model; open a base first and add this folder as an adapter")
        raise FormatError(f"{folder}: has no config.json, so it is no Hugging Face model folder; give the folder that holds config.json, or a GGUF file")
    config = read_json_object(config_path)
    facts = _facts(config, config_path)
    weights = read_folder(folder)
    found, notes = _canonical_prefix(weights.tensors), []
    if facts.tied and "lm_head.weight" in found:
        notes.append("tie_word_embeddings is true: the lm_head.weight in the file is not used")
    tensors = pick_tensors(facts, found, config_name, weights.path, ignored=lambda name: _ignored(name, facts))
    tokenizer, added = _tokenizer(folder, config, facts)
    return BaseFile(
        path=folder, name=folder.resolve().name, format="safetensors", facts=facts, tensors=tensors, tokenizer=tokenizer,
        chat_template=_chat_template(folder), end_tokens=_end_tokens(folder, config, tokenizer, added, facts),
        file_bytes=weights.file_bytes, weight_types=type_histogram(tensors), details=_details(config), notes=tuple(notes),
    )


def _facts(config: dict[str, Any], path: Path) -> ModelFacts:
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES_CONFIG:
        code = " (and its own code in auto_map is never run)" if config.get("auto_map") else ""
        raise FormatError(f"{path}: model_type {show(kind)} is not a supported architecture{code}; supported: {', '.join(ARCHITECTURES_CONFIG)}")
    return ARCHITECTURES_CONFIG[kind](config, path)


def _canonical_prefix(tensors: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """Files of a bare LlamaModel lack the "model." that files of LlamaForCausalLM have."""
    if any(name.startswith("model.") for name in tensors):
        return tensors
    return {config_name(name): entry for name, entry in tensors.items()}


def _ignored(name: str, facts: ModelFacts) -> bool:
    return name.endswith("rotary_emb.inv_freq") or facts.tied and name == "lm_head.weight"


def _tokenizer(folder: Path, config: dict[str, Any], facts: ModelFacts) -> tuple[TokenizerSource, dict[str, tuple[int, bool]]]:
    """The source, and content -> (id, special) of the added tokens."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise FormatError(f"{folder}: has no tokenizer.json, which is needed; convert the tokenizer with transformers "
                          "(AutoTokenizer.from_pretrained(...).save_pretrained(...)) or use a GGUF of the model")
    settings: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= read_json_object(folder / file) if (folder / file).exists() else {}
    known = read_json_object(path)
    added = _added_tokens(known, path, facts.vocab)
    texts = {name: text for name in _TOKEN_NAMES if (text := _token_text(settings.get(name))) is not None}
    bos = _id_of(texts.get("bos_token"), known, added)
    eos = _id_of(texts.get("eos_token"), known, added)
    add_bos = settings.get("add_bos_token")
    return TokenizerSource(
        json_path=path, texts=texts,
        bos=bos if bos is not None else _first_id(config.get("bos_token_id"), facts, "bos_token_id", folder),
        eos=eos if eos is not None else _first_id(config.get("eos_token_id"), facts, "eos_token_id", folder),
        add_bos=add_bos if isinstance(add_bos, bool) else None,
    ), added


def _added_tokens(known: dict[str, Any], path: Path, vocab: int) -> dict[str, tuple[int, bool]]:
    tokens, added = known.get("added_tokens") or [], {}
    if not isinstance(tokens, list) or not all(isinstance(token, dict) and isinstance(token.get("content"), str) for token in tokens):
        raise FormatError(f"{path}: added_tokens is no list of tokens with their content; download the file again")
    for token in tokens:
        text = token["content"]
        added[text] = (token_id(token.get("id", -1), vocab, f"the id of added token {show(text)}", path), token.get("special") is True)
    return added


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json: its text, or an object that has it as content."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _id_of(text: str | None, known: dict[str, Any], added: dict[str, tuple[int, bool]]) -> int | None:
    if text is None:
        return None
    if text in added:
        return added[text][0]
    model = known.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    found = vocab.get(text) if isinstance(vocab, dict) else None
    return found if type(found) is int else None


def _first_id(value: Any, facts: ModelFacts, what: str, folder: Path) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    return token_id(value, facts.vocab, what, folder / "config.json")


def _chat_template(folder: Path) -> str | None:
    """chat_template.jinja wins; then tokenizer_config.json, its "default" where there are several."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return read_bounded(file, MAX_TEMPLATE_BYTES).decode("utf-8", errors="replace")
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = read_json_object(folder / name).get("chat_template") if (folder / name).exists() else None
        if isinstance(template, list):
            template = next((entry.get("template") for entry in template if isinstance(entry, dict) and entry.get("name") == "default"), None)
        if isinstance(template, str):
            return template
    return None


def _end_tokens(folder: Path, config: dict[str, Any], source: TokenizerSource, added: dict[str, tuple[int, bool]], facts: ModelFacts) -> tuple[int, ...]:
    ends = {source.eos} if source.eos is not None else set()
    ends |= {number for text, (number, special) in added.items() if special and text in TURN_END_TEXTS}
    path = folder / "generation_config.json"
    for fields, where in ((config, folder / "config.json"), (read_json_object(path) if path.exists() else {}, path)):
        value = fields.get("eos_token_id")
        for item in value if isinstance(value, list) else [value]:
            checked = token_id(item, facts.vocab, "eos_token_id", where)
            ends |= {checked} if checked is not None else set()
    return tuple(sorted(ends))


def _details(config: dict[str, Any]) -> dict[str, str]:
    dtype = config.get("dtype", config.get("torch_dtype"))
    fields = {"name": config.get("_name_or_path"), "dtype": dtype, "transformers_version": config.get("transformers_version")}
    return {key: value for key, value in fields.items() if isinstance(value, str) and value}
