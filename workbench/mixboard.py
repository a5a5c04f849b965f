"""What the person set for each adapter: on or off, a scale, solo, bypass; with undo."""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..engine.protocol import AdapterUse, Mix

UNDO_STEPS = 200
SCALE_LIMIT = 100.0


@dataclass(frozen=True)
class Setting:
    """One adapter on the board."""

    on: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class BoardState:
    """The whole board at one moment; what undo goes back to."""

    settings: tuple[tuple[str, Setting], ...] = ()
    solo: str = ""
    bypass: bool = False


class MixBoard:
    """Settings by adapter name in the order they were added. Every change can be undone."""

    def __init__(self) -> None:
        self._now = BoardState()
        self._past: list[BoardState] = []
        self._future: list[BoardState] = []

    @property
    def now(self) -> BoardState:
        return self._now

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self._now.settings]

    def __getitem__(self, name: str) -> Setting:
        """Raises KeyError for a name that is not on the board."""
        return dict(self._now.settings)[name]

    def __contains__(self, name: str) -> bool:
        return any(known == name for known, _ in self._now.settings)

    def acts(self, name: str) -> bool:
        """Whether the adapter is part of the mix now, solo and bypass considered."""
        return any(use.name == name for use in self.mix())

    def mix(self) -> Mix:
        """The mix for the engine: on, not at scale 0, and not silenced by bypass or another's solo."""
        state = self._now
        if state.bypass:
            return ()
        uses = (AdapterUse(name, setting.scale) for name, setting in state.settings
                if (name == state.solo if state.solo else setting.on))
        return tuple(use for use in uses if use.scale != 0)

    def add(self, name: str, setting: Setting) -> None:
        """A new adapter; it is added to the past as well, so that undo never takes it away."""
        self._everywhere(lambda settings: {**settings, name: settings.get(name, setting)})

    def remove(self, name: str) -> None:
        self._everywhere(lambda settings: {key: value for key, value in settings.items() if key != name})

    def toggle(self, name: str) -> None:
        setting = self[name]
        self._change(name, replace(setting, on=not setting.on))

    def set_scale(self, name: str, scale: float, joined: bool = False) -> None:
        """Set a scale. `joined` makes it part of the change before, as the moves of one drag are."""
        self._change(name, replace(self[name], scale=scale), joined)

    def put(self, name: str, setting: Setting) -> None:
        self._change(name, setting)

    def toggle_solo(self, name: str) -> None:
        self._move(replace(self._now, solo="" if self._now.solo == name else name, bypass=False))

    def toggle_bypass(self) -> None:
        self._move(replace(self._now, bypass=not self._now.bypass))

    def undo(self) -> bool:
        """Back by one change; False when there is none."""
        return self._travel(self._past, self._future)

    def redo(self) -> bool:
        return self._travel(self._future, self._past)

    def take(self, state: BoardState) -> None:
        """Everything as it is on another board of the same adapters."""
        self._move(state)

    def restore(self, state: BoardState) -> None:
        """Return to what holds after a refusal; adapters added since stay, as they are now but off."""
        held = dict(state.settings)
        settings = tuple((name, held.get(name, replace(now, on=False))) for name, now in self._now.settings)
        self._now = BoardState(settings, state.solo if state.solo in self else "", state.bypass)

    def _change(self, name: str, setting: Setting, joined: bool = False) -> None:
        settings = tuple((key, setting if key == name else value) for key, value in self._now.settings)
        self._move(replace(self._now, settings=settings), joined)

    def _move(self, state: BoardState, joined: bool = False) -> None:
        if state == self._now:
            return
        if not (joined and self._past):
            self._past = [*self._past, self._now][-UNDO_STEPS:]
        self._future.clear()
        self._now = state

    def _travel(self, source: list[BoardState], target: list[BoardState]) -> bool:
        if not source:
            return False
        target.append(self._now)
        self._now = source.pop()
        return True

    def _everywhere(self, change) -> None:
        def changed(state: BoardState) -> BoardState:
            settings = change(dict(state.settings))
            return BoardState(tuple(settings.items()), state.solo if state.solo in settings else "", state.bypass)

        self._now = changed(self._now)
        self._past = [changed(state) for state in self._past]
        self._future = [changed(state) for state in self._future]


def parse_scale(text: str) -> float:
    """A typed scale. Raises ValueError with a sentence for the person."""
    try:
        value = float(text.strip().replace(",", ".").replace("−", "-"))
    except ValueError:
        raise ValueError("a scale is a number such as 0.75 or -1") from None
    if not math.isfinite(value):
        raise ValueError("a scale is a finite number: nan and inf would spoil every token")
    if abs(value) > SCALE_LIMIT:
        raise ValueError(f"a scale lies between -{SCALE_LIMIT:.0f} and {SCALE_LIMIT:.0f}")
    return value


def mix_text(mix: Mix, contents: Mapping[str, str] = {}) -> str:  # noqa: B006
    """`pirate ×0.75 + json ×0.30`; `base` when nothing acts. Names are as they came, not cleaned.

    `contents`: name -> short digest, for names that do not say enough: `pirate@3f1c9a2b ×0.75`.
    """
    names = {use.name: f"{use.name}@{contents[use.name]}" if use.name in contents else use.name for use in mix}
    return " + ".join(f"{names[use.name]} ×{scale_text(use.scale)}" for use in mix) or "base"


def scale_text(scale: float) -> str:
    """At least two decimals, as many as the value needs."""
    short = f"{scale:.2f}"
    return short if float(short) == scale else f"{scale:.6g}"
