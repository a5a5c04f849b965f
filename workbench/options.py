"""Options that several commands of the command line share."""
from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from .arguments import MAX_SLOTS, MAX_STOP_CHARACTERS, MAX_STOPS, UsageError, Within, check_formats, find_model, parse_size, unescape

if TYPE_CHECKING:
    from ..engine.protocol import LoadModel, Sampling

Model = Annotated[str | None, Parameter(help="GGUF file or Hugging Face folder; none: the default model.")]
Lora = Annotated[tuple[str, ...], Parameter(name="--lora", negative="", show_default=False,
                 help="[NAME=]PATH[:SCALE]: an adapter to load and switch on; may be given several times. "
                      "A sample adapter's name is a PATH too.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], Parameter(help="Where the model runs.")]
Dtype = Annotated[Literal["auto", "fp32", "bf16", "fp16", "packed"], Parameter(
    help="Number format of the weights in memory. packed keeps them as small as in a GGUF file and multiplies them so; auto does that on "
         "a CPU where the file allows it. fp32 is exact.")]
Weights = Annotated[Literal["auto", "dense", "packed"], Parameter(
    help="Weights in memory: numbers of that format, or packed as in the file; auto packs them when dense ones leave too little memory.")]
Context = Annotated[str, Parameter(help="Tokens one chat may hold, for example 4096 or 4k; "
                                         "0 takes what the model was trained for, at most 8192.")]
Slots = Annotated[int, Parameter(validator=Within(1, MAX_SLOTS), help="Adapters that lie ready on the device at once.")]
HostCache = Annotated[str, Parameter(help="Memory for adapters that wait outside the slots, for example 512M or 2G.")]
Json = Annotated[bool, Parameter(negative="", help="Print one JSON document instead of text.")]
Words = Annotated[str | None, Parameter(allow_leading_hyphen=True)]
Question = Annotated[Words, Parameter(name=["--prompt", "-p"], help="What to ask; '-' or nothing reads standard input.")]
System = Annotated[Words, Parameter(name=["--system", "-s"], help="The system message.")]
Opening = Annotated[Words, Parameter(help="Text put after the messages instead of the reply's usual start: special tokens in it "
                                          "count, \\n is a newline. An aLoRA's invocation is asked for so.")]


@Parameter(name="*")
@dataclass(frozen=True)
class Drawing:
    """How a reply is drawn."""

    seed: Annotated[int, Parameter(validator=Within(0, 2**63 - 1), help="The same seed draws the same noise.")] = 0
    temperature: Annotated[float, Parameter(name=["--temperature", "--temp"], validator=Within(0, 10),
                                            help="0 is greedy: always the likeliest token; at most 10.")] = 0.0
    top_k: Annotated[int, Parameter(validator=Within(0, 1_000_000), help="Keep the k likeliest tokens; 0 keeps all.")] = 0
    top_p: Annotated[float, Parameter(validator=Within(0.01, 1), help="Keep the likeliest tokens up to this sum.")] = 1.0
    min_p: Annotated[float, Parameter(validator=Within(0, 1), help="Keep tokens this likely relative to the likeliest.")] = 0.0
    repetition_penalty: Annotated[float, Parameter(validator=Within(0.1, 10), help="Above 1: tokens seen before are less likely.")] = 1.0
    max_tokens: Annotated[int, Parameter(validator=Within(1, 1_000_000), help="The longest reply, in tokens.")] = 512
    stop: Annotated[tuple[str, ...], Parameter(negative="", allow_leading_hyphen=True, show_default=False,
                                               help="End the reply before this text (\\n is a newline); may be given several times.")] = ()

    def sampling(self) -> Sampling:
        """Raises UsageError for texts that are not watched for."""
        from ..engine.protocol import Sampling

        if len(self.stop) > MAX_STOPS or not all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in self.stop):
            raise UsageError(f"--stop: at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters are watched for")
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty, self.seed, self.max_tokens,
                        tuple(map(unescape, self.stop)))


DEFAULT_DRAWING = Drawing()


@Parameter(name="*")
@dataclass(frozen=True)
class Loading:
    """How a model lies in memory."""

    context: Context = "0"
    device: Device = "auto"
    dtype: Dtype = "auto"
    weights: Weights = "auto"

    def load(self, model: str | None, slots: int = 4, host_cache: str = "1G") -> LoadModel:
        """Raises UsageError for a model that is not there, for sizes that are none, and as `check_formats`."""
        from ..engine.protocol import LoadModel

        check_formats(self.dtype, self.weights)
        return LoadModel(find_model(model) if model else None, self.device, self.dtype, parse_size(self.context), slots,
                         parse_size(host_cache), self.weights)


DEFAULT_LOADING = Loading()


def question(words: str | None) -> str:
    """The text of -p, or standard input. Raises UsageError when there is none."""
    if words in (None, "-") and not (words is None and sys.stdin.isatty()):
        try:
            words = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not text in {error.encoding}: {error.reason} at byte {error.start}") from error
    if not (words or "").strip():
        raise UsageError('there is nothing to ask: give -p "...", or pipe the question into standard input')
    return words
