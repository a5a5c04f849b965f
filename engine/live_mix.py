"""The mix of a request that waits or runs, changed: its slots, its words, and what of its keys and values stays."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .loaded import LoadedModel
from .mix import MixError, TokenMix, resolve_mix
from .mix_history import MixHistory
from .new_request import end_tokens
from .protocol import Mix, requests_text
from .request import Request
from .vocabulary import Vocabulary


def token_mix(model: LoadedModel, mix: Mix, request: Request) -> TokenMix:
    """`mix` on the tokens of `request`, its reply so far included."""
    end = request.prompt_tokens
    return resolve_mix(mix, request.ids[:end], model.store.infos_for(request.id), model.store.text, request.ids[end:])


def changed_history(request: Request, mix: TokenMix, whole: bool) -> MixHistory:
    """`mix` from the first token on that is not settled yet; on all of them with `whole`, or when nothing is."""
    return MixHistory.of(mix) if whole or not request.started else request.history.spliced(request.settled, mix)


@dataclass(frozen=True, slots=True)
class MixChange:
    """`history` for `request`, and what follows from it."""

    request: Request
    history: MixHistory
    vocabulary: Vocabulary
    names: tuple[str, ...]
    """that it will hold in slots"""
    holds_former: bool


def mix_change(model: LoadedModel, request: Request, history: MixHistory) -> MixChange:
    """What giving `history` to `request` takes; nothing is changed. Raises MixError when its tokens would lose their meaning.

    What it computes again under a former mix stays so as long as it holds the slots for that; else the scheduler gets them for it.
    """
    mix = history.mix
    vocabulary = model.store.vocabulary(mix.mix, request.id)
    lost = vocabulary.lost(request.ids, request.vocabulary)
    if lost is not None:
        raise MixError(f"request {request.id} holds the token {lost}, {request.vocabulary.tokenizer.token_text([lost])[0]!r}, that "
                       "only an adapter of its old mix has; keep that adapter in the mix until the reply ends")
    names = mix.names
    again = request.table is not None and request.stored < history.parts[-1].start
    former = [use.name for use in history.uses_from(request.stored) if use.name not in names] if again else []
    holds_former = again and model.store.held(request.id).issuperset(former)
    return MixChange(request, history, vocabulary, (*names, *(former if holds_former else ())), holds_former)


def carry_out(model: LoadedModel, changes: Sequence[MixChange]) -> None:
    """All of `changes`, or none of them: then ValueError is raised, and every request has what it had."""
    wanted = {change.request.id: change.names for change in changes if change.request.started}
    waiting = {change.request.id: change.names for change in changes if not change.request.started}
    model.store.exchange(wanted, waiting, f"{requests_text(wanted)}, whose mix was changed")
    for change in changes:
        request = change.request
        request.history, request.vocabulary, request.holds_former = change.history, change.vocabulary, change.holds_former
        request.end_tokens = end_tokens(model, change.vocabulary)
        request.text.tokenizer = change.vocabulary.tokenizer


def compute_again(model: LoadedModel, request: Request) -> int:
    """Keep of what is stored of `request` only what its history says now. Returns how many tokens that were settled are computed again."""
    if request.table is None:
        return 0
    settled = request.settled  # more than is stored while an earlier change still has them computed again
    request.end()
    request.begin(model.memory)
    return max(settled - request.stored, 0)
