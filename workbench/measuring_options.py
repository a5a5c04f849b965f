"""The command line of what measures the engine: decode speed, and turns that share a long beginning."""
from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from .arguments import MAX_SLOTS, AdapterArgument, UsageError, Within, find_adapter, find_model
from .options import Device, Dtype, Json

Measured = Annotated[str | None, Parameter(help="GGUF file or Hugging Face folder; none: the default model with the sample adapters.")]
Adapters = Annotated[tuple[str, ...], Parameter(
    name="--lora", negative="", show_default=False,
    help="An adapter's path or a sample's name; may be given several times. The scales are the measurement's own.")]
Rounds = Annotated[int, Parameter(validator=Within(1, 100), help="Measured rounds; the median counts.")]

Packed = Literal["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
CpuDtype = Literal["auto", "fp32", "bf16", "packed"]
MOST_PAGES = 64
"""of one linear in a step"""
PEERS = "vllm-", "sglang-"
"""how the wheels of other engines are named"""

bench = App(name="bench", result_action="return_value")


@bench.default
def speed(
    model: Measured = None,
    /,
    *,
    lora: Adapters = (),
    rank: Annotated[int, Parameter(validator=Within(0, 1024), help="Instead of --lora: four random adapters of this rank on all linears; "
                                                                   "0 for none.")] = 0,
    dtype: Annotated[CpuDtype | None, Parameter(help="Number format of the weights in memory. None: auto, with --against peft fp32, which "
                                                     "PEFT has.")] = None,
    tokens: Annotated[int, Parameter(validator=Within(2, 4096), help="Tokens of a reply; none ends before.")] = 48,
    prompt: Annotated[int, Parameter(validator=Within(0, 100_000), help="Tokens of the prompt that is read; 0 for none.")] = 940,
    rounds: Rounds = 3,
    server: Annotated[str | None, Parameter(help="Also run this llama-server on the same GGUF file and adapters, with as many threads, in "
                                                 "turns; it listens on this machine alone.")] = None,
    against: Annotated[Literal["peft"] | None, Parameter(help="Also run transformers + PEFT on the same weights, in turns.")] = None,
    json: Json = False,
) -> int:
    """Measure speed on this machine's CPU: one chat on the base and with an adapter, four on the base and with four mixes, a prompt."""
    from .speed import report

    if lora and rank:
        raise UsageError("--lora and --rank were given; measure with the one or the other")
    if server is not None and against is not None:
        raise UsageError("--server and --against were given; compare with one of them at a time")
    return report({"model": find_model(model) if model else None, "adapters": _paths(lora), "rank": rank, "dtype": dtype,
                   "tokens": tokens, "prompt_tokens": prompt, "rounds": rounds, "server": _program(server), "against": against}, json)


@bench.command
def turns(
    model: Measured = None,
    /,
    *,
    lora: Adapters = (),
    prefix: Annotated[int, Parameter(validator=Within(16, 100_000), help="Tokens that the turns of a conversation share.")] = 1000,
    dtype: Annotated[CpuDtype, Parameter(help="Number format of the weights in memory.")] = "auto",
    rounds: Rounds = 5,
    server: Annotated[str | None, Parameter(help="The program llama-server, to hold the same conversations on the same GGUF base and "
                                                 "adapters beside the engine; it listens on this machine alone.")] = None,
    json: Json = False,
) -> int:
    """Measure the time to the first token of later turns, with KV reuse and without: base to aLoRA and back, base to LoRA, there and
    back."""
    from .turns import report

    return report({"model": find_model(model) if model else None, "adapters": _paths(lora), "prefix_tokens": prefix, "dtype": dtype,
                   "rounds": rounds, "server": _program(server)}, json)


@bench.command
def step(
    model: Annotated[str | None, Parameter(help="GGUF file or Hugging Face folder; none: random weights of --shape.")] = None,
    /,
    *,
    shape: Annotated[str | None, Parameter(help="Random weights instead of a file: 8b, 1b, 135m, or sizes as layers=4,hidden=256,... "
                                                "(8b,layers=2 differs from 8b in these). None: 8b on a GPU, 135m on a CPU.")] = None,
    packed: Annotated[Packed | None, Parameter(help="Pack the random weights as GGUF files of this type have them.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    adapters: Annotated[int, Parameter(validator=Within(0, MAX_SLOTS), help="Random adapters on all linears.")] = 8,
    ranks: Annotated[str, Parameter(help="Their ranks, in turn: 16, or 8,16,32,64.")] = "16",
    batch: Annotated[str, Parameter(help="Rows of decode steps, each of them measured.")] = "1,8,32",
    context: Annotated[int, Parameter(validator=Within(4, 1_000_000), help="Tokens of every row.")] = 256,
    prefill: Annotated[str | None, Parameter(help="Tokens of prompts, each of them measured; 0 for none. None: 512, on a GPU 2048 "
                                                  "too.")] = None,
    steps: Annotated[int, Parameter(validator=Within(3, 10_000), help="Decode steps measured of each kind; the median counts.")] = 30,
    json: Json = False,
) -> int:
    """Measure decode and prefill steps with adapters and without, beside the bytes that they must read and plain torch."""
    from .step_speed import report

    if model is not None and shape is not None:
        raise UsageError("a model and --shape were given; measure the one or the other")
    counts = {"ranks": _numbers("--ranks", ranks, 1, 1024), "batch": _numbers("--batch", batch, 1, 256),
              "prefill": None if prefill is None else [] if prefill.strip() == "0" else _numbers("--prefill", prefill, 2, 1_000_000)}
    if counts["prefill"] and adapters > min(counts["prefill"]) // 2:
        raise UsageError(f"--prefill {min(counts['prefill'])}: parted among {adapters} adapters that leaves less than 2 tokens each; "
                         "give longer prompts or fewer adapters")
    if model is not None and packed is not None:
        raise UsageError("a model and --packed were given; the types of a model stand in its file")
    return report({"model": find_model(model) if model else None, "shape": shape, "packed": packed or "", "device": device, "dtype": dtype,
                   "adapters": adapters, "context": context, "steps": steps, **counts}, json)


@bench.command
def kernels(
    *,
    shape: Annotated[str | None, Parameter(help="Sizes of a base, as those of `bench step`.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    rows: Annotated[int, Parameter(validator=Within(1, 64), help="Rows of a decode step.")] = 8,
    context: Annotated[int, Parameter(validator=Within(1, 100_000), help="Tokens of every row.")] = 256,
    tokens: Annotated[int, Parameter(validator=Within(2, 100_000), help="Tokens of a prompt.")] = 2048,
    ranks: Annotated[str, Parameter(help="Ranks of the adapters that act; the rows are parted among them.")] = "16,16,16,16,16,16,16,16",
    peer_wheel: Annotated[tuple[Path, ...], Parameter(
        negative="", show_default=False,
        help="A wheel of vllm or sglang: their LoRA ops are measured beside ours, without installing it; may be given several times. "
             "Those that are installed are measured without it.")] = (),
    json: Json = False,
) -> int:
    """Measure each op of a step by itself, beside the bytes that it must read and what torch has for it."""
    from .kernel_speed import report

    numbers = _numbers("--ranks", ranks, 1, 256)
    if len(numbers) > rows or sum(-(-rank // 16) for rank in numbers) > MOST_PAGES:
        raise UsageError(f"--ranks {ranks}: at most one adapter for each of {rows} rows, and {MOST_PAGES} pages of 16 rank rows")
    if len(numbers) > tokens:
        raise UsageError(f"--tokens {tokens}: fewer than the {len(numbers)} adapters that act on them; give more")
    for wheel in peer_wheel:
        if not wheel.is_file() or wheel.suffix != ".whl" or not wheel.name.startswith(PEERS):
            raise UsageError(f"--peer-wheel {wheel}: give the file of a wheel of vllm or sglang, named as it was downloaded")
        if sum(other.name.partition("-")[0] == wheel.name.partition("-")[0] for other in peer_wheel) > 1:
            raise UsageError(f"--peer-wheel {wheel}: give one wheel of a package; several cannot be imported at once")
    return report({"shape": shape, "device": device, "dtype": dtype, "rows": rows, "context": context, "tokens": tokens,
                   "ranks": numbers, "peer_wheels": [str(wheel) for wheel in peer_wheel]}, json)


@bench.command
def switch(
    model: Annotated[str | None, Parameter(help="GGUF file or Hugging Face folder; none: the default model.")] = None,
    /,
    *,
    shape: Annotated[str | None, Parameter(help="Random weights, written to a temporary file, instead: those of `bench step`.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    rank: Annotated[int, Parameter(validator=Within(1, 1024), help="Of the random adapters, on all linears.")] = 16,
    times: Annotated[int, Parameter(validator=Within(1, 1000), help="How often each change is measured; the median counts.")] = 7,
    json: Json = False,
) -> int:
    """Measure the time to the first token under another adapter: in its slot, in the host tier, on disk; and after a change of the mix."""
    from .switch_speed import report

    if model is not None and shape is not None:
        raise UsageError("a model and --shape were given; measure the one or the other")
    return report({"model": find_model(model) if model else None, "shape": shape, "device": device, "dtype": dtype, "rank": rank,
                   "times": times}, json)


def _numbers(option: str, text: str, least: int, most: int) -> list[int]:
    """Numbers parted by commas. Raises UsageError."""
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(least <= number <= most for number in numbers):
        raise UsageError(f"{option} {text}: give whole numbers from {least:,} to {most:,}, parted by commas")
    return numbers


def _paths(lora: tuple[str, ...]) -> list[str]:
    return [find_adapter(AdapterArgument(text, None, 1.0)).path for text in lora]


def _program(server: str | None) -> str | None:
    """The path of a llama-server. Raises UsageError."""
    found = shutil.which(os.path.expanduser(server)) if server is not None else None
    if server is not None and found is None:
        raise UsageError(f"--server {server}: there is no such program; give the path of a llama-server")
    return found
