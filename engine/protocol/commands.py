"""Commands: front end -> engine."""
from __future__ import annotations

from typing import Literal

from .words import Mix, Prompt, Sampling, Struct


class LoadModel(Struct):
    """Load a base. `path` None is the embedded default model (fetched once). Replaces the base that is loaded."""

    path: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "fp32", "bf16", "fp16", "packed"] = "auto"
    """of weights, keys and values. packed: matrices stay packed and are multiplied so; on a CPU, products then round to bf16 and all else
    is fp32, on CUDA it is bf16. auto: on a CPU packed where most of a file's numbers are of types that it multiplies so, else fp32; on CUDA
    bf16"""
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
    in_reply: bool = False
    """it also begins to act where the model itself writes the invocation: from its first token on, which is computed again"""


class CheckAdapter(Struct):
    """Find out what a loaded adapter is and does; answered by CheckFinished or CheckFailed. With `effect` also an effect run.

    It is computed between steps, while no request runs.
    """

    name: str
    effect: bool = False


class CancelCheck(Struct):
    """Give up the check of an adapter, running or waiting: CheckFailed with `cancelled`. Nothing happens when there is none."""

    name: str


class Generate(Struct):
    request_id: int
    prompt: Prompt
    mix: Mix = ()
    sampling: Sampling = Sampling()


class GenerateTogether(Struct):
    """Requests that are rows of one batch: they begin in the same step, and none is a token ahead of another that still runs.

    Refused whole (RequestFailed for each) when one of them could not run, or all of them never fit into slots and KV memory at once.
    """

    requests: tuple[Generate, ...]


MixChange = Literal["splice", "recompute", "finish"]
"""what a change of the mix does to a request that runs: splice keeps what is stored as it was computed; recompute computes prompt and reply
so far again under the new mix, then goes on; finish lets it end under the mix that it has"""


class SetMix(Struct):
    """The mix for the named running requests from their next token on; and the standing mix, whose adapters get slots at once.

    Setting the mix that is already set does nothing and says nothing.
    """

    mix: Mix
    request_ids: tuple[int, ...] = ()
    change: MixChange = "splice"
    """of the named requests"""


class Abort(Struct):
    request_id: int


class Score(Struct):
    """Read one text under several mixes, nothing drawn (teacher forcing); answered by Scored or ScoreFailed.

    The rows of all mixes are computed in the same steps, beside what runs. `reply` are the ids that follow the prompt; every one of them
    gets its log-probability under every mix, and each mix its KL from the first.
    """

    score_id: int
    prompt: Prompt
    reply: tuple[int, ...]
    mixes: tuple[Mix, ...]
    top: int = 5
    """likeliest tokens told of every position"""


class CancelScore(Struct):
    """Give up a score, running or waiting: ScoreFailed with `cancelled`. Nothing happens when there is none of that number."""

    score_id: int


class Tokenize(Struct):
    """How the base cuts a text, and where it would be found; answered by Tokenized. `invocation` is a text typed so far."""

    ask_id: int
    invocation: str
    prompt: Prompt | None = None
    """to look for it in; None for a look at the tokens alone"""


class TraceStep(Struct):
    """Record the next step under the profiler, once; answered by StepTraced or TraceFailed. It waits for one while no request runs.

    A step that prepares a graph is not taken, but the one behind it.
    """


class ClearCache(Struct):
    """Forget the KV blocks that no running request holds."""


class Shutdown(Struct):
    pass


Command = (
    LoadModel | CancelLoad | LoadAdapter | ReloadAdapter | UnloadAdapter | PinAdapter | SetInvocation | CheckAdapter | CancelCheck
    | Generate | GenerateTogether | SetMix | Abort | Score | CancelScore | Tokenize | TraceStep | ClearCache | Shutdown
)
