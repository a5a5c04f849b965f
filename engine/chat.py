"""Prompts -> token ids: chat templates, raw text, plain ids."""
from __future__ import annotations

import re
from pathlib import Path

from .adapters.peft import CONFIG
from .protocol import Chat, Message, Prompt, RawText, TokenIds
from .template import RENDERER
from .tokenizer import SpecialTokens, Tokenizer
from .tokenizer_folder import chat_template
from .weights.files import FormatError, present

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""noncharacters that no text has: they mark what looks like a special token but came from a message"""
MAX_CHARACTERS_PER_TOKEN = 64
"""of a prompt as a whole; text is at 3 to 5, long runs of spaces at 20 to 30"""
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")


def check_length(prompt: Prompt, context: int) -> None:
    """Raise ValueError for a text that cannot fit, before the time is spent to tokenise it."""
    match prompt:
        case Chat():
            size = len(prompt.opening) + sum(len(message.role) + len(message.content) + 1 for message in prompt.messages)
        case RawText():
            size = len(prompt.text)
        case _:
            size = 0
    if size > context * MAX_CHARACTERS_PER_TOKEN:
        raise ValueError(f"the prompt has {size:,} characters, too many for the context of {context} tokens; "
                         "shorten it or load the model with a larger context")


def prompt_ids(tokenizer: Tokenizer, template: str | None, prompt: Prompt) -> tuple[list[int], str]:
    """Ids to feed the model, and the text they stand for.

    Chat: the template's text, its special tokens parsed, those spelled inside messages left as text; no BOS but what
    the template writes. Without a template, `fallback_text` and the BOS of plain text. RawText: special tokens parsed,
    BOS in front where the model wants one. TokenIds: as they stand.
    Raises ChatTemplateError when the template fails, ValueError for ids outside of the vocabulary and for no ids at all.
    """
    ids, text = _ids_and_text(tokenizer, template, prompt)
    if not ids:
        raise ValueError("the prompt holds no token; type some text")
    return ids, text


def template_note(tokenizer: Tokenizer, template: str) -> str:
    """Render a plain question once, so that the first chat does not pay for what is prepared; what fails, or ""."""
    try:
        prompt_ids(tokenizer, template, Chat((Message("user", "Hello"),)))
    except ValueError as error:
        return f"a plain question to this model fails: {error}"
    return ""


def own_template_note(adapter: Path, template: str | None) -> str:
    """What to say of the chat template in an adapter's folder, which is not used.

    It is "" where there is none, or it is the base's `template`.
    """
    if not present(adapter / CONFIG):  # a file, and what lies beside it may be another's
        return ""
    try:
        own = chat_template(adapter)
    except (FormatError, OSError) as error:
        return f"the chat template in its folder is not used, and cannot be read: {error}"
    if own is None or own.strip() == (template or "").strip():
        return ""
    used = "they are written with the base's" if template else "the base has none, and they are laid out as plain lines"
    return f"its folder has a chat template of its own, which chats do not use: {used}; the adapter may have been trained with the other"


def _ids_and_text(tokenizer: Tokenizer, template: str | None, prompt: Prompt) -> tuple[list[int], str]:
    if isinstance(prompt, TokenIds):
        return _checked(tokenizer, prompt), "".join(tokenizer.token_text(prompt.ids))
    if isinstance(prompt, RawText):
        return _with_bos(tokenizer, tokenizer.encode(prompt.text, special=True)), prompt.text
    messages = [_marked(tokenizer.special, message) for message in prompt.messages]
    text = _chat_text(tokenizer, template, messages, prompt)
    ids = _parse(tokenizer, text) if _OPEN in text else tokenizer.encode(_MARKS.sub("", text), special=True)
    return ids if template is not None else _with_bos(tokenizer, ids), _MARKS.sub("", text)


def _checked(tokenizer: Tokenizer, prompt: TokenIds) -> list[int]:
    for number in prompt.ids:
        if not 0 <= number < tokenizer.model_vocab:
            raise ValueError(f"token id {number} is outside of the model's vocabulary of {tokenizer.model_vocab:,}")
    return list(prompt.ids)


def fallback_text(messages: list[dict[str, str]], generate: bool) -> str:
    """The layout for a model without a chat template: "User: ...", a line each, and "Assistant:" to go on from."""
    lines = [f"{message['role'].capitalize()}: {message['content']}\n" for message in messages]
    return "".join(lines) + ("Assistant:" if generate else "")


def _marked(specials: SpecialTokens, message: Message) -> dict[str, str]:
    return {"role": _mark(specials, message.role), "content": _mark(specials, message.content)}


def _mark(specials: SpecialTokens, text: str) -> str:
    text = _MARKS.sub("\ufffd", text.encode("utf-8", "replace").decode("utf-8"))
    pieces, last = [], 0
    for start, end, _ in specials.find(text):
        pieces += [text[last:start], _OPEN, text[start:end], _CLOSE]
        last = end
    return "".join([*pieces, text[last:]])


def _chat_text(tokenizer: Tokenizer, template: str | None, messages: list[dict[str, str]], prompt: Chat) -> str:
    generate = not prompt.opening
    if template is None:
        return fallback_text(messages, generate) + prompt.opening
    variables = {"messages": messages, "add_generation_prompt": generate, "tools": None, "documents": None, **tokenizer.special_texts}
    return RENDERER.render(template, variables) + prompt.opening


def _parse(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text with marks: between the special tokens outside of marks, everything is text."""
    ids: list[int] = []
    fragment = ""
    eats_after = False
    for piece in re.split(f"({_OPEN}[^{_OPEN}{_CLOSE}]*{_CLOSE})", text):
        if piece.startswith(_OPEN):
            fragment += piece[1:-1]
            continue
        last = 0
        piece = _MARKS.sub("", piece)
        for start, end, number in tokenizer.special.find(piece):
            before, after = tokenizer.eats_space[number]
            fragment += piece[last:start]
            ids += tokenizer.encode(_trim(fragment, eats_after, before), special=False) + [number]
            fragment, last, eats_after = "", end, after
        fragment += piece[last:]
    return ids + tokenizer.encode(_trim(fragment, eats_after, False), special=False)


def _trim(text: str, left: bool, right: bool) -> str:
    text = text.lstrip() if left else text
    return text.rstrip() if right else text


def _with_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [tokenizer.bos, *ids] if tokenizer.add_bos and tokenizer.bos is not None and ids[:1] != [tokenizer.bos] else ids
