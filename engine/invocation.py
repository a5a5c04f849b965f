"""The invocation of an adapter as a person sets it, and as it stays when the adapter is reloaded."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from .adapters.config import MAX_INVOCATION
from .adapters.errors import AdapterError
from .protocol import AdapterInfo


def with_invocation(info: AdapterInfo, text: str, in_reply: bool, encode: Callable[[str], Sequence[int]]) -> AdapterInfo:
    """`info` as an aLoRA that starts at `text`, tokenised by `encode`; "" makes it a plain LoRA. See SetInvocation.

    Raises AdapterError for a text that can be no invocation, or not of this adapter.
    """
    in_reply = in_reply and bool(text)
    if text == info.invocation:  # the adapter's own ids stay: its text may be tokenised otherwise
        return replace(info, invocation_in_reply=in_reply)
    if text and info.added_rows:
        raise AdapterError(f"adapter {info.name!r} adds tokens to the vocabulary; before an invocation they would stand for nothing, "
                           "so it cannot have one")
    tokens = tuple(encode(text)) if text else ()
    if text and not tokens:
        raise AdapterError(f"the invocation {text!r} of adapter {info.name!r} has no tokens in this base; give another text")
    if len(tokens) > MAX_INVOCATION:
        raise AdapterError(f"the invocation of adapter {info.name!r} has {len(tokens)} tokens, over the limit of {MAX_INVOCATION}; "
                           "give a shorter text")
    return replace(info, invocation=text, invocation_tokens=tokens, invocation_in_reply=in_reply)


def kept_invocation(info: AdapterInfo, old: AdapterInfo, own: bool) -> AdapterInfo:
    """`info` in the place of `old`, with its invocation where that was the person's `own`, and where it is looked for."""
    if own:
        info = replace(info, invocation=old.invocation, invocation_tokens=old.invocation_tokens)
    return replace(info, invocation_in_reply=old.invocation_in_reply and bool(info.invocation_tokens))
