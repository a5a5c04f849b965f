"""The command line of what measures the engine: decode speed, and turns that share a long beginning."""
from __future__ import annotations

import os
import shutil
from typing import Annotated, Literal

from cyclopts import App, Parameter

from .arguments import AdapterArgument, UsageError, Within, find_adapter, find_model
from .options import Json

Measured = Annotated[str | None, Parameter(help="GGUF file or Hugging Face folder; none: the default model with the sample adapters.")]
Adapters = Annotated[tuple[str, ...], Parameter(
    name="--lora", negative="", show_default=False,
    help="An adapter's path or a sample's name; may be given several times. The scales are the measurement's own.")]
Rounds = Annotated[int, Parameter(validator=Within(1, 100), help="Measured rounds; the median counts.")]

bench = App(name="bench", result_action="return_value")


@bench.default
def speed(
    model: Measured = None,
    /,
    *,
    lora: Adapters = (),
    tokens: Annotated[int, Parameter(validator=Within(2, 4096), help="Tokens of a reply.")] = 48,
    rounds: Rounds = 3,
    against: Annotated[Literal["peft"] | None, Parameter(help="Also run transformers + PEFT on the same weights, in turns.")] = None,
    json: Json = False,
) -> int:
    """Measure decode speed on this machine's CPU, in fp32: base, one adapter, four chats with four mixes."""
    from .speed import report

    return report(find_model(model) if model else None, _paths(lora), tokens, rounds, against, as_json=json)


@bench.command
def turns(
    model: Measured = None,
    /,
    *,
    lora: Adapters = (),
    prefix: Annotated[int, Parameter(validator=Within(16, 100_000), help="Tokens that the turns of a conversation share.")] = 1000,
    rounds: Rounds = 5,
    server: Annotated[str | None, Parameter(help="The program llama-server, to hold the same conversations on the same GGUF base and "
                                                 "adapters beside the engine; it listens on this machine alone.")] = None,
    json: Json = False,
) -> int:
    """Measure the time to the first token of later turns, with KV reuse and without: base to aLoRA, base to LoRA, there and back."""
    from .turns import report

    program = shutil.which(os.path.expanduser(server)) if server is not None else None
    if server is not None and program is None:
        raise UsageError(f"--server {server}: there is no such program; give the path of a llama-server")
    return report(find_model(model) if model else None, _paths(lora), prefix, rounds, program, as_json=json)


def _paths(lora: tuple[str, ...]) -> list[str]:
    return [find_adapter(AdapterArgument(text, None, 1.0)).path for text in lora]
