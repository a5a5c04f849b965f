"""A base out of a GGUF file or the parts of one."""
from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from .base_fused import split_qkv
from .base_parts import TURN_END_TEXTS, TURN_MARKS, BaseFile, TokenizerSource, pick_tensors, token_id, type_histogram
from .models import ARCHITECTURES_GGUF
from .models.names import gguf_name
from .weights.files import FormatError, show
from .weights.gguf import GgufHeader
from .weights.gguf_parts import read_model

_CONTROL, _USER_DEFINED = 3, 4
_DETAILS = ("general.name", "general.basename", "general.organization", "general.author", "general.finetune", "general.size_label",
            "general.license", "general.description", "general.url", "general.source.url", "general.quantized_by")
NO_PRE_TOKENIZER = "tokenizer.ggml.pre is missing: text is cut by the default rule, which may not be the model's own"
NO_SUCH_TOKEN = "metadata tokenizer.ggml.{} is {:,}, a token that the vocabulary has not: there is none"
_SPARE_IDS = ("padding_token_id", "unknown_token_id")
"""no text is computed with them: converters left ids of tokens there that were never added"""
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_TOKEN_TEXTS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id", "pad_token": "padding_token_id"}


def read_gguf_base(path: Path) -> BaseFile:
    """The base in a GGUF file. Raises FormatError with the reason when it cannot run here, OSError."""
    header = read_model(path)
    metadata = header.metadata
    _refuse_other_kinds(header)
    facts = ARCHITECTURES_GGUF[metadata["general.architecture"]](metadata, header.tensors, path)
    tensors = pick_tensors(facts, split_qkv(facts, header.tensors), lambda name: gguf_name(name, facts), path, ignored=lambda name: False)
    tokens, kinds = _vocabulary(metadata, facts.vocab, path)
    spare = {key: value for key in _SPARE_IDS if type(value := metadata.get(f"tokenizer.ggml.{key}")) is int and value >= len(tokens)}
    ids = {key: token_id(metadata.get(f"tokenizer.ggml.{key}"), len(tokens), f"metadata tokenizer.ggml.{key}", path)
           for key in {*_END_IDS, *_TOKEN_TEXTS.values()} - spare.keys()}
    ids |= dict.fromkeys(spare)
    source = TokenizerSource(
        metadata={key: value for key, value in metadata.items() if key.startswith("tokenizer.")},
        bos=ids["bos_token_id"], eos=ids["eos_token_id"], add_bos=_flag(metadata, "tokenizer.ggml.add_bos_token"),
        texts={name: tokens[ids[key]] for name, key in _TOKEN_TEXTS.items() if ids[key] is not None},
        strips=_strips(metadata, tokens, kinds),
    )
    ends = {ids[key] for key in _END_IDS} - {None}
    ends |= {i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
             if text in TURN_END_TEXTS and (kind == _CONTROL or text in TURN_MARKS)}
    template = metadata.get("tokenizer.chat_template")
    return BaseFile(
        path=path, name=_name(path), format="gguf", facts=facts, tensors=tensors, tokenizer=source,
        chat_template=template if isinstance(template, str) and template else None, end_tokens=tuple(sorted(ends)),
        file_bytes=header.file_bytes, weight_types=type_histogram(tensors),
        details={key.removeprefix("general."): str(metadata[key]) for key in _DETAILS if isinstance(metadata.get(key), str)},
        notes=(*facts.notes, *(NO_SUCH_TOKEN.format(key, number) for key, number in spare.items()), *_pre_tokenizer_note(metadata)),
    )


def _pre_tokenizer_note(metadata: dict[str, Any]) -> tuple[str, ...]:
    missing = metadata.get("tokenizer.ggml.model") == "gpt2" and "tokenizer.ggml.pre" not in metadata
    return (NO_PRE_TOKENIZER,) if missing else ()


def _refuse_other_kinds(header: GgufHeader) -> None:
    metadata, path = header.metadata, header.path
    if metadata.get("general.type") == "adapter" or "adapter.type" in metadata:
        raise FormatError(f"{path}: is a LoRA adapter, not a base model; open a base first and add this file as an adapter")
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES_GGUF:
        what = ("has no general.architecture" if architecture is None
                else f"has the architecture {show(architecture)}, which is not supported")
        raise FormatError(f"{path}: {what}; supported: {', '.join(ARCHITECTURES_GGUF)}")


def _vocabulary(metadata: dict[str, Any], vocab: int, path: Path) -> tuple[list[str], Any]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise FormatError(f"{path}: holds no tokenizer (metadata tokenizer.ggml.tokens); a GGUF of a language model is expected")
    if len(tokens) != vocab:
        raise FormatError(f"{path}: lists {len(tokens):,} tokens where the embedding has {vocab:,} rows (the vocabulary); "
                          "the file is corrupt")
    kinds = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if isinstance(kinds, str) or not hasattr(kinds, "__len__") or len(kinds) != len(tokens):
        raise FormatError(f"{path}: metadata tokenizer.ggml.token_type does not have one type for each of {len(tokens):,} tokens; "
                          "the file is corrupt")
    return tokens, kinds


def _strips(metadata: dict[str, Any], tokens: list[str], kinds: Any) -> dict[int, tuple[bool, bool]]:
    """The added tokens of Phi-3 and Phi-3.5 take the white space after them, but for four; GGUF has no key that says so."""
    if metadata["general.architecture"] != "phi3" or metadata.get("tokenizer.ggml.model") != "llama":
        return {}
    return {i: (False, True) for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True))
            if text == "</s>" or kind in (_CONTROL, _USER_DEFINED) and text not in ("<unk>", "<s>", "<|endoftext|>")}


def _flag(metadata: dict[str, Any], key: str) -> bool | None:
    value = metadata.get(key)
    return value if isinstance(value, bool) else None


def _name(path: Path) -> str:
    """The file's name: general.name is what a converter made of a folder, often no name that its user knows."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
