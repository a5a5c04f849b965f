"""Happenings of the engine as lines of the event log, each with its cause."""
from __future__ import annotations

from ..engine import protocol as p
from .cache_text import started_text
from .check_text import verdict_text
from .mixboard import mix_text
from .reload_text import checkpoint_text, sha_text
from .text import counted, size_text


def event_line(event: p.Event) -> tuple[str, bool] | None:
    """The log line of an event and whether it is bad news; None for events that other panels show."""
    line = _LINES.get(type(event))
    return line(event) if line else None


def _loaded(event: p.SlotLoaded) -> tuple[str, bool]:
    return f"{event.adapter} → G{event.slot} from {event.source}, {size_text(event.bytes)} in {event.ms:.1f} ms: {event.because}", False


def _adapter(event: p.AdapterLoaded) -> tuple[str, bool]:
    info = event.adapter
    return f"{info.name} → host: {info.matched}/{info.total} modules, {size_text(info.bytes)} in {event.ms:.0f} ms", False


def _unloading(event: p.AdapterUnloading) -> tuple[str, bool]:
    return f"unload of {event.name} waits for {p.requests_text(event.waiting_for)}", False


def _mix(event: p.MixSet) -> tuple[str, bool]:
    again = [f"{counted(tokens, 'token')} of request {number} computed again" for number, tokens in event.recomputed.items() if tokens]
    return " · ".join((f"mix: {mix_text(event.mix)}", *again)), False


def _fired(event: p.InvocationFired) -> tuple[str, bool]:
    activation = event.activation
    return (f"{activation.adapter} acts in request {event.request_id} from token {activation.start}: the model wrote its invocation, "
            f"{activation.detail}"), False


def _graph(event: p.GraphCapturing | p.GraphCaptured) -> str:
    which = f"with {event.more or 'adapters'}" if event.adapters else "without adapters"
    return f"the decode graph of {counted(event.rows, 'row')} {which}"


_FILE = {"changed": "its file changed on disk", "deleted": "its file is gone", "back": "its file is again what was read"}
_LINES = {
    p.EngineStarted: lambda e: (f"engine started, pid {e.pid}, torch {e.torch}, {', '.join(e.devices)}", False) if e.devices else None,
    p.ModelLoaded: lambda e: (f"model {e.model.name} ready in {e.ms / 1000:.1f} s", False),
    p.ModelFailed: lambda e: ("load cancelled" if e.cancelled else f"model failed: {e.message}", not e.cancelled),
    p.AdapterLoaded: _adapter,
    p.AdapterFailed: lambda e: (f"{e.name or e.path}: load stopped" if e.cancelled else f"{e.name or e.path} failed: {e.message}",
                                not e.cancelled),
    p.AdapterReloaded: lambda e: (f"{e.adapter.name} was read again: {sha_text(e)}", False),
    p.ReloadFailed: lambda e: (f"{e.name} was not read again: {'stopped' if e.cancelled else e.message}", not e.cancelled),
    p.AdapterFileChanged: lambda e: (f"{e.name}: {_FILE[e.what]}", e.what != "back"),
    p.CheckpointAppeared: lambda e: (checkpoint_text(e), False),
    p.AdapterUnloading: _unloading,
    p.AdapterUnloaded: lambda e: (f"{e.name} unloaded, {size_text(e.freed_bytes)} freed", False),
    p.AdapterChanged: lambda e: (f"{e.adapter.name}: invocation {e.adapter.invocation or 'none'}", False),
    p.CheckFinished: lambda e: (f"{e.name} checked: {verdict_text(e.report)}", not e.report.usable),
    p.CheckFailed: lambda e: (f"check of {e.name} {'stopped' if e.cancelled else f'failed: {e.message}'}", not e.cancelled),
    p.SlotLoaded: _loaded,
    p.SlotTouched: lambda e: (f"{e.adapter} in G{e.slot} used again", False),
    p.SlotEvicted: lambda e: (f"{e.adapter} left G{e.slot}: {e.because}", False),
    p.HostLoaded: lambda e: (f"{e.adapter} → host, {size_text(e.bytes)} in {e.ms:.1f} ms{f' for {e.because}' if e.because else ''}", False),
    p.HostEvicted: lambda e: (f"{e.adapter} left the host tier, {size_text(e.bytes)}: {e.because}", False),
    p.MixSet: _mix,
    p.MixRefused: lambda e: (f"mix refused: {e.message}", True),
    p.RequestQueued: lambda e: (f"request {e.request_id} waits: {e.because}", False),
    p.RequestStarted: lambda e: (started_text(e.request_id, e.cache), False) if e.cache.prompt_tokens else None,
    p.RequestPreempted: lambda e: (f"request {e.request_id} gave its {counted(e.tokens, 'token')} of KV memory back and waits: {e.because}",
                                   False),
    p.InvocationFired: _fired,
    p.CacheCleared: lambda e: (f"{counted(e.blocks, 'KV block')} cleared: {e.because}", False),
    p.KvEvicted: lambda e: (f"{counted(e.blocks, 'KV block')} evicted for request {e.request_id}, the oldest unused for {e.oldest_s:.0f} s",
                            False),
    p.GraphCapturing: lambda e: (f"capturing {_graph(e)}; its kernels are compiled", False),
    p.GraphCaptured: lambda e: ((f"{e.problem}; such steps run without a graph", True) if e.problem else
                                (f"{_graph(e)} is there after {e.ms / 1000:.1f} s", False)),
    p.StepTraced: lambda e: (f"step {e.step.step} was traced: {counted(len(e.ops), 'name')}, {e.ms:.1f} ms; replies stood still for "
                             f"{e.cost_ms:.0f} ms more", False),
    p.TraceFailed: lambda e: (f"no trace: {e.message}", True),
    p.RequestFailed: lambda e: (f"request {e.request_id} failed: {e.message}", True),
    p.CommandFailed: lambda e: (e.message, True),
    p.EngineFailed: lambda e: (e.message, True),
}
