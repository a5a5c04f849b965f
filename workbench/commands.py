"""Slash commands of the prompt. Each returns the line that answers it."""
from __future__ import annotations

from collections.abc import Callable

from .control import Control
from .live_change import CHANGES, change_text
from .mixboard import mix_text

Run = Callable[[Control, str], str]
MAX_STOPS = 16


def run_command(control: Control, line: str) -> str:
    """Carry out `/name rest`; raises ValueError with a sentence when it cannot be."""
    name, _, rest = line[1:].partition(" ")
    command = COMMANDS.get(name)
    if command is None and ("/" in name or not name):
        raise ValueError(f"{line} looks like a path: /load {line} adds the adapter there, Ctrl+O opens a model")
    if command is None:
        raise ValueError(f"/{name} is no command; there are {', '.join('/' + known for known in COMMANDS)}")
    return command[1](control, rest.strip())


def _system(control: Control, text: str) -> str:
    control.system = text
    return f"system message: {text}" if text else "no system message (a model's template may have its own)"


def _set(control: Control, rest: str) -> str:
    name, _, value = rest.partition(" ")
    if not name:
        return settings_text(control)
    if name not in _SETTINGS:
        raise ValueError(f"{name} is no setting; there are {', '.join(_SETTINGS)}")
    if name == "stop":
        return _set_stop(control, value)
    kind, low, high = _SETTINGS[name]
    try:
        number = kind(value)
    except ValueError:
        raise ValueError(f"{name} takes {'a whole number' if kind is int else 'a number'}, not {value or 'nothing'}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} lies between {low:,} and {high:,}")
    control.set_sampling(**{name: number})
    return f"{name} = {number:g}{_greedy_hint(control, name)}"


def _set_stop(control: Control, value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        value = value[1:-1]
    text = value.replace("\\n", "\n").replace("\\t", "\t")
    stops = (*control.sampling.stop, text) if text else ()
    if len(stops) > MAX_STOPS:
        raise ValueError(f"at most {MAX_STOPS} stop strings; /set stop alone removes all")
    control.set_sampling(stop=stops)
    return f"stop strings: {', '.join(map(repr, stops))}" if stops else "no stop strings"


def _greedy_hint(control: Control, name: str) -> str:
    drawn = name in ("seed", "top_k", "top_p", "min_p") and control.sampling.temperature == 0
    return " (has no effect while decoding is greedy: /set temperature 0.7)" if drawn else ""


def _seed(control: Control, value: str) -> str:
    return _set(control, f"seed {value}")


def _load(control: Control, text: str) -> str:
    if problem := control.add_paths(text):
        raise ValueError(problem)
    return f"to be loaded: {text}"


def _reload(control: Control, name: str) -> str:
    changed = [view.info.name for view in control.state.snapshot.adapters if view.file == "changed"]
    names = [name] if name else changed
    if not names:
        raise ValueError("/reload takes the name of an adapter; alone it reads those again whose files changed, and none did")
    if name and name not in control.state.board:
        raise ValueError(f"{name} is no adapter of the list; there are {', '.join(control.state.board.names) or 'none'}")
    for wanted in names:
        control.reload(wanted)
    return f"to be read again: {', '.join(names)}"


def _change(control: Control, way: str) -> str:
    if way and way not in CHANGES:
        raise ValueError(f"{way} is no way to take a change of the mix; there are {', '.join(CHANGES)}")
    if way:
        control.set_change(next(known for known in CHANGES if known == way))
    return change_text(control.state.change)


def _clear(control: Control, _: str) -> str:
    control.new_chat()
    return "the chat is empty; adapters and mix stay"


def _chats(control: Control, _: str) -> str:
    return control.chats.list()


def _resume(control: Control, which: str) -> str:
    return control.chats.resume(which)


def _help(control: Control, _: str) -> str:
    lines = [f"/{name} {use}" for name, (use, _) in COMMANDS.items()]
    return "\n".join([*lines, "", settings_text(control), "", "F1 lists the keys of the focused pane; Ctrl+P finds every action."])


def settings_text(control: Control) -> str:
    """Sampling, system message and mix as they are."""
    sampling = control.sampling
    values = " · ".join(f"{name} {getattr(sampling, name):g}" for name in _SETTINGS if name != "stop")
    stops = f" · stop {', '.join(map(repr, sampling.stop)) or 'none'}"
    mode = " (greedy)" if sampling.temperature == 0 else ""
    return f"{values}{stops}{mode}\n{_NO_CHANGE}\nsystem: {control.system or 'none'}\nmix: {mix_text(control.state.mix())}"


_NO_CHANGE = "top_k 0, top_p 1, min_p 0 and repetition_penalty 1 change nothing"
_SETTINGS = {
    "temperature": (float, 0.0, 100.0),
    "top_k": (int, 0, 1_000_000),
    "top_p": (float, 0.01, 1.0),
    "min_p": (float, 0.0, 1.0),
    "repetition_penalty": (float, 0.01, 100.0),
    "seed": (int, 0, 2**31 - 1),
    "max_tokens": (int, 1, 1_000_000),
    "stop": (str, 0, 0),
}
COMMANDS: dict[str, tuple[str, Run]] = {
    "system": ("TEXT — the system message of the next turns; alone: none", _system),
    "set": ("NAME VALUE — temperature top_k top_p min_p repetition_penalty seed max_tokens stop; alone: show all", _set),
    "seed": ("NUMBER — the seed of the next reply", _seed),
    "load": ("PATH — add adapters: a folder, a file, or a sample's name", _load),
    "reload": ("NAME — read the adapter's file again; alone: all whose files changed", _reload),
    "change": ("splice|recompute|finish — what a change of the mix does to a reply that is being written; alone: say it", _change),
    "clear-cache": ("— forget the KV blocks that no running reply holds", lambda control, _: control.clear_cache()),
    "clear": ("— empty the chat", _clear),
    "new": ("— as /clear", _clear),
    "chats": ("— the chats of earlier runs", _chats),
    "resume": ("NUMBER — go on with an earlier chat, as /chats numbers them; alone: the latest", _resume),
    "help": ("— this list and the settings", _help),
}
