"""Events: engine -> front end. Happenings, and the snapshot among them."""
from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from .facts import Activation, AdapterInfo, ModelInfo, RequestStats
from .kv import CacheCleared, CacheUse, KvEvicted, RequestPreempted
from .report import CheckReport
from .score import Scored, ScoreFailed, Tokenized
from .snapshot import EngineSnapshot
from .words import Mix, Struct


class EngineStarted(Struct):
    pid: int
    torch: str
    devices: tuple[str, ...]


class ModelLoading(Struct):
    """Progress. `phase` is "download", "header", "tokenizer", "weights" or "warm-up"; `done`/`total` in bytes, total 0 when unknown."""

    phase: str
    item: str
    done: int
    total: int


class ModelLoaded(Struct):
    model: ModelInfo
    ms: float


class ModelFailed(Struct):
    message: str
    cancelled: bool = False
    out_of_memory: bool = False


class AdapterLoading(Struct):
    """Progress of a load or reload that takes a while, about ten a second; `name` is "" until one is chosen. Bytes."""

    name: str
    path: str
    done: int
    total: int


class AdapterLoaded(Struct):
    adapter: AdapterInfo
    ms: float


class AdapterFailed(Struct):
    name: str
    path: str
    message: str
    out_of_memory: bool = False
    cancelled: bool = False


class AdapterReloaded(Struct):
    """An adapter's file was read again. Without `changes` it is what was loaded."""

    adapter: AdapterInfo
    old_digest: str
    changes: tuple[str, ...]
    """what is different, a clause each: "rank 16 → 32", ..."""
    others: tuple[str, ...]
    """other names that were loaded from the same files and keep what they hold"""
    kept_for: tuple[int, ...]
    """running requests that finish on the old content"""
    kept_as: str
    """the name under which the old content has its slot until they end; "" when nobody uses it"""
    ms: float


class ReloadFailed(Struct):
    """The file could not be taken; the content that was loaded stays as it is."""

    name: str
    message: str
    out_of_memory: bool = False
    cancelled: bool = False


class AdapterFileChanged(Struct):
    """The file of a loaded adapter is no longer as it was read, or is so again; what is loaded is not touched by it."""

    name: str
    path: str
    what: Literal["changed", "deleted", "back"]


class CheckpointAppeared(Struct):
    """A complete new checkpoint lies beside a loaded one; it is not loaded."""

    beside: str
    """name of the loaded adapter"""
    path: str


class AdapterUnloading(Struct):
    """The unload waits for requests that use the adapter."""

    name: str
    waiting_for: tuple[int, ...]


class AdapterUnloaded(Struct):
    name: str
    freed_bytes: int


class AdapterChanged(Struct):
    """Its invocation or another fact was changed by a command."""

    adapter: AdapterInfo


class CheckProgress(Struct):
    """What a check does now."""

    name: str
    text: str


class CheckFinished(Struct):
    name: str
    report: CheckReport


class CheckFailed(Struct):
    """A check could not be made, or not to its end."""

    name: str
    message: str
    out_of_memory: bool = False
    cancelled: bool = False
    """by CancelCheck"""


class SlotLoaded(Struct):
    slot: int
    adapter: str
    bytes: int
    ms: float
    source: str
    """"host" or "disk" """
    because: str


class SlotTouched(Struct):
    """A request or mix began to use an adapter that was already in its slot."""

    slot: int
    adapter: str


class SlotEvicted(Struct):
    slot: int
    adapter: str
    because: str


class HostLoaded(Struct):
    adapter: str
    bytes: int
    ms: float
    because: str = ""
    """for whom it was read again; "" for a load by command"""


class HostEvicted(Struct):
    adapter: str
    bytes: int
    because: str


class MixSet(Struct):
    """A SetMix took effect; `at_token` counts the reply's tokens that came before, by request."""

    mix: Mix
    at_token: dict[int, int]
    activations: dict[int, tuple[Activation, ...]] = {}
    """where the aLoRAs of the mix act in the requests that it changed"""
    recomputed: dict[int, int] = {}
    """tokens, by request, that are computed again under it before the reply goes on"""


class MixRefused(Struct):
    """A SetMix was not taken; what was set before still holds."""

    mix: Mix
    message: str


class RequestQueued(Struct):
    """A request must wait; `because` says for what, with the numbers."""

    request_id: int
    because: str


class RequestStarted(Struct):
    """It has its slots and its first KV blocks. Sent again when it goes on after a preemption."""

    request_id: int
    prompt_tokens: int
    activations: tuple[Activation, ...] = ()
    cache: CacheUse = CacheUse(0)


