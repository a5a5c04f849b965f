"""How the base cuts a text that may become an invocation, and where it would be found."""
from __future__ import annotations

from .adapters.config import MAX_INVOCATION
from .alora import find_last, nearest_miss
from .chat import MAX_CHARACTERS_PER_TOKEN, check_length, prompt_ids
from .failures import sentence
from .loaded import LoadedModel
from .protocol import Prompt, Tokenize, Tokenized


def tokenized(model: LoadedModel, command: Tokenize) -> Tokenized:
    """The answer to `command`, also where the text can be no invocation."""
    text, tokenizer = command.invocation, model.tokenizer
    if len(text) > MAX_INVOCATION * MAX_CHARACTERS_PER_TOKEN:
        return Tokenized(command.ask_id, (), (), detail=f"a text of {len(text):,} characters is too long for an invocation, which has at "
                                                        f"most {MAX_INVOCATION} tokens")
    ids = tuple(tokenizer.encode(text, special=True)) if text else ()
    if len(ids) > MAX_INVOCATION:
        return Tokenized(command.ask_id, (), (), detail=f"the text has {len(ids):,} tokens, over an invocation's limit of {MAX_INVOCATION}")
    if not ids:
        detail = "the text has no tokens in this base" if text else "without a text the adapter is a plain LoRA: it acts on every token"
        return Tokenized(command.ask_id, (), (), detail=detail)
    start, detail = _find(model, ids, command.prompt) if command.prompt is not None else (-1, "")
    return Tokenized(command.ask_id, ids, tuple(tokenizer.token_text(ids)), start >= 0, start, detail)


def _find(model: LoadedModel, ids: tuple[int, ...], prompt: Prompt) -> tuple[int, str]:
    """(start of the last exact occurrence or -1, why there is none)."""
    try:
        check_length(prompt, model.config.context)
        inside, _ = prompt_ids(model.tokenizer, model.base.chat_template, prompt)
    except ValueError as error:
        return -1, sentence(error)
    start = find_last(inside, ids)
    return start, nearest_miss(inside, ids, model.store.text) if start < 0 else ""
