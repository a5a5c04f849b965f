"""`lora-bench compare` and `lora-bench sweep`: prompts through several mixes, on the same engine as the workbench, without the screen."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..engine import protocol as p
from .arguments import AdapterArgument
from .comparison import Column, Round, Setup, mixes_to_score, sweep_columns
from .comparison_command import compare_command, sweep_command
from .comparison_text import round_text, suite_lines
from .engine_run import EngineRun, engine_run
from .reports import Places, Reports
from .rounds import ask_round, score_round
from .sweep_text import sweep_lines, sweep_text


@dataclass(frozen=True)
class Asked:
    load: p.LoadModel
    prompts: tuple[p.Prompt, ...]
    source: str | None
    """the file that the prompts are from"""
    sampling: p.Sampling
    places: Places


def compare(asked: Asked, columns: Mapping[str, Sequence[AdapterArgument]]) -> int:
    """Every prompt to all columns (label -> its adapters); returns the exit code. Raises Failed when the engine cannot be had."""
    with engine_run() as engine:
        model = engine.load_model(asked.load)
        adapters = _load(engine, (argument for arguments in columns.values() for argument in arguments))
        made = tuple(Column(label, _mix(arguments, adapters)) for label, arguments in columns.items())
        setup = Setup(model, _distinct(adapters), made, asked.sampling)
        reports = Reports(
            setup, asked.places, "Comparison", compare_command(setup, asked.prompts, asked.source),
            lambda round, number: round_text(setup, round, number, len(asked.prompts)), lambda rounds: suite_lines(setup, rounds))
        return _run(engine, asked, reports, mixes_to_score(made))


def sweep(asked: Asked, turned: AdapterArgument, scales: Sequence[float], beside: Sequence[AdapterArgument]) -> int:
    """Every prompt to one adapter at all scales, those `beside` as they are; returns the exit code. Raises Failed as `compare`."""
    with engine_run() as engine:
        model = engine.load_model(asked.load)
        adapters = _load(engine, (turned, *beside))
        name = adapters[turned.path, turned.name].name
        columns = sweep_columns(name, scales, _mix(beside, adapters))
        setup = Setup(model, _distinct(adapters), columns, asked.sampling)
        reports = Reports(
            setup, asked.places, f"Sweep of {name}", sweep_command(setup, asked.prompts, asked.source),
            lambda round, number: sweep_text(setup, round, number, len(asked.prompts)), lambda rounds: sweep_lines(setup, rounds))
        return _run(engine, asked, reports, tuple(column.mix for column in columns))


def _run(engine: EngineRun, asked: Asked, reports: Reports, mixes: Sequence[p.Mix]) -> int:
    for number, prompt in enumerate(asked.prompts):
        what = f"prompt {number + 1} of {len(asked.prompts)}" if len(asked.prompts) > 1 else "asking"
        round = ask_round(engine, reports.setup, prompt, number, what)
        try:
            round = score_round(engine, round, mixes, number, what)
        except KeyboardInterrupt:
            _report(engine, reports, replace(round, score_failed="interrupted"))
            raise
        _report(engine, reports, round)
    engine.progress.clear()
    return reports.close()


def _report(engine: EngineRun, reports: Reports, round: Round) -> None:
    engine.warn(*_problems(reports.setup, round))
    reports.add(round)


def _problems(setup: Setup, round: Round) -> list[str]:
    failed = [f"{column.label}: {reply.failed}" for column, reply in zip(setup.columns, round.replies, strict=True) if reply.failed]
    return [*failed, *([f"not scored: {round.score_failed}"] if round.score_failed else []), *(round.scored.notes if round.scored else ())]


Loaded = dict[tuple[str, str | None], p.AdapterInfo]


def _load(engine: EngineRun, arguments: Iterable[AdapterArgument]) -> Loaded:
    """Each adapter once, by path and name."""
    found: Loaded = {}
    for argument in arguments:
        if argument[:2] not in found:
            found[argument[:2]] = engine.load_adapter(argument)
    return found


def _mix(arguments: Iterable[AdapterArgument], adapters: Loaded) -> p.Mix:
    return tuple(p.AdapterUse(adapters[argument[:2]].name, argument.scale) for argument in arguments)


def _distinct(adapters: Loaded) -> tuple[p.AdapterInfo, ...]:
    return tuple({info.name: info for info in adapters.values()}.values())
