"""What is known of a base before its weights are read, and the checks that both formats share. No torch."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .models.facts import ModelFacts, tensor_shapes
from .weights.entry import READABLE, READABLE_TEXT, TensorEntry
from .weights.files import FormatError, show

TURN_END_TEXTS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end_of_turn|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot|>",
    "</s>", "<EOT>", "<|END_OF_TURN_TOKEN|>", "<|return|>",
})
"""control tokens that end a turn in the families in use, whether or not a file lists them as its end token"""
TURN_MARKS = TURN_END_TEXTS - {"</s>", "<EOT>"} | {
    "<|im_start|>", "<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<|start_of_role|>", "<|end_of_role|>",
    "<|begin_of_text|>",
    "<|startoftext|>", "<|start|>", "<|message|>",
}
"""tokens that templates build turns of and that no text holds by chance: they are special even where a file says they are plain"""


@dataclass(frozen=True)
class TokenizerSource:
    """Where a tokenizer comes from, and what the files say of its special tokens."""

    metadata: Mapping[str, Any] | None = field(default=None, repr=False)
    """tokenizer.ggml.*: of the base's own GGUF file or, as such a file would say it, of the file at `path`; None: a tokenizer.json"""
    path: Path | None = None
    """tokenizer.json or another file of the folder; None for GGUF"""
    bos: int | None = None
    eos: int | None = None
    add_bos: bool | None = None
    """put BOS before plain text; None leaves it to the tokenizer.json"""
    texts: Mapping[str, str] = field(default_factory=dict)
    """bos_token, eos_token, unk_token, pad_token as templates name them"""
    added: Mapping[str, int] = field(default_factory=dict, repr=False)
    """spelling -> id of the added tokens as a tokenizer.json declares them"""
    more: Mapping[str, tuple[int, bool]] = field(default_factory=dict, repr=False)
    """spelling -> (id, special) of tokens that only other files of the folder name, beside its tokenizer.json"""
    rowless: tuple[str, ...] = field(default=(), repr=False)
    """added tokens of the files that have no row in the embedding: they are none here, their text is plain text"""
    strips: Mapping[int, tuple[bool, bool]] = field(default_factory=dict, repr=False)
    """id of an added token -> whether it takes the white space before it, after it; for GGUF, which does not say"""


@dataclass(frozen=True)
class BaseFile:
    """A base as its headers describe it. `tensors` has every tensor of `tensor_shapes(facts)` by canonical name."""

    path: Path
    name: str
    format: Literal["gguf", "safetensors"]
    facts: ModelFacts
    tensors: dict[str, TensorEntry] = field(repr=False)
    tokenizer: TokenizerSource
    chat_template: str | None = field(repr=False)
    end_tokens: tuple[int, ...]
    """ids that end a reply, ascending"""
    file_bytes: int
    weight_types: dict[str, int]
    """tensor type in the file -> number of tensors"""
    details: dict[str, str]
    """what the file says of itself (licence, author, ...); untrusted text"""
    notes: tuple[str, ...] = ()
    """things a user should know that did not stop the opening"""

    @property
    def parameters(self) -> int:
        return sum(entry.elements for entry in self.tensors.values())


def pick_tensors(
    facts: ModelFacts, found: Mapping[str, TensorEntry], file_name: Callable[[str], str], path: Path, ignored: Callable[[str], bool],
) -> dict[str, TensorEntry]:
    """The tensors that `facts` asks for, by canonical name; `file_name` turns such a name into the file's.

    Raises FormatError for a tensor that is missing, misshapen, of a type that cannot be read, or left over and not `ignored`:
    a tensor that nobody uses means another model than the header says.
    """
    expected = {file_name(name): (name, shape) for name, shape in tensor_shapes(facts).items()}
    missing = [name for name in expected if name not in found]
    if missing:
        more = f" and {len(missing) - 1:,} more" if len(missing) > 1 else ""
        raise FormatError(f"{path}: tensor {missing[0]}{more} is missing; the file is incomplete or not a plain {facts.architecture} model")
    spare = sorted(name for name in found if name not in expected and not ignored(name))
    if spare:
        raise FormatError(f"{path}: holds tensor {show(spare[0])}{f' and {len(spare) - 1:,} more' if len(spare) > 1 else ''} that a plain "
                          f"{facts.architecture} model does not use; it is another kind of model than it says")
    picked = {}
    for name_in_file, (name, shape) in expected.items():
        entry = found[name_in_file]
        if entry.shape != shape:
            raise FormatError(f"{path}: tensor {name_in_file} has the shape {list(entry.shape)} where {list(shape)} is expected "
                              f"(hidden size {facts.hidden}, vocabulary {facts.vocab})")
        if entry.type not in READABLE:
            raise FormatError(f"{path}: tensor {name_in_file} is of type {entry.type}, which is not supported yet; "
                              f"use a file of {READABLE_TEXT}")
        picked[name] = entry
    return picked


def type_histogram(entries: Mapping[str, TensorEntry]) -> dict[str, int]:
    """Tensor type -> number of tensors, most frequent first."""
    return dict(Counter(entry.type for entry in entries.values()).most_common())


def token_id(value: Any, vocab: int, what: str, path: Path) -> int | None:
    """`value` as a token id, None for none. Raises FormatError for one outside of the vocabulary."""
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < vocab:
        raise FormatError(f"{path}: {what} is {show(value)}, outside of the vocabulary of {vocab:,} tokens; the file is corrupt")
    return value
