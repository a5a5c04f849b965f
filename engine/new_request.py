"""From what a person asks for to a request of a loaded model. Raises sentences for what could never run."""
from __future__ import annotations

from .chat import check_length, prompt_ids
from .loaded import LoadedModel
from .mix import check_mix, resolve_mix
from .mix_history import MixHistory
from .protocol import Generate, Mix, Sampling
from .request import Request, check_sampling
from .stop_text import StopText
from .tokenizer import TextStream
from .vocabulary import Vocabulary


def asked_request(model: LoadedModel, command: Generate) -> Request:
    """The request of a command, its prompt cut with the tokens of its mix; not queued."""
    if command.request_id < 0:
        raise ValueError(f"request {command.request_id} has a number below 0, as the engine's own looks have; give it another one")
    check_sampling(command.sampling)
    check_length(command.prompt, model.config.context)
    check_mix(command.mix, model.store.infos)
    tokenizer = model.store.vocabulary(command.mix, command.request_id).tokenizer
    ids, _ = prompt_ids(tokenizer, model.base.chat_template, command.prompt)
    return new_request(model, command.request_id, list(ids), command.mix, command.sampling)


def new_request(model: LoadedModel, number: int, ids: list[int], mix: Mix, sampling: Sampling) -> Request:
    """A request over the token ids `ids`; not queued."""
    context = model.config.context
    if not ids:
        raise ValueError("the prompt is empty; a reply needs at least one token to follow")
    if len(ids) >= context:
        raise ValueError(f"the prompt is {len(ids)} tokens long, too long for the context of {context} tokens with room for a reply; "
                         "shorten it or load the model with a larger context")
    check_mix(mix, model.store.infos)
    vocabulary = model.store.vocabulary(mix, number)
    outside = next((i for i in ids if not 0 <= i < vocabulary.rows), None)
    if outside is not None:
        raise ValueError(f"token id {outside} is not in the vocabulary of {vocabulary.rows} tokens")
    history = MixHistory.of(resolve_mix(mix, ids, model.store.infos_for(number), model.store.text))
    return Request(
        number, ids, len(ids), history, sampling, min(len(ids) + sampling.max_tokens, context), context, end_tokens(model, vocabulary),
        TextStream(vocabulary.tokenizer), StopText(sampling.stop), vocabulary)


def end_tokens(model: LoadedModel, vocabulary: Vocabulary) -> frozenset[int]:
    """What ends a reply in the tokens of `vocabulary`."""
    return frozenset((*model.base.end_tokens, *vocabulary.end_tokens))
