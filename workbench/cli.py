"""The command line. Light on purpose: `--help` imports neither torch nor the screen."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from . import exit_codes, output
from .arguments import (
    MAX_SLOTS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    AdapterArgument,
    UsageError,
    Within,
    find_adapter,
    find_any,
    find_model,
    parse_adapter,
    parse_size,
    unescape,
)
from .terminal import why_no_screen


def _version() -> str:
    from importlib.metadata import version  # slow to import, and seldom asked for

    return version("lora-bench")


app = App(
    name="lora-bench",
    help="See and steer many LoRA adapters on one base model, in a terminal.",
    help_epilogue=exit_codes.HELP,
    version=_version,
    suppress_keyboard_interrupt=False,
    result_action="return_value",
)

Lora = Annotated[tuple[str, ...], Parameter(name="--lora", negative="", show_default=False,
                 help="[NAME=]PATH[:SCALE]: an adapter to load and switch on; may be given several times. "
                      "A sample adapter's name is a PATH too.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], Parameter(help="Where the model runs.")]
Dtype = Annotated[Literal["auto", "fp32", "bf16", "fp16"], Parameter(help="Number format of the weights in memory.")]
Weights = Annotated[Literal["auto", "dense", "packed"], Parameter(
    help="Weights in memory: numbers of that format, or packed as in the file; auto packs them when dense ones leave too little memory.")]
Context = Annotated[str, Parameter(help="Tokens one chat may hold, for example 4096 or 4k; "
                                         "0 takes what the model was trained for, at most 8192.")]
Slots = Annotated[int, Parameter(validator=Within(1, MAX_SLOTS), help="Adapters that lie ready on the device at once.")]
HostCache = Annotated[str, Parameter(help="Memory for adapters that wait outside the slots, for example 512M or 2G.")]
Json = Annotated[bool, Parameter(negative="", help="Print one JSON document instead of text.")]
Words = Annotated[str | None, Parameter(allow_leading_hyphen=True)]


@app.default
def bench_screen(
    model: Annotated[str | None, Parameter(help="GGUF file or Hugging Face folder; "
                                           "none: the default model with the sample adapters.")] = None,
    /,
    *,
    lora: Lora = (),
    slots: Slots = 4,
    host_cache: HostCache = "1G",
    context: Context = "0",
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
) -> int:
    """Open the workbench."""
    if why_not := why_no_screen():
        raise UsageError(f"the workbench fills a terminal, and {why_not}; "
                         'for one reply without it: lora-bench chat [MODEL] -p "..."')
    from ..engine.protocol import LoadModel
    from .launch import open_workbench
    from .startup import start_adapters

    load = LoadModel(find_model(model) if model else None, device, dtype, parse_size(context), slots, parse_size(host_cache), weights)
    return open_workbench(load, start_adapters(_adapters(lora), samples=model is None))


@app.command
def chat(
    model: Annotated[str | None, Parameter(help="GGUF file or Hugging Face folder; none: the default model.")] = None,
    /,
    *,
    lora: Lora = (),
    prompt: Annotated[Words, Parameter(name=["--prompt", "-p"], help="What to ask; '-' or nothing reads standard input.")] = None,
    system: Annotated[Words, Parameter(name=["--system", "-s"], help="The system message.")] = None,
    opening: Annotated[Words, Parameter(help="Text put after the messages instead of the reply's usual start: special tokens in it "
                                        "count, \\n is a newline. An aLoRA's invocation is asked for so.")] = None,
    seed: Annotated[int, Parameter(validator=Within(0, 2**63 - 1), help="The same seed draws the same noise.")] = 0,
    temperature: Annotated[float, Parameter(name=["--temperature", "--temp"], validator=Within(0, 10),
                                            help="0 is greedy: always the likeliest token; at most 10.")] = 0.0,
    top_k: Annotated[int, Parameter(validator=Within(0, 1_000_000), help="Keep the k likeliest tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, Parameter(validator=Within(0.01, 1), help="Keep the likeliest tokens up to this sum.")] = 1.0,
    min_p: Annotated[float, Parameter(validator=Within(0, 1), help="Keep tokens this likely relative to the likeliest.")] = 0.0,
    repetition_penalty: Annotated[float, Parameter(validator=Within(0.1, 10), help="Above 1: tokens seen before are less likely.")] = 1.0,
    max_tokens: Annotated[int, Parameter(validator=Within(1, 1_000_000), help="The longest reply, in tokens.")] = 512,
    stop: Annotated[tuple[str, ...], Parameter(negative="", allow_leading_hyphen=True, show_default=False,
                                               help="End the reply before this text (\\n is a newline); may be given several times.")] = (),
    json: Json = False,
    stats: Annotated[bool, Parameter(negative="", help="Say tokens, speed, seed, mix and aLoRA activations on standard error.")] = False,
    context: Context = "0",
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
) -> int:
    """Print one reply: the reply alone on standard output, all else on standard error."""
    adapters = _adapters(lora)
    text = _prompt(prompt)
    from ..engine import protocol as p
    from .one_shot import Question, ask

    load = p.LoadModel(find_model(model) if model else None, device, dtype, parse_size(context), max(4, len(adapters)), weights=weights)
    roles = [("system", system)] if system else []
    messages = tuple(p.Message(role, words) for role, words in [*roles, ("user", text)])
    sampling = p.Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed, max_tokens, _stops(stop))
    return ask(Question(load, adapters, p.Chat(messages, unescape(opening or "")), sampling, stats, json))


@app.command
def check(
    model: Annotated[str, Parameter(help="GGUF file or Hugging Face folder; the word default is the default model.")],
    adapters: Annotated[tuple[str, ...], Parameter(negative="", help="Adapters: files, folders or samples' names.")],
    /,
    *,
    effect: Annotated[
        bool, Parameter(help="Run a few built-in prompts and compare the base's tokens with and without the adapter.")] = True,
    json: Json = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    weights: Weights = "auto",
) -> int:
    """Say whether adapters can be used on a model, what they are, and what they do to it; ends with 3 when one cannot or does nothing."""
    from .check import report

    paths = [find_adapter(AdapterArgument(text, None, 1.0), "").path for text in adapters]
    by_default = model == "default" and not Path(model).exists()
    return report(None if by_default else find_model(model, "or the word default for the default model"), paths, effect, device, dtype,
                  weights, as_json=json)


@app.command
def inspect(
    path: Annotated[str, Parameter(help="A base model or an adapter: file, folder, or a sample adapter's name.")],
    /,
    *,
    json: Json = False,
) -> int:
    """Say what a model or an adapter is, from its header alone."""
    from .engine_tools import show

    return show("inspect", find_any(path), as_json=json)


@app.command
def plan(
    model: Annotated[str | None, Parameter(help="GGUF file or Hugging Face folder; none: the default model.")] = None,
    /,
    *,
    json: Json = False,
) -> int:
    """Say what a model would take of memory, dense and packed, before anything of it is loaded."""
    from .engine_tools import show
    from .load_choices import plan_lines

    return show("plan", *([find_model(model)] if model else []), as_json=json, lines_of=plan_lines)


@app.command
def doctor(*, json: Json = False) -> int:
    """Say what this machine can do, and why not more."""
    from . import paths
    from .engine_tools import show
    from .terminal import terminal_facts

    own = {"terminal": terminal_facts(), "files": {"settings": str(paths.settings_file()), "log": str(paths.log_file())}}
    return show("doctor", as_json=json, more=own)


@app.command
def bench(
    model: Annotated[str | None, Parameter(help="GGUF file or Hugging Face folder; "
                                           "none: the default model with the sample adapters.")] = None,
    /,
    *,
    lora: Annotated[tuple[str, ...], Parameter(name="--lora", negative="", show_default=False,
                    help="An adapter's path or a sample's name; may be given several times. The scales are the measurement's own.")] = (),
    tokens: Annotated[int, Parameter(validator=Within(2, 4096), help="Tokens of a reply.")] = 48,
    rounds: Annotated[int, Parameter(validator=Within(1, 100), help="Measured rounds; the median counts.")] = 3,
    against: Annotated[Literal["peft"] | None, Parameter(help="Also run transformers + PEFT on the same weights, in turns.")] = None,
    json: Json = False,
) -> int:
    """Measure decode speed on this machine's CPU, in fp32: base, one adapter, four chats with four mixes."""
    from .speed import report

    paths = [find_adapter(AdapterArgument(text, None, 1.0)).path for text in lora]
    return report(find_model(model) if model else None, paths, tokens, rounds, against, as_json=json)


