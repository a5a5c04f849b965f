"""Decode speed of the engine on this machine, and where a step's time goes.

`python -m lora_bench.engine.bench [MODEL] [--lora PATH ...] [--against peft] [--json]`; no MODEL is the default one with
its sample adapters. `--against peft` runs transformers + PEFT in fp32 on the same weights, in the same process, in turns.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .protocol import AdapterUse, Chat, Generate, LoadModel, Message, Mix, RequestFailed, Sampling, StepFinished

if TYPE_CHECKING:
    from .engine import Engine

PROMPT = Chat((Message("user", "Tell me a long story about the sea."),))
CHATS = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit code: 0, or 1 with a sentence on standard error."""
    options = _parser().parse_args(arguments)
    try:
        result = run_bench(options.model, options.lora, options.tokens, options.rounds, options.against)
    except (ValueError, OSError, ImportError) as error:
        print(f"lora-bench bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2) if options.json else "\n".join(_lines(result)))
    return 0


def run_bench(model: str | None, adapters: Sequence[str] = (), tokens: int = 48, rounds: int = 3, against: str | None = None) -> dict[str, Any]:
    """Median decode speeds [tokens/s] of one chat without and with an adapter and of four chats with four mixes, and the step split [ms].

    Needs at least one adapter for the second and third; without `model` the sample adapters are taken. Raises ValueError, OSError,
    ImportError (no transformers or peft for `against`).
    """
    from .engine import Engine
    from .machine import use_cores
    use_cores()
    events: list[Any] = []
    engine = Engine(events.append)
    info = engine.load_model(LoadModel(model, device="cpu", dtype="fp32", slots=CHATS))
    names = _load_adapters(engine, model, adapters)
    cases = _cases(names)
    runs: dict[str, Callable[[], tuple[float, dict[str, float]]]] = {
        name: lambda mixes=mixes: _decode(engine, events, mixes, tokens) for name, mixes in cases.items()}
    if against == "peft":
        from .bench_peft import PeftBench
        peft = PeftBench(engine.model, engine.model.store.infos[names[0]].path if names else None)
        runs["base, PEFT"] = lambda: (peft.decode(PROMPT, tokens, adapter=False), {})
        if names:
            runs["1 adapter, PEFT"] = lambda: (peft.decode(PROMPT, tokens, adapter=True), {})
    return {"model": info.name, "dtype": info.dtype, "threads": info.threads, "tokens": tokens, "rounds": rounds} | _measure(runs, rounds)


def _measure(runs: dict[str, Callable[[], tuple[float, dict[str, float]]]], rounds: int) -> dict[str, Any]:
    """Every run in turn, `rounds` times after one that does not count, so that a busy moment of the machine hits all alike."""
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    splits: dict[str, dict[str, float]] = {}
    for turn in range(rounds + 1):
        for name, run in runs.items():
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
        raise ValueError(failed.message if failed else "the replies were too short to measure; raise --tokens")
    return drawn / seconds, {op: statistics.fmean(step.ms_by_op[op] for step in steps) for op in steps[0].ms_by_op}


def _load_adapters(engine: Engine, model: str | None, paths: Sequence[str]) -> list[str]:
    from ..sample_adapters import sample_adapters
    chosen = list(paths) or ([str(path) for _, path in sample_adapters()] if model is None else [])
    return [engine.load_adapter(path).name for path in chosen]


def _cases(names: Sequence[str]) -> dict[str, list[Mix]]:
    cases: dict[str, list[Mix]] = {"base": [()]}
    if names:
        cases["1 adapter"] = [(AdapterUse(names[0]),)]
        own: list[Mix] = [(AdapterUse(names[i % len(names)], 1.0 - 0.1 * i),) for i in range(CHATS)]
        cases[f"{CHATS} chats, {CHATS} mixes"] = own
    return cases


def _lines(result: dict[str, Any]) -> list[str]:
    lines = [f"{result['model']} · {result['dtype']} · {result['threads']} threads · {result['tokens']} tokens · median of {result['rounds']}"]
    for name, speed in result["tokens_per_second"].items():
        lines.append(f"{name:22}{speed:8.1f} tok/s" + (f"   {result['ratio'][name]:.2f} x PEFT" if name in result["ratio"] else ""))
    for name, split in result["step_ms"].items():
        lines.append(f"{name:22}{sum(split.values()):8.1f} ms a step: " + ", ".join(f"{op} {ms:.1f}" for op, ms in split.items()))
    return lines


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lora-bench bench", description="Decode speed of the engine on this machine's CPU.")
    parser.add_argument("model", nargs="?", help="GGUF file or Hugging Face folder; none is the default model")
    parser.add_argument("--lora", action="append", default=[], metavar="PATH", help="an adapter; may be given again")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a reply (48)")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds, the median counts (3)")
    parser.add_argument("--against", choices=["peft"], help="also run transformers + PEFT (pip install 'lora-bench[train]')")
    parser.add_argument("--json", action="store_true")
    return parser


if __name__ == "__main__":
    from .__main__ import SPINS
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # as in the engine's process; read when torch is imported
    sys.exit(main())
