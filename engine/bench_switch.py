"""How long it takes until the first token under another adapter, by where that adapter is, and what a reply beside it notices.

`python -m lora_bench.engine.bench_switch '{"model": PATH, ...}'`, with the arguments of `run_switch`, prints JSON lines: {"progress": text}
now and then, the result last. The whole loop of the engine is measured, commands in and text out.
"""
from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_errors import NotMeasured
from .bench_step import exit_code as step_exit_code
from .program import CANNOT_BE_USED, answer, set_spins
from .protocol import (
    Abort,
    AdapterLoaded,
    AdapterUnloaded,
    AdapterUse,
    Generate,
    LoadAdapter,
    LoadModel,
    Mix,
    MixSet,
    ModelInfo,
    ModelLoaded,
    RequestFinished,
    Sampling,
    SetMix,
    SlotLoaded,
    TextDelta,
    TokenIds,
    UnloadAdapter,
)

if TYPE_CHECKING:
    from .bench_loop import TimedLoop

PROMPT_TOKENS = 16
SETTLED_TOKENS = 8
"""of the reply beside it, before anything is done"""
MOST_TRIES = 20
"""for one that does not end meanwhile"""
REPLIES = 8
"""between whose steps the loop is measured"""
HOST_BYTES = 1 << 40
"""nothing leaves the host tier"""
WATCHED, SHARED, OTHER, NEW = "watched", "shared", "other", "new"
"""adapters by what is done with them: the reply beside it has the first; the next two take the second of two slots from each other; the
last is read from disk each time"""