@app.command
def measure(*, json: Json = False) -> int:
    """Measure the screen with the default model: first paint, first reply, the lag of a key while the engine decodes."""
    from .measure import report

    return report(as_json=json)


def _adapters(texts: tuple[str, ...]) -> tuple[AdapterArgument, ...]:
    adapters = tuple(find_adapter(parse_adapter(text)) for text in texts)
    names = [adapter.name for adapter in adapters if adapter.name]
    if doubled := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"--lora: two adapters are called {doubled}; give one another name: NAME=PATH")
    return adapters


def _stops(texts: tuple[str, ...]) -> tuple[str, ...]:
    if len(texts) > MAX_STOPS or not all(1 <= len(text) <= MAX_STOP_CHARACTERS for text in texts):
        raise UsageError(f"--stop: at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters are watched for")
    return tuple(map(unescape, texts))


def _prompt(words: str | None) -> str:
    if words in (None, "-") and not (words is None and sys.stdin.isatty()):
        try:
            words = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise UsageError(f"standard input is not text in {error.encoding}: {error.reason} at byte {error.start}") from error
    if not (words or "").strip():
        raise UsageError('there is nothing to ask: give -p "...", or pipe the question into standard input')
    return words


def main(tokens: list[str] | None = None) -> int:
    """Run the command line; returns the exit code (the console script hands it to sys.exit)."""
    output.accept_any_text()
    tokens = sys.argv[1:] if tokens is None else tokens
    try:
        return _run(tokens)
    except exit_codes.Failed as failed:
        output.fail(failed, as_json="--json" in tokens)
        return failed.code
    except BrokenPipeError:
        output.leave_broken_pipe()
        return exit_codes.OK


def _run(tokens: list[str]) -> int:
    """The exit code of what was asked for; every way to fail but a reader that went away is raised as Failed."""
    try:
        return app(tokens, exit_on_error=False, print_error=False) or exit_codes.OK
    except CycloptsError as error:
        way = " ".join(("lora-bench", *(error.command_chain or ()), "--help"))
        raise exit_codes.Failed(f"{error} See {way}", exit_codes.USAGE) from error
    except UsageError as error:
        raise exit_codes.Failed(str(error), exit_codes.USAGE) from error
    except KeyboardInterrupt as error:
        raise exit_codes.Failed("interrupted", exit_codes.INTERRUPTED) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise exit_codes.Failed(str(error), exit_codes.ENGINE_ERROR) from error


if __name__ == "__main__":
    sys.exit(main())
