"""All that crosses the seam between a front end and an engine: commands, events, the snapshot.

Plain frozen msgspec structs, no torch. `encode`/`Decoder` are the wire form: one msgpack
message behind a 4-byte little-endian length, the same in both directions.
"""
from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import BinaryIO, Literal

import msgspec

MAX_FRAME_BYTES = 64 << 20


class _Struct(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of everything that travels: immutable, tagged with its class name."""


# -- words shared by commands and events --------------------------------------------------------
class AdapterUse(_Struct):
    """One adapter in a mix. `scale` is what the user sets: 1 is as trained, 0 is off, negative is allowed."""

    name: str
    scale: float = 1.0


Mix = tuple[AdapterUse, ...]


class Message(_Struct):
    role: str
    content: str


class Chat(_Struct):
    """Messages for the model's chat template.

    `opening` is text put after the messages instead of the template's generation prompt; special
    tokens in it are parsed. It is how an aLoRA's invocation is asked for.
    """

    messages: tuple[Message, ...]
    opening: str = ""


class RawText(_Struct):
    """Text that is tokenised as it stands, special tokens parsed, no template."""

    text: str


class TokenIds(_Struct):
    ids: tuple[int, ...]


Prompt = Chat | RawText | TokenIds


class Sampling(_Struct):
    """How a token is drawn. `temperature` 0 is greedy; 0 / 1.0 / 0.0 / 1.0 switch top_k / top_p / min_p / penalty off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 512
    stop: tuple[str, ...] = ()


# -- commands: front end -> engine --------------------------------------------------------------
class LoadModel(_Struct):
    """Load a base. `path` None is the embedded default model (fetched once). Replaces the base that is loaded."""

    path: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    context: int = 0
    """tokens a request may hold; 0 takes what the model was trained for, at most 8192"""
    slots: int = 4
    host_cache_bytes: int = 1 << 30


class CancelLoad(_Struct):
    """Stop the LoadModel in progress; answered by ModelFailed(cancelled=True)."""


class LoadAdapter(_Struct):
    """Read an adapter from disk into the host tier. `name` None takes a free name from the path."""

    path: str
    name: str | None = None


class UnloadAdapter(_Struct):
    """Forget an adapter and free its memory; waits for the requests that use it, the waiting ones too."""

    name: str


class PinAdapter(_Struct):
    """A pinned adapter is not evicted from its slot."""

    name: str
    pinned: bool


class SetInvocation(_Struct):
    """Set the aLoRA invocation string of an adapter (tokenised by the base); "" makes it a plain LoRA."""

    name: str
    text: str


class Generate(_Struct):
    request_id: int
    prompt: Prompt
    mix: Mix = ()
    sampling: Sampling = Sampling()


class SetMix(_Struct):
    """The mix for the named running requests from their next token on; and the standing mix, whose adapters get slots at once.

    Setting the mix that is already set does nothing and says nothing.
    """

    mix: Mix
    request_ids: tuple[int, ...] = ()


class Abort(_Struct):
    request_id: int


class Shutdown(_Struct):
    pass


Command = LoadModel | CancelLoad | LoadAdapter | UnloadAdapter | PinAdapter | SetInvocation | Generate | SetMix | Abort | Shutdown


# -- facts about what is loaded ------------------------------------------------------------------
class ModelInfo(_Struct):
    name: str
    path: str
    format: str
    """"gguf" or "safetensors" """
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    """tokens a request may hold here"""
    trained_context: int
    parameters: int
    file_bytes: int
    weight_bytes: int
    """bytes of the weights in memory"""
    weight_types: dict[str, int]
    """tensor type in the file -> number of tensors"""
    device: str
    dtype: str
    tied: bool
    threads: int
    linear_modules: int
    chat_template: bool
    end_tokens: tuple[int, ...]
    notes: tuple[str, ...] = ()
    """things a user should know that did not stop the load"""


class AdapterInfo(_Struct):
    """What an adapter is and what of it acts on this base."""

    name: str
    path: str
    format: str
    digest: str
    """hex sha256 of its tensors' content and the fields that give them meaning; equal content, equal digest"""
    ranks: tuple[int, ...]
    """distinct ranks, ascending"""
    effective_scales: tuple[float, ...]
    """distinct alpha/r (or alpha/sqrt(r)) over its modules, ascending; multiplied by the user's scale"""
    matched: int
    """modules of the file that are in the base"""
    total: int
    """modules of the file"""
    targets: dict[str, int]
    """module kind (q_proj, ...) -> how many layers"""
    bytes: int
    """bytes of its tensors as kept in memory"""
    rslora: bool
    dtype: str
    base_model: str
    """what the adapter says it was trained on; untrusted text"""
    invocation: str = ""
    """aLoRA invocation as text, "" for a plain LoRA"""
    invocation_tokens: tuple[int, ...] = ()
    norms: tuple[float, ...] = ()
    """Frobenius norm of scale * B A summed in squares over the modules of a layer, by layer"""
    notes: tuple[str, ...] = ()
    """things a user should know that did not stop the load"""


class Activation(_Struct):
    """Where one adapter of a mix starts to act in a prompt."""

    adapter: str
    found: bool
    start: int
    """index of the first token it acts on; -1 when not found"""
    length: int
    """tokens of the invocation; 0 for a plain LoRA, which is not reported"""
    detail: str
    """one clause that no other field says: the matched text, or the nearest miss"""


class RequestStats(_Struct):
    prompt_tokens: int
    new_tokens: int
    ttft_ms: float
    """from the arrival of Generate to the first token; 0 when there was none"""
    prefill_ms: float
    decode_ms: float
    decode_tokens_per_second: float
    seed: int


# -- happenings: engine -> front end -------------------------------------------------------------
class EngineStarted(_Struct):
    pid: int
    torch: str
    devices: tuple[str, ...]


class ModelLoading(_Struct):
    """Progress. `phase` is "download", "header", "tokenizer", "weights" or "warm-up"; `done`/`total` in bytes, total 0 when unknown."""

    phase: str
    item: str
    done: int
    total: int


class ModelLoaded(_Struct):
    model: ModelInfo
    ms: float


class ModelFailed(_Struct):
    message: str
    cancelled: bool = False
    out_of_memory: bool = False


class AdapterLoaded(_Struct):
    adapter: AdapterInfo
    ms: float


class AdapterFailed(_Struct):
    name: str
    path: str
    message: str
    out_of_memory: bool = False


class AdapterUnloading(_Struct):
    """The unload waits for requests that use the adapter."""

    name: str
    waiting_for: tuple[int, ...]


class AdapterUnloaded(_Struct):
    name: str
    freed_bytes: int


class AdapterChanged(_Struct):
    """Its invocation or another fact was changed by a command."""

    adapter: AdapterInfo


class SlotLoaded(_Struct):
    slot: int
    adapter: str
    bytes: int
    ms: float
    source: str
    """"host" or "disk" """
    because: str


class SlotTouched(_Struct):
    """A request or mix began to use an adapter that was already in its slot."""

    slot: int
    adapter: str


class SlotEvicted(_Struct):
    slot: int
    adapter: str
    because: str


class HostLoaded(_Struct):
    adapter: str
    bytes: int
    ms: float


class HostEvicted(_Struct):
    adapter: str
    bytes: int
    because: str


class MixSet(_Struct):
    """A SetMix took effect; `at_token` counts the reply's tokens that came before, by request."""

    mix: Mix
    at_token: dict[int, int]
    activations: dict[int, tuple[Activation, ...]] = {}
    """where the aLoRAs of the mix act in the requests that it changed"""


class MixRefused(_Struct):
    """A SetMix was not taken; what was set before still holds."""

    mix: Mix
    message: str


class RequestQueued(_Struct):
    """A request must wait; `because` says for what, with the numbers."""

    request_id: int
    because: str


class RequestStarted(_Struct):
    request_id: int
    prompt_tokens: int
    activations: tuple[Activation, ...] = ()


class TextDelta(_Struct):
    """New text of a reply (whole characters only) and how many tokens it has now."""

    request_id: int
    text: str
    tokens: int


class RequestFinished(_Struct):
    request_id: int
    reason: Literal["stop", "length", "context", "aborted"]
    stats: RequestStats
    ids: tuple[int, ...] = ()
    """the reply's token ids, the end token included when it was drawn"""


class RequestFailed(_Struct):
    request_id: int
    message: str
    out_of_memory: bool = False


class StepFinished(_Struct):
    """One forward. `ms_by_op` has the keys of STEP_OPS; they sum to `ms`."""

    step: int
    prefill_tokens: int
    decode_tokens: int
    requests: int
    adapters: int
    max_rank: int
    ms: float
    ms_by_op: dict[str, float]


STEP_OPS = ("base matmul", "shrink", "expand", "attention", "sampling", "other")


class CommandFailed(_Struct):
    """A command could not be carried out (unknown adapter, ...); nothing changed."""

    message: str


class EngineFailed(_Struct):
    """The engine cannot go on. From the backend when the process died; `fatal` False means it recovered and requests were dropped."""

    message: str
    fatal: bool = True
    out_of_memory: bool = False


# -- the snapshot: what is, whole, at most 10 a second -------------------------------------------
class SlotView(_Struct):
    slot: int
    adapter: str = ""
    """"" when free"""
    rank: int = 0
    bytes: int = 0
    pinned: bool = False
    users: int = 0
    """running requests that use it"""
    idle_s: float = 0.0
    """seconds since last use"""


class AdapterView(_Struct):
    info: AdapterInfo
    tier: Literal["slot", "host", "disk"]
    slot: int = -1
    pinned: bool = False


class HostView(_Struct):
    used_bytes: int = 0
    limit_bytes: int = 0
    adapters: tuple[str, ...] = ()
    """least recently used first"""


class KvOwner(_Struct):
    request_id: int
    blocks: int
    tokens: int
    """tokens whose keys and values are stored"""
    mix: Mix = ()


class KvView(_Struct):
    block_tokens: int = 0
    blocks: int = 0
    bytes: int = 0
    owners: tuple[KvOwner, ...] = ()


class EngineSnapshot(_Struct):
    model: ModelInfo | None = None
    adapters: tuple[AdapterView, ...] = ()
    slots: tuple[SlotView, ...] = ()
    host: HostView = HostView()
    kv: KvView = KvView()
    mix: Mix = ()
    running: tuple[int, ...] = ()
    waiting: tuple[int, ...] = ()
    memory_bytes: int = 0
    """resident set of the engine process"""
    composed_bytes: int = 0
    """device memory of adapters laid end to end for steps that use several at once (at most two such compositions), beside the slots"""


Event = (
    EngineStarted | ModelLoading | ModelLoaded | ModelFailed
    | AdapterLoaded | AdapterFailed | AdapterUnloading | AdapterUnloaded | AdapterChanged
    | SlotLoaded | SlotTouched | SlotEvicted | HostLoaded | HostEvicted | MixSet | MixRefused
    | RequestQueued | RequestStarted | TextDelta | RequestFinished | RequestFailed
    | StepFinished | CommandFailed | EngineFailed | EngineSnapshot
)
Emit = Callable[[Event], None]


# -- wire ----------------------------------------------------------------------------------------
_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_events = msgspec.msgpack.Decoder(Event)


def write_frame(stream: BinaryIO, item: Command | Event) -> None:
    """Write one item and flush; text that is no Unicode (lone surrogates) goes as "?".

    Raises OSError when the other side is gone; ValueError, with nothing written, for an item that no frame holds.
    """
    kind = type(item).__name__
    try:
        payload = _encoder.encode(item)
    except UnicodeEncodeError:
        payload = _encoder.encode(_unicode(msgspec.to_builtins(item)))
    except OverflowError as error:
        raise ValueError(f"{kind} holds a whole number of more than 64 bits; give a smaller one") from error
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"{kind} takes {len(payload):,} bytes, over the limit of {MAX_FRAME_BYTES:,}; send a shorter text")
    stream.write(struct.pack("<I", len(payload)) + payload)
    stream.flush()


def read_commands(stream: BinaryIO) -> Iterator[Command]:
    """Commands until the stream ends. Raises ValueError for a frame that is none."""
    return map(_commands.decode, _frames(stream))


def read_events(stream: BinaryIO) -> Iterator[Event]:
    """Events until the stream ends. Raises ValueError for a frame that is none."""
    return map(_events.decode, _frames(stream))


def _unicode(value: object) -> object:
    """`value` (plain data) with every lone surrogate replaced."""
    match value:
        case str():
            return value.encode("utf-8", "replace").decode()
        case dict():
            return {_unicode(key): _unicode(item) for key, item in value.items()}
        case list() | tuple():
            return [_unicode(item) for item in value]
        case _:
            return value


def _frames(stream: BinaryIO) -> Iterator[bytes]:
    while len(head := stream.read(4)) == 4:
        (size,) = struct.unpack("<I", head)
        if size > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {size} bytes is over the limit of {MAX_FRAME_BYTES}")
        payload = stream.read(size)
        if len(payload) < size:
            return
        yield payload
