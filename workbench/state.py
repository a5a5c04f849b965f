"""The store: what the screen shows, folded from the engine's events. Plain Python, no widgets.

Panels of what is read the latest snapshot; happenings go to the rings, the transcript and the notices.
"""
from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from ..engine import protocol as p
from .cache_text import found_text
from .happenings import event_line
from .mix_letters import MixLetters
from .mixboard import BoardState, MixBoard, mix_text
from .reload_text import checkpoint_text, file_text, reload_failed_text, reloaded_text
from .text import counted, listed
from .transcript import Item, Notice, Splice, Turn, Version

STEPS_KEPT = 240
EVENTS_KEPT = 300
CACHE_KEPT = 12


@dataclass(frozen=True)
class StartAdapter:
    """An adapter to have from the start, or again after a restart."""

    path: str
    name: str | None = None
    scale: float = 1.0
    on: bool = True


@dataclass(frozen=True)
class LoggedEvent:
    at: datetime
    text: str
    bad: bool = False


@dataclass
class BenchState:
    """All the screen knows. `apply` folds one event in."""

    clock: Callable[[], datetime] = datetime.now
    engine: str = "starting"
    """starting, no model, loading, idle, generating, gone"""
    started: p.EngineStarted | None = None
    loading: p.ModelLoading | None = None
    snapshot: p.EngineSnapshot = field(default_factory=p.EngineSnapshot)
    snapshot_at: datetime | None = None
    adapters: dict[str, p.AdapterInfo] = field(default_factory=dict)
    board: MixBoard = field(default_factory=MixBoard)
    held: BoardState = field(default_factory=BoardState)
    """the board whose mix the engine holds; what a refusal returns to"""
    sent: list[tuple[p.Mix, BoardState, p.MixChange]] = field(default_factory=list)
    """mixes on their way to the engine"""
    change: p.MixChange = "splice"
    """what a change of the mix does to a reply that is being written"""
    asked: int = 0
    """number of the latest Tokenize; answers to others are late"""
    tokenized: p.Tokenized | None = None
    """its answer"""
    wanted: list[StartAdapter] = field(default_factory=list)
    """adapters asked for and not yet answered"""
    reading: p.AdapterLoading | None = None
    """how far the adapter is that is being read, once that takes a while"""
    reloading: set[str] = field(default_factory=set)
    """adapters whose reload was asked for and not yet answered"""
    failed: dict[str, str] = field(default_factory=dict)
    """adapters of the board that do not fit the model that is loaded, and why"""
    checking: str = ""
    """the adapter that the engine checks now"""
    comparing: bool = False
    """whether replies of the compare screen are being written"""
    hint: str = ""
    """one line at the prompt: what the last key did or why it did nothing"""
    last_chat: str = ""
    """the latest chat of an earlier run, in a line; "" when there is none"""
    items: list[Item] = field(default_factory=list)
    steps: deque[p.StepFinished] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    trace: p.StepTraced | None = None
    """the last step that was traced"""
    tracing: bool = False
    """whether the next one is to be"""
    trace_failed: str = ""
    """why the last trace that was asked for could not be made"""
    events: deque[LoggedEvent] = field(default_factory=lambda: deque(maxlen=EVENTS_KEPT))
    last_eviction: LoggedEvent | None = None
    prefixes: deque[LoggedEvent] = field(default_factory=lambda: deque(maxlen=CACHE_KEPT))
    """what the latest requests found in KV memory"""
    losses: deque[LoggedEvent] = field(default_factory=lambda: deque(maxlen=CACHE_KEPT))
    """the latest KV blocks that were forgotten, and requests that had to give theirs back"""
    letters: MixLetters = field(default_factory=MixLetters)
    """of the mixes in KV memory"""
    _last_line_of: tuple[type, object] = (type(None), "")
    _stopped: tuple[Item | None, list[str]] = field(default_factory=lambda: (None, []))
    """the notice of the latest loads that were stopped, and their names"""
    _contents: dict[str, set[str]] = field(default_factory=dict)
    """adapter -> digests of every content that its name meant"""
    _used: set[str] = field(default_factory=set)
    """adapters whose use was said since the slots last changed"""

    @property
    def model(self) -> p.ModelInfo | None:
        return self.snapshot.model

    @property
    def running(self) -> list[Version]:
        return [version for version in self.versions() if version.active]

    def versions(self) -> list[Version]:
        return [version for item in self.items if isinstance(item, Turn) for version in item.versions]

    def mix(self) -> p.Mix:
        """The board's mix as far as its adapters are loaded."""
        return tuple(use for use in self.board.mix() if use.name in self.adapters)

    def version(self, request_id: int) -> Version | None:
        return next((v for v in reversed(self.versions()) if v.request_id == request_id), None)

    @property
    def reads_adapters(self) -> bool:
        """Whether adapters are on their way from disk; Esc stops them."""
        return bool(self.model and self.engine not in ("loading", "gone") and (self.wanted or self.reloading))

    def contents(self, mix: p.Mix) -> dict[str, str]:
        """Adapter -> digest of what its name means now."""
        return {use.name: self.adapters[use.name].digest for use in mix if use.name in self.adapters}

    def view(self, name: str) -> p.AdapterView | None:
        return next((view for view in self.snapshot.adapters if view.info.name == name), None)

    def idle_seconds(self, slot: p.SlotView) -> float:
        """Since the slot's last use, the time since the snapshot included."""
        since = (self.clock() - self.snapshot_at).total_seconds() if self.snapshot_at else 0.0
        return slot.idle_s + max(since, 0.0)

    def step_times(self) -> tuple[float, float, float]:
        """Last, median and 95th percentile of the kept steps, in ms; zeros without steps."""
        times = [step.ms for step in self.steps]
        if not times:
            return 0.0, 0.0, 0.0
        p95 = statistics.quantiles(times, n=20, method="inclusive")[-1] if len(times) > 1 else times[0]
        return times[-1], statistics.median(times), p95

    def log(self, text: str, bad: bool = False) -> LoggedEvent:
        entry = LoggedEvent(self.clock(), text, bad)
        self.events.append(entry)
        return entry

    def take_up(self, turns: list[Turn]) -> None:
        """An earlier chat in place of this one; what its adapters' names meant then is known, so that another content is told apart."""
        self.items[:] = turns
        for version in self.versions():
            for name, digest in version.contents.items():
                self._contents.setdefault(name, set()).add(digest)

    def notice(self, text: str, kind: str = "info") -> None:
        self.items.append(Notice(kind, text))

    def apply(self, event: p.Event) -> None:
        """Fold one event of the engine in."""
        before = self.engine
        if (line := event_line(event)) and not self._said_already(event):
            if isinstance(event, p.AdapterLoaded) and self._last_line_of == (p.HostLoaded, event.adapter.name):
                self.events.pop()  # the same arrival, said with the modules that match
            self._last_line_of = (type(event), getattr(event, "recomputed", None) or getattr(event, "adapter", ""))
            entry = self.log(*line)
            match event:
                case p.SlotEvicted():
                    self.last_eviction = entry
                case p.RequestStarted():
                    self.prefixes.append(replace(entry, text=found_text(event.request_id, event.cache)))
                case p.CacheCleared() | p.KvEvicted() | p.RequestPreempted():
                    self.losses.append(entry)
        fold = getattr(self, f"_on_{type(event).__name__}", None)
        if fold:
            fold(event)
        if (number := getattr(event, "request_id", None)) is not None and (version := self.version(number)):
            self._take(version, event)
        if self.engine in ("idle", "generating"):
            self.engine = "generating" if self.running else "idle"
        if self.engine != before:
            self.hint = ""  # it spoke of a state that is over

    def _said_already(self, event: p.Event) -> bool:
        """Every rescaling uses the adapters again: said once. A mix takes the line of the mix before, unless that cost steps."""
        if isinstance(event, p.SlotLoaded | p.SlotEvicted):
            self._used.clear()
        if isinstance(event, p.SlotTouched):
            known = event.adapter in self._used
            self._used.add(event.adapter)
            return known
        if isinstance(event, p.MixSet) and self._last_line_of == (p.MixSet, "") and self.events:
            self.events.pop()
        return False

    # -- model and process ----------------------------------------------------------------------
    def _on_EngineStarted(self, event: p.EngineStarted) -> None:
        self.started, self.tracing = event, False
        if self.engine in ("starting", "gone"):
            self.engine = "no model"

    def _on_ModelLoading(self, event: p.ModelLoading) -> None:
        self.loading, self.engine = event, "loading"

    def _on_ModelLoaded(self, event: p.ModelLoaded) -> None:
        self.loading, self.engine = None, "idle"
        self.reading = None
        self.reloading.clear()
        self.snapshot = p.EngineSnapshot(model=event.model)
        self.adapters.clear()
        self.failed.clear()
        self.steps.clear()
        self.trace = None
        self.last_eviction = None
        self.prefixes.clear()
        self.losses.clear()
        for note in event.model.notes:
            self.notice(f"{event.model.name}: {note}")

    def _on_ModelFailed(self, event: p.ModelFailed) -> None:
        self.loading = None
        self.engine = "idle" if self.model else "no model"
        if not event.cancelled:
            self.notice(f"the model was not loaded: {event.message}\nCtrl+O opens another one.", "error")

    def _on_EngineSnapshot(self, event: p.EngineSnapshot) -> None:
        self.snapshot, self.snapshot_at = event, self.clock()
        self.adapters.update({view.info.name: view.info for view in event.adapters})
        self.letters.follow(event.kv.mixes)

    def _on_CommandFailed(self, event: p.CommandFailed) -> None:
        self.notice(event.message, "error")

    def _on_EngineFailed(self, event: p.EngineFailed) -> None:
        for version in self.running:
            if version.phase == "waiting":  # it was not sent: the next engine gets it
                version.note = "waits for the engine"
                continue
            after = f"after {counted(version.tokens, 'token')}; what it said is kept" if version.tokens else "before the first token"
            version.phase, version.note = "lost", f"the engine stopped {after}; Ctrl+R asks again"
        self.sent.clear()
        if event.fatal:
            self.reading = None
            self.reloading.clear()
            self.tracing = False
        if self.engine == "gone":
            return  # it said why before its process ended
        if event.fatal:
            self.engine, self.loading = "gone", None
            self.snapshot = p.EngineSnapshot()
            self.notice(event.message, "engine")
        else:
            self.notice(f"{event.message}\nThe engine goes on; Ctrl+R asks again.", "error")

    # -- adapters and mix -----------------------------------------------------------------------
    def _on_AdapterLoading(self, event: p.AdapterLoading) -> None:
        self.reading = event

    def _on_AdapterLoaded(self, event: p.AdapterLoaded) -> None:
        self.reading = None
        self._now_means(event.adapter)
        self.failed.pop(event.adapter.name, None)
        for note in event.adapter.notes:
            self.log(f"{event.adapter.name}: {note}", bad=True)

    def _now_means(self, info: p.AdapterInfo) -> None:
        """Replies made with an adapter's other contents say which, from the second content on."""
        name = info.name
        self.adapters[name] = info
        self._contents.setdefault(name, set()).add(info.digest)
        if self._is_ambiguous(name):
            for version in self.versions():
                if name in version.contents:
                    version.ambiguous |= {name}

    def _is_ambiguous(self, name: str) -> bool:
        return len(self._contents.get(name, ())) > 1

    def _made_with(self, version: Version, mix: p.Mix) -> None:
        """`mix` acts on `version` from now on, with what its names mean now; names it had already keep what they meant."""
        before = {use.name for use in version.mix_now} & version.contents.keys()
        version.contents |= {name: digest for name, digest in self.contents(mix).items() if name not in before}
        version.ambiguous = frozenset(name for name in version.contents if self._is_ambiguous(name))

    def _on_AdapterReloaded(self, event: p.AdapterReloaded) -> None:
        self.reading = None
        self.reloading.discard(event.adapter.name)
        self._now_means(event.adapter)
        self.notice(reloaded_text(event))
        if event.changes:
            for note in event.adapter.notes:
                self.log(f"{event.adapter.name}: {note}", bad=True)

    def _on_ReloadFailed(self, event: p.ReloadFailed) -> None:
        self.reading = None
        self.reloading.discard(event.name)
        self.notice(reload_failed_text(event), "info" if event.cancelled else "error")

    def _on_AdapterFileChanged(self, event: p.AdapterFileChanged) -> None:
        self.notice(file_text(event))

    def _on_CheckpointAppeared(self, event: p.CheckpointAppeared) -> None:
        self.notice(checkpoint_text(event))

    def _on_AdapterChanged(self, event: p.AdapterChanged) -> None:
        self.adapters[event.adapter.name] = event.adapter

    def _on_AdapterUnloaded(self, event: p.AdapterUnloaded) -> None:
        self.adapters.pop(event.name, None)

    def _on_AdapterFailed(self, event: p.AdapterFailed) -> None:
        self.reading = None
        if event.name in self.board:
            self.failed[event.name] = event.message
        name = event.name or (Path(event.path).name if event.path in event.message else event.path)
        if event.cancelled:
            self._tell_stopped(name)
        else:
            self.notice(f"adapter {name} was not loaded: {event.message}", "error")

    def _tell_stopped(self, name: str) -> None:
        """One stop ends many loads: they are one notice."""
        if not self.items or self.items[-1] is not self._stopped[0]:
            self.notice("")
            self._stopped = self.items[-1], []
        notice, names = self._stopped
        names.append(name)
        which = f"adapter {name} was" if len(names) == 1 else f"{listed(names)} were"
        notice.text = f"{which} not loaded: stopped"

    def _on_MixSet(self, event: p.MixSet) -> None:
        _, self.held, change = next((sent for sent in reversed(self.sent) if sent[0] == event.mix), (event.mix, self.held, "splice"))
        if change == "finish":
            for version in self.running:
                if not version.invoked:
                    version.take_change(Splice(len(version.text), version.tokens, version.mix_now, event.mix, "finish"))
            return
        for request_id, token in event.at_token.items():
            version = self.version(request_id)
            if version and version.mix_now != event.mix:
                self._made_with(version, event.mix)
                again = event.recomputed.get(request_id, 0) if version.phase == "running" else None
                version.take_change(Splice(len(version.text), token, version.mix_now, event.mix, change, again))
                version.activations = event.activations.get(request_id, ())

    def _on_MixRefused(self, event: p.MixRefused) -> None:
        mix = mix_text(event.mix) if len(event.mix) < 6 else f"of {len(event.mix)} adapters"
        self.notice(f"the mix {mix} was refused: {event.message}\nWhat was set before still holds.", "error")
        if not self.sent or self.sent[-1][0] == event.mix:
            self.board.restore(self.held)

    # -- replies --------------------------------------------------------------------------------
    def _take(self, version: Version, event: p.Event) -> None:
        """Fold an event of a reply in."""
        version.take(event)
        if isinstance(event, p.RequestStarted) and not version.preempted:
            self._made_with(version, version.mix_now)

    def _on_Tokenized(self, event: p.Tokenized) -> None:
        if event.ask_id == self.asked:
            self.tokenized = event

    def _on_StepFinished(self, event: p.StepFinished) -> None:
        self.steps.append(event)

    def _on_StepTraced(self, event: p.StepTraced) -> None:
        self.trace, self.tracing = event, False

    def _on_TraceFailed(self, event: p.TraceFailed) -> None:
        self.trace_failed, self.tracing = event.message, False