def run_switch(
    model: str | None = None, shape: str | None = None, device: str = "auto", dtype: str = "auto", rank: int = 16, times: int = 7,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Milliseconds from a command to the first token that another mix acts on, all times and their median, and the tokens of a reply that
    runs beside it: how far apart they come while nothing is done, and at most meanwhile. And what the loop takes between two steps of
    several replies (see bench_between).

    The base is the one in the file `model`, or one of random weights of `shape` (see random_base), which is written to a file first;
    neither: the default model. The adapters are random ones of `rank` on all linears. Raises WrongShape, CannotLoad, ValueError, OSError,
    NotMeasured.
    """
    import torch

    from .base_file import open_base
    from .bench_between import between_steps
    from .bench_loop import TimedLoop
    from .bench_machine import machine
    from .config import pick_device
    from .default_model import ensure_default_model
    from .machine import use_cores
    from .random_base import random_adapter, shape_facts
    from .random_files import write_adapter, write_base
    use_cores()
    with tempfile.TemporaryDirectory() as folder, TimedLoop() as loop:
        if shape is not None:
            progress(f"writing random weights of shape {shape}")
            write_base(Path(folder) / shape, shape_facts(shape), pick_device(device))
            path = str(Path(folder) / shape)
        else:
            path = model if model is not None else str(ensure_default_model())
        facts = open_base(path).facts
        progress("writing adapters")
        for name in (WATCHED, SHARED, OTHER, NEW):
            write_adapter(Path(folder) / name, random_adapter(facts, name, rank, torch.device("cpu"), torch.bfloat16).adapter)
        progress("loading the model")
        loop.put(LoadModel(path, device=device, dtype=dtype, slots=2, host_cache_bytes=HOST_BYTES))
        info = loop.wait(ModelLoaded, 0)[1].model
        for name in (WATCHED, SHARED, OTHER):
            loop.put(LoadAdapter(str(Path(folder) / name), name))
            loop.wait(AdapterLoaded, 0, lambda when, event, name=name: event.adapter.name == name)
        switches = _Switches(loop, info, Path(folder)).measured(times, progress)
        progress(f"{REPLIES} replies at once")
        between = between_steps(loop, info, [(AdapterUse((WATCHED, SHARED)[reply % 2]),) for reply in range(REPLIES)])
    return {"measures": "switch", "machine": machine(pick_device(device)),
            "base": {"name": info.name, "device": info.device, "dtype": info.dtype, "weights": info.weights,
                     "weight_bytes": info.weight_bytes},
            "adapters": {"rank": rank, "linears": "all linears of all layers"}, "prompt_tokens": PROMPT_TOKENS,
            "flags": {"model": model, "shape": shape, "device": device, "dtype": dtype, "rank": rank, "times": times}, "switches": switches,
            "between_steps": between}


AS_TRAINED: Mix = (AdapterUse(SHARED),)


@dataclass(frozen=True, slots=True)
class _Action:
    """Something that is done beside a reply."""

    run: Callable[[int], float | None]
    """returns milliseconds, None when a reply ended too soon; it is given the one that runs under `on`"""
    on: Mix | None = None


class _Switches:
    """What is done, each beside a reply under WATCHED."""

    def __init__(self, loop: TimedLoop, info: ModelInfo, folder: Path) -> None:
        self._loop, self._info, self._folder = loop, info, folder
        self._draw, self._number = random.Random(0), 0

    def measured(self, times: int, progress: Callable[[str], None]) -> list[dict[str, Any]]:
        """Everything in turn, `times` times after one that does not count."""
        actions: dict[str, _Action] = {
            "the base": _Action(lambda _: self._first(())),
            "in its slot": _Action(lambda _: self._first(AS_TRAINED)),
            "in the host tier": _Action(lambda _: self._from_host()),
            "on disk": _Action(lambda _: self._from_disk()),
            "loaded unasked": _Action(lambda _: self._unasked()),
            "rescaled": _Action(lambda reply: self._changed(reply, (AdapterUse(SHARED, 0.5),)), AS_TRAINED),
            "switched off": _Action(lambda reply: self._changed(reply, ()), AS_TRAINED),
            "switched on": _Action(lambda reply: self._changed(reply, AS_TRAINED), ()),
        }
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in actions}
        for number in range(times + 1):
            for name, action in actions.items():
                progress(f"{f'{number} of {times}' if number else 'warming up'}: {name}")
                told = self._beside(action)
                found[name] += [told] if number else []
        return [{"adapter": name, "ms": _median(ms for ms, _, _ in told), "every_time": [round(ms, 3) for ms, _, _ in told],
                 "beside_ms": _median(usual for _, usual, _ in told), "beside_at_most_ms": [round(most, 3) for _, _, most in told],
                 "stall_ms": _median(most - usual for _, usual, most in told)} for name, told in found.items()]

    def _beside(self, action: _Action) -> tuple[float, float, float]:
        """(milliseconds of `action`, those between two tokens of the reply beside it before, and at most meanwhile)."""
        for _ in range(MOST_TRIES):
            self._prepare()
            after = self._loop.heard
            watched, changed = self._start((AdapterUse(WATCHED),)), 0
            if self._wait_for(watched, after, SETTLED_TOKENS) is None:
                continue
            if action.on is not None:
                changed = self._start(action.on)
                if self._wait_for(changed, after, SETTLED_TOKENS) is None:
                    self._stop(watched, after)
                    continue
            began = self._loop.put()
            ms = action.run(changed)
            ended = self._loop.put()
            last = self._wait_for(watched, after, since=ended)
            for reply in (watched, changed)[:2 if changed else 1]:
                self._stop(reply, after)
            self._loop.put(SetMix(()))
            if ms is None or last is None:
                continue
            came = [when for when, event in self._loop.all(TextDelta, after) if event.request_id == watched and when <= last]
            gaps = [(two, (two - one) * 1e3) for one, two in zip(came, came[1:], strict=False)]
            before, meanwhile = [gap for when, gap in gaps if when <= began], [gap for when, gap in gaps if when > began]
            return ms, statistics.median(before), max(meanwhile)
        raise NotMeasured(f"replies of this base end too soon to measure what is done beside them; {MOST_TRIES} did")

    def _prepare(self) -> None:
        """SHARED in its slot, NEW not loaded."""
        after = self._loop.heard
        self._stop(self._start((AdapterUse(WATCHED),), 1), after)
        self._stop(self._start(AS_TRAINED, 1), after)

    def _first(self, mix: Mix) -> float:
        """A request under `mix`, until its first token."""
        after = self._loop.heard
        began = self._loop.put()
        return self._until_first(self._start(mix, 1), after, began)

    def _from_host(self) -> float:
        after = self._loop.heard
        ms = self._first((AdapterUse(OTHER),))
        self._loop.wait(SlotLoaded, after, lambda when, event: event.adapter == OTHER and event.source == "host")
        return ms

    def _from_disk(self) -> float:
        after = self._loop.heard
        began = self._loop.put(LoadAdapter(str(self._folder / NEW), NEW))
        ms = self._until_first(self._start((AdapterUse(NEW),), 1), after, began)
        self._loop.put(UnloadAdapter(NEW))
        self._loop.wait(AdapterUnloaded, after)
        return ms

    def _unasked(self) -> float:
        """An adapter is read and placed that no request waits for: until it is in its slot."""
        after = self._loop.heard
        began = self._loop.put(LoadAdapter(str(self._folder / NEW), NEW))
        self._loop.put(SetMix((AdapterUse(NEW),)))
        when, _ = self._loop.wait(SlotLoaded, after, lambda when, event: event.adapter == NEW)
        self._loop.put(UnloadAdapter(NEW))
        self._loop.wait(AdapterUnloaded, after)
        return (when - began) * 1e3

    def _changed(self, reply: int, mix: Mix) -> float | None:
        """`reply` gets `mix`: until its first token from there on; None when it ended before."""
        after = self._loop.heard
        began = self._loop.put(SetMix(mix, (reply,)))
        when = self._first_under(mix, reply, after)
        return None if when is None else (when - began) * 1e3

    # -- requests --------------------------------------------------------------------------------
    def _start(self, mix: Mix, tokens: int = 0) -> int:
        """Its number; `tokens` 0: as many as there can be."""
        self._number += 1
        ids = tuple(self._draw.randrange(self._info.vocab) for _ in range(PROMPT_TOKENS))
        self._loop.put(Generate(self._number, TokenIds(ids), mix, Sampling(max_tokens=tokens or self._info.context - PROMPT_TOKENS)))
        return self._number

    def _until_first(self, number: int, after: int, began: float) -> float:
        """Milliseconds; a reply of one token may show nothing before its end."""
        when, _ = self._loop.wait(TextDelta | RequestFinished, after, lambda when, event: event.request_id == number)
        self._stop(number, after)
        return (when - began) * 1e3

    def _first_under(self, mix: Mix, number: int, after: int) -> float | None:
        """When the first token came behind the change to `mix`; None when the reply ended before."""
        def comes(when: float, event: MixSet | RequestFinished) -> bool:
            return event.request_id == number if isinstance(event, RequestFinished) else event.mix == mix and number in event.at_token
        _, event = self._loop.wait(MixSet | RequestFinished, after, comes)
        return None if isinstance(event, RequestFinished) else self._wait_for(number, after, event.at_token[number] + 1)

    def _wait_for(self, number: int, after: int, tokens: int = 0, since: float = 0.0) -> float | None:
        """When the reply came to have as many tokens, and more after `since`; None when it ended before."""
        def comes(when: float, event: TextDelta | RequestFinished) -> bool:
            return event.request_id == number and (isinstance(event, RequestFinished) or event.tokens >= tokens and when > since)
        when, event = self._loop.wait(TextDelta | RequestFinished, after, comes)
        return None if isinstance(event, RequestFinished) else when

    def _stop(self, number: int, after: int) -> None:
        self._loop.put(Abort(number))
        self._loop.wait(RequestFinished, after, lambda when, event: event.request_id == number)


def _median(values: Iterable[float]) -> float:
    return round(statistics.median(values), 3)


def main() -> int:
    """The program; returns its exit code (see program.answer)."""
    return answer(run_switch, exit_code)


def exit_code(error: Exception) -> int:
    from .bench_loop import CannotLoad
    return CANNOT_BE_USED if isinstance(error, CannotLoad) else step_exit_code(error)


if __name__ == "__main__":
    set_spins()
    sys.exit(main())
