"""A comparison as Markdown for people and as JSON lines for programs, with all that it takes to repeat it."""
from __future__ import annotations

import json
import re
from collections.abc import Sequence

from ..engine.protocol import Chat, Prompt, RawText, plain_data
from .arguments import escape
from .comparison import Round, Setup, agreement, distance, first_divergence
from .comparison_text import NOTHING, numbers
from .mixboard import mix_text
from .prompt_text import prompt_line
from .text import clean, clean_line, counted


def jsonl_line(setup: Setup, round: Round) -> str:
    """One prompt with its replies, as one line that stands by itself. `lora-bench compare -f` takes such lines as prompts."""
    data = {
        "prompt": round.prompt, "model": setup.model, "sampling": setup.sampling,
        "adapters": [{"name": info.name, "digest": info.digest, "path": info.path} for info in setup.adapters],
        "columns": [_column(setup, round, i) for i in range(len(setup.columns))],
        "scored": round.scored, "score_failed": round.score_failed,
    }
    return json.dumps(plain_data(data), ensure_ascii=False) + "\n"


def _column(setup: Setup, round: Round, i: int) -> dict[str, object]:
    reply = round.replies[i]
    data = {"label": setup.columns[i].label, "mix": setup.columns[i].mix}
    data |= {name: getattr(reply, name) for name in ("text", "ids", "reason", "stats", "activations", "cache", "failed")}
    if i and not reply.failed and not round.replies[0].failed:
        parts = first_divergence(round.replies[0].ids, reply.ids)
        data["first_divergence"] = parts._asdict() if parts else None
        data["agreement"] = agreement(round.replies[0].ids, reply.ids)
    if i and round.scored is not None and (far := distance(round.scored, i)) is not None:
        data["on_first_text"] = far._asdict()
    return data


# -- Markdown ----------------------------------------------------------------------------------------
def markdown(setup: Setup, rounds: Sequence[Round], title: str = "Comparison", command: str = "", summary: Sequence[str] = ()) -> str:
    """The whole report. `command` repeats it on a command line; `summary` are lines over all rounds, kept as they stand."""
    model, sampling = setup.model, setup.sampling
    drawn = f"seed {sampling.seed}, temperature {sampling.temperature:g}" if sampling.temperature > 0 else "greedy"
    base = f"Base {_code(model.name)}, {model.dtype} on {model.device}; {drawn}; up to {sampling.max_tokens} tokens."
    lines = [f"# {title}", "", base, "", "| column | mix |", "|---|---|",
             *(f"| {column.label} | {_cell(mix_text(column.mix))} |" for column in setup.columns), ""]
    if setup.adapters:
        lines += ["| adapter | sha256 | path |", "|---|---|---|",
                  *(f"| {_cell(info.name)} | {_cell(info.digest)} | {_cell(info.path)} |" for info in setup.adapters), ""]
    lines += [f"Sampling: {_code(json.dumps(plain_data(sampling), ensure_ascii=False))}", ""]
    if command:
        lines += ["To repeat it:", "", *_fenced(command, "sh"), ""]
    if summary:
        lines += [*_fenced("\n".join(summary)), ""]
    for number, round in enumerate(rounds, 1):
        lines += [f"## {number}. {_plain(prompt_line(round.prompt))}", "", *_prompt(round.prompt), "", *_replies(setup, round)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _replies(setup: Setup, round: Round) -> list[str]:
    lines: list[str] = []
    for column, reply in zip(setup.columns, round.replies, strict=True):
        end = f" · {counted(len(reply.ids), 'token')}, {reply.reason}" if reply.reason else ""
        said = reply.failed or reply.text
        lines += [f"**{column.label}** · {_code(mix_text(column.mix))}{end}", "", *(_fenced(said) if said else [NOTHING]), ""]
        lines += [f"- {clean_line(activation.adapter, 60)} is off here: {_code(activation.detail)}"
                  for activation in reply.activations if not activation.found]
        lines += [""] if lines[-1] else []
    told = [*numbers(setup, round), *(round.scored.notes if round.scored else ()),
            *([f"not scored: {round.score_failed}"] if round.score_failed else [])]
    return [*lines, *(f"- {_plain(line)}" for line in told), ""]


def _prompt(prompt: Prompt) -> list[str]:
    if isinstance(prompt, Chat):
        lines = [line for message in prompt.messages
                 for line in (f"{_plain(clean_line(message.role, 40))}:", "", *_fenced(message.content), "")]
        return [*lines[:-1], *(["", f"opened with {_code(escape(prompt.opening))}"] if prompt.opening else [])]
    return _fenced(prompt.text if isinstance(prompt, RawText) else " ".join(map(str, prompt.ids)))


def _fenced(text: str, language: str = "") -> list[str]:
    """A block that nothing in the text can end."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [f"{fence}{language}", clean(text), fence]


def _code(text: str) -> str:
    text = clean_line(text, 2000)
    ticks = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    gap = " " if text[:1] == "`" or text[-1:] == "`" else ""
    return f"{ticks}{gap}{text}{gap}{ticks}"


def _cell(text: str) -> str:
    return _code(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Text in which Markdown finds no markup."""
    return re.sub(r"([\\`*_\[\]<>#|~])", r"\\\1", text)