class InvocationFired(Struct):
    """The model wrote the invocation of an aLoRA of its mix: the adapter acts from there on."""

    request_id: int
    activation: Activation
    at_token: int
    """tokens of the reply up to and with the invocation"""


class TextDelta(Struct):
    """New text of a reply (whole characters only) and how many tokens it has now."""

    request_id: int
    text: str
    tokens: int


class RequestFinished(Struct):
    request_id: int
    reason: Literal["stop", "length", "context", "memory", "aborted"]
    """memory: it needed more KV blocks than there are, with nothing beside it that could give some back"""
    stats: RequestStats
    ids: tuple[int, ...] = ()
    """the reply's token ids, the end token included when it was drawn"""
    detail: str = ""
    """of "memory": a sentence with the numbers and what to do"""


class RequestFailed(Struct):
    request_id: int
    message: str
    out_of_memory: bool = False


class GraphCapturing(Struct):
    """The first decode step of its kind on a CUDA device (up to `rows` requests, with or without adapters): its kernels are compiled and
    its launches captured, once."""

    rows: int
    adapters: bool
    more: str
    """what adapters have that is more than low rank, in words: such steps have graphs of their own; "" for nothing"""


class GraphCaptured(Struct):
    """With `problem` it could not be: steps of this kind run without graphs from here on."""

    rows: int
    adapters: bool
    more: str
    ms: float
    problem: str = ""


class StepFinished(Struct):
    """One step. `ms_by_op` sums to `ms`: it has the keys of GRAPH_OPS when all of it ran as a graph, else those of STEP_OPS, and "replies"
    where these ran as a graph beside prompts."""

    step: int
    prefill_tokens: int
    decode_tokens: int
    requests: int
    adapters: int
    max_rank: int
    ms: float
    ms_by_op: dict[str, float]
    path: str = ""
    """"graph", "graph and 2 prompts", or why there was none, where there are graphs: "eager: 3 prompts" """


STEP_OPS = ("base matmul", "shrink", "expand", "attention", "sampling", "other")
GRAPH_OPS = ("qkv", "attention", "o", "gate_up", "down", "head", "adapters", "sampling", "copy", "gaps")
""""adapters": what they add to the linears, measured now and then and taken as the same share between; "copy": the upload of the step and
the embedding; "gaps": while the device waited for the host"""


class TracedOp(Struct):
    """All of a step that ran under one name."""

    name: str
    """of a kernel or a copy on a GPU, of an op of torch on a CPU; untrusted"""
    calls: int
    us: float
    """an op without the ops that it called"""
    beside_us: float
    """of these, while something on another stream ran too"""


class StepTraced(Struct):
    """One step as the profiler recorded it, which makes it slower."""

    step: StepFinished
    device: str
    """"cuda" or "cpu" """
    ms: float
    """of the step by the clock of the host"""
    busy_ms: float
    """of these, while any of `ops` ran; in the rest the device waited, or what torch does not know of ran on the CPU"""
    cost_ms: float
    """beside `ms`: to start the profiler and to read what it recorded. Replies stood still meanwhile"""
    ops: tuple[TracedOp, ...]
    """the longest first"""


class TraceFailed(Struct):
    """A trace could not be made; replies go on."""

    message: str


class CommandFailed(Struct):
    """A command could not be carried out (unknown adapter, ...); nothing changed."""

    message: str


class EngineFailed(Struct):
    """The engine cannot go on. From the backend when the process died; `fatal` False means it recovered and requests were dropped."""

    message: str
    fatal: bool = True
    out_of_memory: bool = False


Event = (
    EngineStarted | ModelLoading | ModelLoaded | ModelFailed
    | AdapterLoading | AdapterLoaded | AdapterFailed | AdapterReloaded | ReloadFailed | AdapterFileChanged | CheckpointAppeared
    | AdapterUnloading | AdapterUnloaded | AdapterChanged | CheckProgress | CheckFinished | CheckFailed
    | SlotLoaded | SlotTouched | SlotEvicted | HostLoaded | HostEvicted | MixSet | MixRefused
    | RequestQueued | RequestStarted | RequestPreempted | InvocationFired | TextDelta | RequestFinished | RequestFailed
    | CacheCleared | KvEvicted | Scored | ScoreFailed | Tokenized
    | GraphCapturing | GraphCaptured | StepFinished | StepTraced | TraceFailed | CommandFailed | EngineFailed | EngineSnapshot
)
Emit = Callable[[Event], None]
