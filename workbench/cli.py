"""The command line. Light on purpose: `--help` imports neither torch nor the screen."""
from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, CycloptsError, Parameter

from . import exit_codes, output
from .arguments import (
    AdapterArgument,
    UsageError,
    adapters_of,
    check_formats,
    find_adapter,
    find_any,
    find_model,
    unescape,
)
from .comparing_options import compare, sweep
from .measuring_options import bench
from .options import (
    DEFAULT_DRAWING,
    DEFAULT_LOADING,
    Device,
    Drawing,
    Dtype,
    HostCache,
    Json,
    Loading,
    Lora,
    Model,
    Opening,
    Question,
    Slots,
    System,
    Weights,
    question,
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


@app.default
def bench_screen(
    model: Annotated[str | None, Parameter(help="GGUF file or Hugging Face folder; "
                                           "none: the default model with the sample adapters.")] = None,
    /,
    *,
    lora: Lora = (),
    slots: Slots = 4,
    host_cache: HostCache = "1G",
    loading: Loading = DEFAULT_LOADING,
    resume: Annotated[bool, Parameter(negative="", help="Go on with the latest chat: its base, unless MODEL is given, its adapters "
                                                        "and their scales.")] = False,
) -> int:
    """Open the workbench."""
    if why_not := why_no_screen():
        raise UsageError(f"the workbench fills a terminal, and {why_not}; "
                         'for one reply without it: lora-bench chat [MODEL] -p "..."')
    from .launch import open_workbench
    from .startup import latest_chat, start_adapters

    chat = latest_chat() if resume else None
    load = loading.load(model or (chat and chat.path), slots, host_cache)
    adapters = start_adapters(adapters_of(lora), samples=load.path is None, past=chat.adapters if chat else ())
    return open_workbench(load, adapters, chat.file if chat else None)


@app.command
def chat(
    model: Model = None,
    /,
    *,
    lora: Lora = (),
    prompt: Question = None,
    system: System = None,
    opening: Opening = None,
    drawing: Drawing = DEFAULT_DRAWING,
    json: Json = False,
    stats: Annotated[bool, Parameter(negative="", help="Say tokens, speed, seed, mix and aLoRA activations on standard error.")] = False,
    loading: Loading = DEFAULT_LOADING,
) -> int:
    """Print one reply: the reply alone on standard output, all else on standard error."""
    adapters = adapters_of(lora)
    text = question(prompt)
    from . import one_shot
    from .prompts_file import chat_of

    load = loading.load(model, max(4, len(adapters)))
    asked = chat_of(text, system, unescape(opening or ""))
    return one_shot.ask(one_shot.Question(load, adapters, asked, drawing.sampling(), stats, json))


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

    check_formats(dtype, weights)
    paths = [find_adapter(AdapterArgument(text, None, 1.0), "").path for text in adapters]
    by_default = model == "default" and not Path(model).exists()
    return report(None if by_default else find_model(model, "or the word default for the default model"), paths, effect, device, dtype,
                  weights, as_json=json)


@app.command
def chats(*, json: Json = False) -> int:
    """List the chats of earlier runs, the latest first."""
    from .chats import report

    return report(as_json=json)


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

    files = {"settings": paths.settings_file(), "chats": paths.chats_folder(), "log": paths.log_file()}
    own = {"terminal": terminal_facts(), "files": {name: str(path) for name, path in files.items()}}
    return show("doctor", as_json=json, more=own)


@app.command
def measure(*, json: Json = False) -> int:
    """Measure the screen with the default model: first paint, first reply, the lag of a key while the engine decodes."""
    from .measure import report

    return report(as_json=json)


app.command(bench)
app.command(compare)
app.command(sweep)


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
