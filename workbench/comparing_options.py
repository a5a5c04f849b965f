"""The command line of `compare` and `sweep`."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from .arguments import AdapterArgument, UsageError, adapters_of, unescape
from .options import DEFAULT_DRAWING, DEFAULT_LOADING, Drawing, Json, Loading, Model, Opening, Question, System, question
from .scales import parse_scales

if TYPE_CHECKING:
    from .comparing import Asked

BASE = "base"
_MIX = "[NAME=]PATH[:SCALE] as --lora elsewhere, several times for a mix; the word base for none."
File = Annotated[str | None, Parameter(name=["--file", "-f"], help="Prompts instead of one: a file of JSON lines, each a text or "
                                                                   "an object with prompt or messages.")]
Lines = Annotated[str | None, Parameter(name=["--output", "-o"], help="Write everything as JSON lines, one a prompt, into this file.")]
Report = Annotated[str | None, Parameter(name="--md", help="Write a report in Markdown into this file.")]


def _mix(name: str, text: str) -> object:
    return Annotated[tuple[str, ...], Parameter(name=name, negative="", show_default=False, help=text)]


@Parameter(name="*")
@dataclass(frozen=True)
class Asking:
    """What is asked, and where the answers go."""

    prompt: Question = None
    file: File = None
    system: System = None
    opening: Opening = None
    md: Report = None
    output: Lines = None
    json: Json = False

    def asked(self, model: str | None, drawing: Drawing, loading: Loading, adapters: int) -> Asked:
        """For a comparison of so many adapters. Raises UsageError for what cannot be read, asked or written."""
        from .comparing import Asked
        from .prompts_file import chat_of, read_prompts
        from .reports import Places

        if self.file is not None and self.prompt is not None:
            raise UsageError("both -p and -f are given: one question or a file of them")
        opened = unescape(self.opening or "")
        prompts = (read_prompts(self.file, self.system, opened) if self.file is not None
                   else (chat_of(question(self.prompt), self.system, opened),))
        places = Places(self.json, self.output, self.md)
        places.check(self.file)
        return Asked(loading.load(model, max(4, adapters)), prompts, self.file, drawing.sampling(), places)


DEFAULT_ASKING = Asking()
A, B = _mix("--a", f"The first mix, that the others are compared with: {_MIX}"), _mix("--b", "The second; none: the base.")
C, D = _mix("--c", "A third."), _mix("--d", "A fourth.")


def compare(
    model: Model = None,
    /,
    *,
    a: A = (),
    b: B = (),
    c: C = (),
    d: D = (),
    asking: Asking = DEFAULT_ASKING,
    drawing: Drawing = DEFAULT_DRAWING,
    loading: Loading = DEFAULT_LOADING,
) -> int:
    """Ask the same under two to four mixes, rows of one batch with the same noise: replies, where they part, KL on A's text, and which
    adapter moved the token where they are furthest apart."""
    if not a:
        raise UsageError("there is nothing to compare: give --a, for example --a pirate:0.75 --b base")
    given = {"A": a, "B": b or (BASE,), "C": c, "D": d}
    columns = {label: _column(label, texts) for label, texts in given.items() if texts}
    _check_names(argument for arguments in columns.values() for argument in arguments)
    from . import comparing

    distinct = {argument[:2] for arguments in columns.values() for argument in arguments}
    return comparing.compare(asking.asked(model, drawing, loading, len(distinct)), columns)


def sweep(
    model: Model = None,
    /,
    *,
    lora: Annotated[str, Parameter(name="--lora", help="The adapter to turn: [NAME=]PATH. A sample adapter's name is a PATH too.")],
    scales: Annotated[str, Parameter(allow_leading_hyphen=True, help="START:END:STEP, or a list with commas. "
                                                                     "0 is always among them: the rest are compared with it.")],
    beside: Annotated[tuple[str, ...], Parameter(name="--with", negative="", show_default=False,
                                                 help="[NAME=]PATH[:SCALE]: an adapter that stays as it is in every mix; "
                                                      "may be given several times.")] = (),
    asking: Asking = DEFAULT_ASKING,
    drawing: Drawing = DEFAULT_DRAWING,
    loading: Loading = DEFAULT_LOADING,
) -> int:
    """Ask the same under one adapter at many scales, rows of one batch with the same noise: replies, and KL against scale."""
    (turned,) = adapters_of((lora,))
    if turned.scale != 1:
        raise UsageError(f"--lora {lora}: its scales are those of --scales; write the path alone")
    try:
        wanted = parse_scales(scales)
    except ValueError as error:
        raise UsageError(f"--scales {error}") from error
    if not any(wanted):
        raise UsageError(f"--scales {scales}: holds no scale but 0, with which the rest are compared")
    others = adapters_of(beside, "--with")
    if any(other.path == turned.path or other.name == turned.name is not None for other in others):
        raise UsageError(f"--with: {turned.name or turned.path} is the adapter that is turned; it cannot stay as it is too")
    from . import comparing

    return comparing.sweep(asking.asked(model, drawing, loading, 1 + len(others)), turned, wanted, others)


def _column(label: str, texts: tuple[str, ...]) -> tuple[AdapterArgument, ...]:
    option = f"--{label.lower()}"
    if texts == (BASE,):
        return ()
    if BASE in texts:
        raise UsageError(f"{option}: base stands for no adapter at all, and others are given beside it; a file of that name is ./{BASE}")
    return adapters_of(texts, option)


def _check_names(arguments: Iterable[AdapterArgument]) -> None:
    """One name is one adapter in all columns."""
    paths: dict[str, str] = {}
    for argument in arguments:
        if argument.name and paths.setdefault(argument.name, argument.path) != argument.path:
            raise UsageError(f"{argument.name} is {paths[argument.name]} in one column and {argument.path} in another; "
                             "give one another name: NAME=PATH")
