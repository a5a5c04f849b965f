"""What the person does, turned into commands for the engine. Plain Python, no widgets."""
from __future__ import annotations

from dataclasses import replace

from msgspec.structs import replace as changed

from ..engine import protocol as p
from ..sample_adapters import sample_adapters
from .backends.backend import Backend
from .chat_records import PastChat
from .chats import Chats
from .checks import AdapterChecks
from .compare_control import CompareControl
from .live_change import CHANGES, change_text
from .mixboard import Setting
from .paste import MOST_FOUND, adapters_in, pasted_paths
from .paths import settings_file, votes_file
from .state import BenchState, StartAdapter
from .text import counted
from .transcript import Notice, Turn, Version, history_of
from .votes import VoteFile

MAX_PROMPT = 64 << 10
"""characters of one message; more is refused at the prompt, with the size"""
WARM_TEMPERATURE = 0.7


class Control:
    """The person's side of the bench. Methods change `state` and send commands; none waits for the engine."""

    def __init__(self, state: BenchState, backend: Backend) -> None:
        self.state = state
        self.sampling = p.Sampling()
        self.system = ""
        self.load: p.LoadModel | None = None
        self._backend = backend
        self.checks = AdapterChecks(state, backend.send)
        self.chats = Chats(self)
        self.comparing = CompareControl(state, backend.send, self._new_id, VoteFile(votes_file()))
        self._paths: dict[str, str] = {}
        self._pins: set[str] = set()
        self._invocations: dict[str, tuple[str, bool]] = {}
        self._leaving: set[str] = set()
        """adapters that the person asked to unload"""
        self._last_id = 0
        self._last_mix: p.Mix | None = None

    # -- engine ---------------------------------------------------------------------------------
    def receive(self, event: p.Event) -> None:
        """Fold an event in and answer it where the bench must: adapters after a model, what waited after both."""
        self.state.apply(event)
        self.checks.receive(event)
        match event:
            case p.ModelLoaded():
                self._last_mix = None
                self._load_adapters()
            case p.AdapterLoaded():
                self._adapter_ready(event.adapter)
            case p.AdapterChanged():
                self._invocations[event.adapter.name] = event.adapter.invocation, event.adapter.invocation_in_reply
            case p.EngineSnapshot():
                self._pins -= {view.info.name for view in event.adapters}
                self._pins |= {view.info.name for view in event.adapters if view.pinned}
            case p.AdapterFailed():
                self._answered(event.path, event.name)
            case p.AdapterUnloaded() if event.name in self._leaving:
                self._forget(event.name)  # one that another base pushed out stays on the board and is read again
            case p.EngineFailed():
                self._last_mix = None
            case p.MixRefused() if event.mix == self._last_mix:
                self._last_mix = self.state.mix()  # the board went back to what the engine holds
        self.comparing.receive(event)
        self._send_waiting()

    def open_model(self, load: p.LoadModel, adapters: tuple[StartAdapter, ...] = ()) -> None:
        """Load a base; adapters that are known already are loaded again onto it."""
        self.load = load
        self.state.wanted.extend(adapters)
        self.state.engine, self.state.loading = "loading", None
        self._backend.send(load)

    def cancel_load(self) -> bool:
        """Stop what is being loaded, a base or adapters; False when nothing is."""
        loads = self.state.engine == "loading" or self.state.reads_adapters
        if loads:
            self._backend.send(p.CancelLoad())
        return loads

    def restart(self) -> None:
        """A new engine with the same model, adapters, pins, invocations and mix. Raises OSError when none can be started."""
        for item in self.state.items:
            if isinstance(item, Notice) and item.kind == "engine":
                item.resolved = True
        self.state.engine = "starting"
        self.state.snapshot = p.EngineSnapshot()
        self.state.adapters.clear()
        self._backend.start()
        if self.load:
            self.open_model(self.load)

    # -- adapters -------------------------------------------------------------------------------
    def add_adapter(self, adapter: StartAdapter) -> None:
        self.state.wanted.append(adapter)
        self._backend.send(p.LoadAdapter(adapter.path, adapter.name))

    def add_paths(self, text: str) -> str:
        """Ask for the adapters at the paths in `text`, or the sample of that name; a sentence when one is not there."""
        sample = dict(sample_adapters()).get(text.strip())
        paths, problem = ([sample], "") if sample else pasted_paths(text)
        found = [path for folder in paths for path in adapters_in(folder)]
        if len(found) > MOST_FOUND:
            return f"{len(found):,} adapters lie there; at most {MOST_FOUND:,} are added at once: give some of them"
        for path in found:  # one is there to be heard; many are there to choose from
            self.add_adapter(StartAdapter(str(path), on=len(found) == 1))
        return problem

    def reload(self, name: str) -> None:
        """Have its file read again; what did not fit the base before is tried again."""
        if self.state.engine == "gone":
            self.state.hint = "the engine is gone: Ctrl+E starts it again"
        elif name in self.state.adapters:
            self.state.reloading.add(name)
            self._backend.send(p.ReloadAdapter(name))
        elif name in self._paths:
            self.add_adapter(StartAdapter(self._paths[name], name))

    def unload(self, name: str) -> None:
        if name in self.state.adapters:
            self._leaving.add(name)
            self._backend.send(p.UnloadAdapter(name))
        else:
            self._forget(name)

    def pin(self, name: str) -> None:
        """Pin, or unpin what is pinned."""
        self._backend.send(p.PinAdapter(name, name not in self._pins))

    def set_invocation(self, name: str, text: str, in_reply: bool = False) -> None:
        self._backend.send(p.SetInvocation(name, text, in_reply))

    def look_at_invocation(self, text: str, draft: str) -> None:
        """Ask how the base cuts `text`, and whether the prompt that would be sent now, with `draft` as its message, has it."""
        self.state.asked += 1
        self.state.tokenized = None
        said = history_of(self.state.items, "")
        if draft and not draft.startswith("/"):
            said = (*said, p.Message("user", draft))
        system = (p.Message("system", self.system),) if self.system else ()
        self._backend.send(p.Tokenize(self.state.asked, text, p.Chat((*system, *said)) if said else None))

    def set_change(self, change: p.MixChange) -> None:
        """What a change of the mix does, from now on, to a reply that is being written; kept across runs."""
        from .settings import keep_change  # its TOML reader takes a while to import

        self.state.change = change
        if problem := keep_change(settings_file(), change):
            self.state.notice(problem, "error")

    def next_change(self) -> None:
        """The next of the ways, and what it means."""
        self.set_change(CHANGES[(CHANGES.index(self.state.change) + 1) % len(CHANGES)])
        self.state.hint = change_text(self.state.change)

    def clear_cache(self) -> str:
        """Have the engine forget the KV blocks that no running reply holds; the sentence that says so."""
        self._backend.send(p.ClearCache())
        kept = self.state.snapshot.kv.cached
        return f"{counted(kept, 'KV block')} kept for later prompts will be forgotten: the next ones are read anew" if kept else (
            "no KV block is kept for later prompts")

    def trace(self) -> None:
        """Have the engine trace the next step, where it can (see `why_no_trace`)."""
        if not self.why_no_trace() and not self.state.tracing:
            self.state.tracing, self.state.trace_failed = True, ""
            self._backend.send(p.TraceStep())

    def why_no_trace(self) -> str:
        """Why no step can be traced now, "" where one can."""
        if self.state.engine == "gone":
            return "the engine is gone: Ctrl+E starts it again"
        if self.state.model:
            return ""
        if self.state.engine in ("starting", "loading"):
            return "the model is not there yet: t traces a step of it once it is loaded"
        return "no model is loaded: a trace is made of a step of one; Ctrl+O opens one"

    def prompt_prefix(self, name: str) -> str:
        """What the adapter's file says it expects before a prompt; it is offered, never applied unasked."""
        info = self.state.adapters.get(name)
        return info.prompt_prefix if info else ""

    def send_mix(self) -> None:
        """Send the board's mix when it is not what the engine was sent last; running replies take it from their next token."""
        mix = self.state.mix()
        if mix == self._last_mix or not self.state.model:
            return
        self._last_mix = mix
        change = self.state.change
        self.state.sent = [*self.state.sent[-20:], (mix, self.state.board.now, change)]
        self._backend.send(p.SetMix(mix, tuple(v.request_id for v in self.state.running if not v.invoked), change))

    def adapters(self) -> tuple[StartAdapter, ...]:
        """The adapters of the list as they are set, for another start."""
        board, paths = self.state.board, self._paths
        return tuple(StartAdapter(paths[name], name, board[name].scale, board[name].on) for name in board.names if name in paths)

    def take_up(self, past: PastChat) -> None:
        """An earlier chat takes the place of this one, with its system message, sampling, adapters and their scales."""
        self.state.take_up(past.turns)
        for version in self.state.versions():
            self._last_id += 1
            version.request_id = self._last_id
        self.system, self.sampling = past.bench.system, past.bench.sampling
        coming = {adapter.name for adapter in self.state.wanted}
        for adapter in past.bench.adapters:
            if adapter.name in self.state.board:
                self.state.board.put(adapter.name, Setting(adapter.on, adapter.scale))
            elif adapter.name not in coming:
                self.add_adapter(adapter)
        self.send_mix()

    # -- chat -----------------------------------------------------------------------------------
    def ask(self, text: str) -> bool:
        """Send a message; False, with a hint, when it cannot be sent now."""
        if self._busy():
            return False
        history = (*history_of(self.state.items, self.system), p.Message("user", text))
        turn = Turn(text)
        self.state.items.append(turn)
        turn.add(self._version(history, self.sampling))
        self._send_waiting()
        return True

    def invoke(self, name: str) -> bool:
        """Let an aLoRA act on this chat by its invocation; the reply stands beside the chat and is not part of it."""
        info = self.state.adapters.get(name)
        history = history_of(self.state.items, self.system)
        if not info:
            self.state.hint = f"{name} is not loaded now"
        elif not info.invocation:
            self.state.hint = f"{name} is no aLoRA: it has no invocation; f sets one"
        elif not history:
            self.state.hint = f"there is no chat yet for {name} to act on"
        elif not self._busy():
            turn = Turn("")
            self.state.items.append(turn)
            scale = self.state.board[name].scale
            turn.add(replace(self._version(history, self.sampling), opening=info.invocation, invoked=name,
                             mix=(p.AdapterUse(name, scale),)))
            self._send_waiting()
            return True
        return False

    def regenerate(self) -> bool:
        """Another version of the last reply, with the mix set now and the next seed."""
        turn = next((item for item in reversed(self.state.items) if isinstance(item, Turn)), None)
        if not turn:
            self.state.hint = "there is no reply yet"
        elif not self._busy():
            last = turn.versions[-1]
            sampling = self.sampling if self.sampling.temperature == 0 else changed(self.sampling, seed=last.sampling.seed + 1)
            again = replace(self._version(last.history, sampling), opening=last.opening, invoked=last.invoked)
            again.mix = last.mix if last.invoked else again.mix
            if sampling.temperature == 0 and _same(again, last) and self.state.contents(again.mix) == last.contents:
                self.state.hint = "greedy decoding gives the same reply for the same mix: change the mix, or sample: /set temperature 0.7"
                return False
            turn.add(again)
            self._send_waiting()
            return True
        return False

    def stop(self) -> bool:
        """Stop what is being generated; False when nothing is."""
        running = self.state.running
        for version in running:
            if version.phase == "waiting":
                version.phase, version.note = "done", "not sent"
                version.reason = "aborted"
            else:
                self._backend.send(p.Abort(version.request_id))
        return bool(running)

    def new_chat(self) -> None:
        self.stop()
        self.chats.keep()  # one that was answered since the last tick is on disk too
        self.state.items.clear()
        if self.system:
            self.state.hint = f"a new chat; the system message stays: {self.system}"

    def toggle_sampling(self) -> None:
        warm = self.sampling.temperature == 0
        self.set_sampling(temperature=WARM_TEMPERATURE if warm else 0.0)
        self.state.hint = f"sampling at temperature {WARM_TEMPERATURE}" if warm else "greedy: always the likeliest token"

    def set_sampling(self, **fields) -> None:
        self.sampling = changed(self.sampling, **fields)

    # -- inside ---------------------------------------------------------------------------------
    def _busy(self) -> bool:
        if self.state.engine == "gone":
            self.state.hint = "the engine is gone: Ctrl+E starts it again"
        elif self.state.running:
            self.state.hint = "a reply is being written: Esc stops it"
        else:
            return False
        return True

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _version(self, history: tuple[p.Message, ...], sampling: p.Sampling) -> Version:
        waits = "" if self.state.model else "waits for the model"
        return Version(self._new_id(), history, self.state.mix(), sampling, note=waits)

    def _send_waiting(self) -> None:
        """Send what waited for the model and its adapters, with the mix as it is now."""
        if not self.state.model or self.state.wanted or self.state.engine == "loading":
            return
        self.send_mix()
        for version in self.state.running:
            if version.phase == "waiting":
                version.mix = version.mix if version.invoked else self.state.mix()
                version.phase, version.note = "queued", ""
                prompt = p.Chat(version.history, version.opening)
                self._backend.send(p.Generate(version.request_id, prompt, version.mix, version.sampling))
                self.state.engine = "generating"

    def _load_adapters(self) -> None:
        known = [StartAdapter(path, name) for name, path in self._paths.items()]
        self.state.wanted = known + [w for w in self.state.wanted if w.name is None or w.name not in self._paths]
        for adapter in self.state.wanted:
            self._backend.send(p.LoadAdapter(adapter.path, adapter.name))

    def _adapter_ready(self, info: p.AdapterInfo) -> None:
        wanted = self._answered(info.path, info.name)
        self._paths[info.name] = wanted.path if wanted else info.path
        self.state.board.add(info.name, Setting(wanted.on, wanted.scale) if wanted else Setting())
        if info.name in self._pins:
            self._backend.send(p.PinAdapter(info.name, True))
        if info.name in self._invocations:
            self._backend.send(p.SetInvocation(info.name, *self._invocations[info.name]))

    def _answered(self, path: str, name: str) -> StartAdapter | None:
        """Take the wish that this answer belongs to: by name, by path, else the oldest."""
        wanted = self.state.wanted
        found = next((w for w in wanted if name and w.name == name), None) or next((w for w in wanted if w.path == path), None)
        found = found or (wanted[0] if wanted else None)
        if found:
            wanted.remove(found)
        return found

    def _forget(self, name: str) -> None:
        self.state.board.remove(name)
        self._leaving.discard(name)
        self._paths.pop(name, None)
        self._pins.discard(name)
        self._invocations.pop(name, None)
        self.state.failed.pop(name, None)


def _same(new: Version, old: Version) -> bool:
    return (old.phase == "done" and old.reason != "aborted" and not old.splices
            and (new.mix, new.sampling, new.history, new.opening) == (old.mix, old.sampling, old.history, old.opening))
