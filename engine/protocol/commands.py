"""Commands: front end -> engine."""
from __future__ import annotations

from typing import Literal

from .words import Mix, Prompt, Sampling, Struct


class LoadModel(Struct):
    """Load a base. `path` None is the embedded default model (fetched once). Replaces the base that is loaded."""

    path: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    context: int = 0
    """tokens a request may hold; 0 takes what the model was trained for, at most 8192"""
    slots: int = 4
    host_cache_bytes: int = 1 << 30
    weights: Literal["auto", "dense", "packed"] = "auto"
    """in memory: numbers of `dtype`, or packed as in the file; auto packs them when dense ones leave too little memory free"""


class CancelLoad(Struct):
    """Stop every load in progress, of a base or of adapters; each is answered by its own failure with `cancelled`."""


class LoadAdapter(Struct):
    """Read an adapter from disk into the host tier, beside what runs. `name` None takes a free name from the path.

    A command that names an adapter that is being read waits until it is there, and so do the commands behind it.
    """

    path: str
    name: str | None = None


class ReloadAdapter(Struct):
    """Read an adapter's file again and put what it holds now under the same name.

    Requests that run finish on the content that they began with; waiting and new ones, and the standing mix, get the new one.
    Pin, scale and an invocation that was set by command stay. Content that is the same changes nothing.
    """

    name: str


class UnloadAdapter(Struct):
    """Forget an adapter and free its memory; waits for the requests that use it, the waiting ones too."""

    name: str


class PinAdapter(Struct):
    """A pinned adapter is not evicted from its slot."""

    name: str
    pinned: bool


class SetInvocation(Struct):
    """Set the aLoRA invocation string of an adapter (tokenised by the base); "" makes it a plain LoRA."""

    name: str
    text: str


class CheckAdapter(Struct):
    """Find out what a loaded adapter is and does; answered by CheckFinished or CheckFailed. With `effect` also an effect run.

    It is computed between steps, while no request runs.
    """

    name: str
    effect: bool = False


class Generate(Struct):
    request_id: int
    prompt: Prompt
    mix: Mix = ()
    sampling: Sampling = Sampling()


class SetMix(Struct):
    """The mix for the named running requests from their next token on; and the standing mix, whose adapters get slots at once.

    Setting the mix that is already set does nothing and says nothing.
    """

    mix: Mix
    request_ids: tuple[int, ...] = ()


class Abort(Struct):
    request_id: int


class Shutdown(Struct):
    pass


Command = (
    LoadModel | CancelLoad | LoadAdapter | ReloadAdapter | UnloadAdapter | PinAdapter | SetInvocation | CheckAdapter
    | Generate | SetMix | Abort | Shutdown
)
