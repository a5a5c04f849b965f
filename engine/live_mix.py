"""The mix of a request that waits or runs, changed: its slots, its words, and what of its keys and values stays."""
from __future__ import annotations

from .loaded import LoadedModel
from .mix import MixError, TokenMix, resolve_mix
from .mix_history import MixHistory
from .new_request import end_tokens
from .protocol import Mix
from .request import Request


def token_mix(model: LoadedModel, mix: Mix, request: Request) -> TokenMix:
    """`mix` on the tokens of `request`, its reply so far included."""
    end = request.prompt_tokens
    return resolve_mix(mix, request.ids[:end], model.store.infos_for(request.id), model.store.text, request.ids[end:])


def changed_history(request: Request, mix: TokenMix, whole: bool) -> MixHistory:
    """`mix` from the first token on that is not settled yet; on all of them with `whole`, or when nothing is."""
    return MixHistory.of(mix) if whole or not request.started else request.history.spliced(request.settled, mix)


def give_history(model: LoadedModel, request: Request, history: MixHistory) -> None:
    """Slots and words of the mix that holds now.

    Raises ValueError when a request that runs cannot have them; it keeps what it had then.
    """
    mix = history.mix
    vocabulary = model.store.vocabulary(mix.mix, request.id)
    lost = vocabulary.lost(request.ids, request.vocabulary)
    if lost is not None:
        raise MixError(f"request {request.id} holds the token {lost}, {request.vocabulary.tokenizer.token_text([lost])[0]!r}, that "
                       "only an adapter of its old mix has; keep that adapter in the mix until the reply ends")
    if request.started:
        former = history.uses_from(request.stored)
        again = (request.table is not None and request.stored < history.parts[-1].start
                 and all(model.store.holds(use.name, use.digest) for use in former))
        names = (*mix.names, *(use.name for use in former if again))
        model.store.acquire(names, request.id, f"request {request.id}, whose mix was changed")
        request.holds_former = again
    else:
        model.store.expect(request.id, mix.names)
    request.history, request.vocabulary, request.end_tokens = history, vocabulary, end_tokens(model, vocabulary)
    request.text.tokenizer = vocabulary.tokenizer


def compute_again(model: LoadedModel, request: Request) -> int:
    """Keep of what is stored of `request` only what its history says now. Returns how many stored tokens are computed again."""
    if request.table is None:
        return 0
    stored = request.stored
    request.end()
    request.begin(model.memory)
    return max(stored - request.stored, 0)
