"""Decode speed of the engine on this machine, and where a step's time goes.

`python -m lora_bench.engine.bench '{"model": PATH, "adapters": [PATH, ...], ...}'`, with the arguments of `run_bench`, prints JSON lines:
{"progress": text} now and then, the result last. Against PEFT, transformers + PEFT run on the same weights in this process, in turns.
"""
from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .default_model import DefaultModelError
from .program import CANNOT_BE_USED, FAILED, WRONG_USAGE, answer, set_spins
from .protocol import AdapterUse, Chat, Generate, LoadModel, Message, Mix, RequestFailed, Sampling, StepFinished

if TYPE_CHECKING:
    from .engine import Engine

PROMPT = Chat((Message("user", "Tell me a long story about the sea."),))
CHATS = 4
PEFT_PACKAGES = ("transformers", "peft")
Run = Callable[[], tuple[float, dict[str, float]]]


class NotMeasured(ValueError):
    """Model and adapters are good, and yet nothing could be measured."""


class MissingPackages(ImportError):
    """What the comparison needs is not installed."""


def run_bench(
    model: str | None, adapters: Sequence[str] = (), tokens: int = 48, rounds: int = 3, against: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Median decode speeds [tokens/s] of one chat without and with an adapter and of four chats with four mixes, and the step split [ms].

    Needs at least one adapter for the second and third; without `model` the sample adapters are taken. Raises ValueError, OSError,
    NotMeasured, MissingPackages (no transformers or peft for `against`).
    """
    if against and (missing := [name for name in PEFT_PACKAGES if importlib.util.find_spec(name) is None]):
        raise MissingPackages(f"--against peft needs {' and '.join(missing)}, not installed here: "
                              f"{sys.executable} -m pip install {' '.join(missing)}")
    from .engine import Engine
    from .machine import use_cores
    use_cores()
    events: list[Any] = []
    engine = Engine(events.append)
    progress("loading the model")
    info = engine.load_model(LoadModel(model, device="cpu", dtype="fp32", slots=CHATS))
    names = load_adapters(engine, model, adapters, progress)
    cases = _cases(names)
    runs: dict[str, Run] = {
        name: lambda mixes=mixes: _decode(engine, events, mixes, tokens) for name, mixes in cases.items()}
    if against == "peft":
        progress("loading transformers + PEFT")
        from .bench_peft import PeftBench
        peft = PeftBench(engine.model, engine.model.store.infos[names[0]].path if names else None)
        runs["base, PEFT"] = lambda: (peft.decode(PROMPT, tokens, adapter=False), {})
        if names:
            runs["1 adapter, PEFT"] = lambda: (peft.decode(PROMPT, tokens, adapter=True), {})
    facts = {"model": info.name, "dtype": info.dtype, "weights": info.weights, "threads": info.threads, "tokens": tokens, "rounds": rounds}
    return facts | _measure(runs, rounds, progress)


def _measure(runs: dict[str, Run], rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Every run in turn, `rounds` times after one that does not count, so that a busy moment of the machine hits all alike."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    splits: dict[str, dict[str, float]] = {}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            progress(f"{f'round {turn} of {rounds}' if turn else 'warming up'}: {name}")
            speed, split = run()
            if turn:
                speeds[name].append(speed)
                splits[name] = split
    median = {name: round(statistics.median(values), 2) for name, values in speeds.items()}
    ratios = {name: round(speed / median[f"{name}, PEFT"], 2) for name, speed in median.items() if f"{name}, PEFT" in median}
    steps = {name: {op: round(ms, 3) for op, ms in split.items()} for name, split in splits.items() if split}
    all_speeds = {name: [round(value, 2) for value in values] for name, values in speeds.items()}
    return {"tokens_per_second": median, "ratio": ratios, "step_ms": steps, "every_round": all_speeds}


def _decode(engine: Engine, events: list[Any], mixes: Sequence[Mix], tokens: int) -> tuple[float, dict[str, float]]:
    """(tokens/s of the decode steps with all chats running, mean ms by op of such a step)."""
    events.clear()
    for number, mix in enumerate(mixes):
        engine.submit(Generate(number, PROMPT, mix, Sampling(max_tokens=tokens)))
    drawn, seconds = 0, 0.0
    steps: list[StepFinished] = []
    began = time.perf_counter()
    while engine.step():
        ended = time.perf_counter()
        step = events[-1]
        if step.decode_tokens == len(mixes):
            steps.append(step)
            drawn, seconds = drawn + step.decode_tokens, seconds + ended - began
        began = ended
    failed = next((event for event in events if isinstance(event, RequestFailed)), None)
    if failed or not steps:
        raise NotMeasured(failed.message if failed else "the replies were too short to measure; raise --tokens")
    return drawn / seconds, {op: statistics.fmean(step.ms_by_op[op] for step in steps) for op in steps[0].ms_by_op}


def load_adapters(engine: Engine, model: str | None, paths: Sequence[str], progress: Callable[[str], None]) -> list[str]:
    from ..sample_adapters import sample_adapters
    chosen = list(paths) or ([str(path) for _, path in sample_adapters()] if model is None else [])
    names = []
    for path in chosen:
        progress(f"loading {os.path.basename(path)}")
        names.append(engine.load_adapter(path).name)
    return names


def _cases(names: Sequence[str]) -> dict[str, list[Mix]]:
    cases: dict[str, list[Mix]] = {"base": [()]}
    if names:
        cases["1 adapter"] = [(AdapterUse(names[0]),)]
        own: list[Mix] = [(AdapterUse(names[i % len(names)], 1.0 - 0.1 * i),) for i in range(CHATS)]
        cases[f"{CHATS} chats, {CHATS} mixes"] = own
    return cases


def main() -> int:
    """The program; returns its exit code (see program.answer)."""
    return answer(run_bench, exit_code)


def exit_code(error: Exception) -> int:
    if isinstance(error, MissingPackages):
        return WRONG_USAGE
    by_file = isinstance(error, (ValueError, OSError)) and not isinstance(error, (NotMeasured, DefaultModelError))
    return CANNOT_BE_USED if by_file else FAILED


if __name__ == "__main__":
    set_spins()
    sys.exit(main())
