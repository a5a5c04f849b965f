"""The tokens of a request: the base's, or those of an adapter in its mix that adds some."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .adapters.adapter import VOCABULARY, Adapter, AdapterWeights
from .adapters.errors import AdapterError
from .mix import MixError
from .weights.files import FormatError

if TYPE_CHECKING:
    from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    tokenizer: Tokenizer
    rows: int
    """of the embedding: ids from 0 to one less can be read"""
    head_rows: int
    """of the head: ids from 0 to one less can be written"""
    tokens: Mapping[str, tuple[int, bool]] = field(default_factory=dict)
    """what an adapter adds to the base's, spelling -> (id, special)"""
    end_tokens: tuple[int, ...] = ()
    """of what is added, those that end a reply"""

    @property
    def added(self) -> frozenset[int]:
        """Ids that another vocabulary may not have."""
        return frozenset(number for number, _ in self.tokens.values())

    def lost(self, ids: Sequence[int], before: Vocabulary) -> int | None:
        """The first of `ids`, written with the vocabulary `before`, that has no meaning in this one."""
        gone = before.added - self.added
        return next((number for number in ids if number >= self.rows or number in gone), None)


def own_vocabulary(adapter: Adapter, base: Vocabulary) -> tuple[Vocabulary | None, tuple[str, ...]]:
    """What `adapter` adds to the words of its base (None for nothing), and what to say of it.

    Raises AdapterError or FormatError for added tokens that cannot be used.
    """
    from .tokenizer.added import read_added_vocabulary

    rows, head_rows = (_reached(adapter.weights, name, base.rows) for name in VOCABULARY)
    _check_rows(adapter, base.rows, rows, head_rows)
    if adapter.weights.tokenizer_json is None:
        return (Vocabulary(base.tokenizer, rows, head_rows) if rows != base.rows else None), ()
    try:
        added = read_added_vocabulary(adapter.weights.tokenizer_json.parent, base.tokenizer, rows)
    except FormatError as error:
        if rows != base.rows:
            raise
        return None, (f"the tokenizer beside it is not used, the base's is: {error}",)
    if rows == base.rows and not added.tokens:
        return None, added.notes
    return Vocabulary(added.applied_to(base.tokenizer), rows, head_rows, added.tokens, added.end_tokens), added.notes


def _reached(weights: AdapterWeights, name: str, base: int) -> int:
    """Rows of a matrix with the adapter."""
    whole = weights.replaced[name].shape[0] if name in weights.replaced else base
    trained = weights.rows.get(name)
    return whole if trained is None or not len(trained.ids) else max(whole, int(trained.ids[-1]) + 1)


def _check_rows(adapter: Adapter, base: int, rows: int, head_rows: int) -> None:
    weights, path = adapter.weights, adapter.info.path
    for name in VOCABULARY:
        pair = weights.embedding if name == "embed_tokens.weight" else weights.modules.get("lm_head")
        if pair is not None and name in weights.rows:
            raise AdapterError(f"{path}: has both LoRA on and trained rows of {name}, which PEFT cannot run either; train one of them")
        if pair is not None and pair.magnitude is not None and max(rows, head_rows) > base:
            raise AdapterError(f"{path}: has DoRA on {name} and adds tokens: the lengths of its rows are of another matrix than the "
                               "base's; it is not loaded")
    if head_rows > rows:
        raise AdapterError(f"{path}: has {head_rows - rows} rows more for lm_head.weight than for embed_tokens.weight: what it writes "
                           "could not be read; save it with both matrices (save_embedding_layers)")
    if rows > base and adapter.info.invocation_tokens:
        raise AdapterError(f"{path}: adds {rows - base} tokens and has an invocation; before its invocation such an adapter is off "
                           "and its tokens would stand for nothing, so it is not loaded")


def vocabulary_of(base: Vocabulary, added: Iterable[tuple[str, Vocabulary]]) -> Vocabulary:
    """That of a request whose mix has these adapters by name. Raises MixError when two of them add different tokens."""
    found: tuple[str, Vocabulary] | None = None
    for name, vocabulary in added:
        if found is None:
            found = name, vocabulary
        elif not vocabulary.tokens or (vocabulary.tokens, vocabulary.rows) != (found[1].tokens, found[1].rows):
            raise MixError(f"adapters {found[0]!r} and {name!r} add different tokens to the vocabulary"
                           f"{'' if vocabulary.tokens else ', or do not say which'}; take one of them out of the mix")
    return found[1] if found else base
