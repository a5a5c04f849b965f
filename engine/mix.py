"""Which adapters of a mix act on which token of a request."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

from torch import Tensor

from .alora import find_last, find_written, nearest_miss
from .protocol import Activation, AdapterInfo, Mix
from .stretches import Acting, Stretch

MAX_SCALE = 1e6
"""far beyond any use, far within fp32"""
AROUND = 12
"""tokens of the prompt before and behind an invocation that are told with it"""


class MixError(ValueError):
    """A mix that cannot be taken: unknown or repeated adapter, or a scale that is no number in bounds."""


@dataclass(frozen=True, slots=True)
class ActiveUse:
    """One adapter acts with `scale` on every token from index `start` of the request on."""

    name: str
    scale: float
    start: int
    digest: str = ""
    """of the content that acts: a name may have another one later"""
    place: int = 0
    """in the mix"""


@dataclass(frozen=True, slots=True)
class Awaited:
    """An aLoRA that begins to act when the model writes its invocation, the tokens `info.invocation_tokens`."""

    info: AdapterInfo
    name: str
    scale: float
    place: int
    """in the mix"""


@dataclass(frozen=True, slots=True)
class TokenMix:
    """A mix made concrete for one request. `active` leaves out scale 0 and aLoRAs whose invocation is nowhere in it."""

    mix: Mix
    active: tuple[ActiveUse, ...] = ()
    activations: tuple[Activation, ...] = ()
    """one for each aLoRA of the mix"""
    awaited: tuple[Awaited, ...] = ()
    ordered: bool = False
    """whether the order of the mix counts: a DoRA is in it"""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that need a slot."""
        return (*(use.name for use in self.active), *(awaited.name for awaited in self.awaited))

    def renamed(self, name: str, new: str) -> TokenMix:
        """What acted as `name` acts as `new`: another name of the same content."""
        return replace(self, active=tuple(replace(use, name=new) if use.name == name else use for use in self.active),
                       awaited=tuple(replace(one, name=new) if one.name == name else one for one in self.awaited))

    def fired(self, written: Awaited, activation: Activation) -> TokenMix:
        """`written` acts from its invocation on, as `activation` tells."""
        use = ActiveUse(written.name, written.scale, activation.start, written.info.digest, written.place)
        return replace(
            self, active=tuple(sorted((*self.active, use), key=lambda one: one.place)),
            activations=tuple(activation if one.adapter == activation.adapter else one for one in self.activations),
            awaited=tuple(one for one in self.awaited if one is not written))

    def stretches(self, first: int) -> tuple[Stretch, ...]:
        """What acts on the tokens of the request from index `first` on."""
        starts = {first, *(use.start for use in self.active if use.start > first)}
        return tuple(Stretch(start, self._acting(start)) for start in sorted(starts))

    def _acting(self, token: int) -> tuple[Acting, ...]:
        acting = [Acting(use.name, use.digest, use.scale) for use in self.active if use.start <= token]
        return tuple(acting if self.ordered else sorted(acting, key=lambda one: (one.digest, one.scale)))


def check_mix(mix: Mix, known: Mapping[str, object]) -> None:
    """Raise MixError when `mix` names an adapter that is not among `known`, names one twice, or has a scale out of bounds."""
    seen: set[str] = set()
    for use in mix:
        if use.name not in known:
            raise MixError(unknown_adapter(use.name, known))
        if use.name in seen:
            raise MixError(f"adapter {use.name!r} is in the mix twice; give it once, with the sum of the scales")
        if not abs(use.scale) <= MAX_SCALE:
            raise MixError(f"the scale of adapter {use.name!r} is {use.scale:g}; it must be a finite number "
                           f"from {-MAX_SCALE:g} to {MAX_SCALE:g}")
        seen.add(use.name)


def resolve_mix(
    mix: Mix, prompt: Sequence[int], infos: Mapping[str, AdapterInfo], text: Callable[[Sequence[int]], str], reply: Sequence[int] = (),
) -> TokenMix:
    """`mix` for a request of the token ids `prompt`, with `reply` behind it; `text` decodes ids for the screen.

    What acts does so under the name in its info, which is another one than the mix has for content that was replaced. An aLoRA whose
    invocation is not in the prompt acts from where the reply has it, if it was asked to. Raises MixError (see `check_mix`).
    """
    check_mix(mix, infos)
    active, activations, awaited = [], [], []
    for place, use in enumerate(mix):
        info, start = infos[use.name], 0
        if info.invocation_tokens:
            activation = _activation(info, prompt, reply, text)
            activations.append(activation)
            start = activation.start
        if use.scale != 0 and start >= 0:
            active.append(ActiveUse(info.name, use.scale, start, info.digest, place))
        elif use.scale != 0 and info.invocation_in_reply:
            awaited.append(Awaited(info, info.name, use.scale, place))
    return TokenMix(mix, tuple(active), tuple(activations), tuple(awaited), any(infos[use.name].dora for use in mix if use.scale != 0))


def fill_weights(weights: Tensor, row: int, position: int, count: int, uses: Sequence[ActiveUse], columns: Mapping[str, int]) -> None:
    """Write rows [row, row + count) of W [tokens, adapters] for the tokens [position, position + count) of a request.

    `weights` is zero there before; `columns` is `Routing.columns` and holds every name of `uses` that acts on one of the tokens.
    """
    for use in uses:
        first = max(use.start - position, 0)
        if first < count:
            weights[row + first:row + count, columns[use.name]] = use.scale


def _activation(
    info: AdapterInfo, prompt: Sequence[int], reply: Sequence[int], text: Callable[[Sequence[int]], str],
) -> Activation:
    tokens = info.invocation_tokens
    start = find_last(prompt, tokens)
    if start >= 0:
        return activation_at(info, prompt, start, text)
    if info.invocation_in_reply and reply:
        ids = [*prompt, *reply]
        if (start := find_written(ids, tokens, len(prompt))) >= 0:
            return activation_at(info, ids, start, text)
    return Activation(info.name, False, -1, len(tokens), nearest_miss(prompt, tokens, text))


def activation_at(info: AdapterInfo, ids: Sequence[int], start: int, text: Callable[[Sequence[int]], str]) -> Activation:
    """`info`'s invocation stands in `ids` from index `start` on; the texts are for the screen."""
    tokens = info.invocation_tokens
    end = start + len(tokens)
    return Activation(info.name, True, start, len(tokens), repr(text(tokens)), tuple(text([token]) for token in tokens),
                      text(ids[max(start - AROUND, 0):start]), text(ids[end:end + AROUND]))


def unknown_adapter(name: str, known: Mapping[str, object]) -> str:
    """One sentence for an adapter that is not loaded, with the close names."""
    close = get_close_matches(name, list(known), n=3)
    if close:
        return f"no adapter {name!r} is loaded; did you mean {' or '.join(map(repr, close))}?"
    there = ", ".join(map(repr, sorted(known)[:8])) or "none"
    return f"no adapter {name!r} is loaded; loaded: {there}"
