"""Decode speed of the engine on this machine, and where a step's time goes; beside transformers + PEFT, or beside llama-server.

`python -m lora_bench.engine.bench '{"model": PATH, "adapters": [PATH, ...], ...}'`, with the arguments of `run_bench`, prints JSON lines:
{"progress": text} now and then, the result last. Whoever it is compared with runs on the same weights and adapters, in turns with it.
"""
from __future__ import annotations

import importlib.metadata
import importlib.util
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_errors import MissingPackages, exit_code
from .program import answer, set_spins
from .protocol import AdapterUse, LoadModel, Mix, TokenIds

if TYPE_CHECKING:
    from .bench_speeds import Chats, Speed, Speeds
    from .engine import Engine

CHATS = 4
PROMPT_TOKENS = 940
PEFT_PACKAGES = ("transformers", "peft")
OWN, PEFT, SERVER = "lora-bench", "PEFT", "llama-server"
BASE, ONE = "base", "1 adapter"
Run = Callable[[], "Speed"]


def run_bench(
    model: str | None, adapters: Sequence[str] = (), tokens: int = 48, rounds: int = 3, against: str | None = None,
    server: str | None = None, dtype: str | None = None, rank: int = 0, prompt_tokens: int = PROMPT_TOKENS,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Decode speeds [tokens/s] of one chat without and with an adapter, and of four chats on the base and with four mixes, all replies of
    `tokens` tokens; the speed at which the base reads a prompt of `prompt_tokens` (0: none); and the split of our steps [ms]. Every round
    and the medians; medians over those of `against` ("peft") or of the llama-server whose program is `server`, one of them at most.

    Needs at least one adapter for what has some: those given; of a `rank` other than 0 four random ones on all linears; without `model`
    the sample adapters. `dtype` is that of LoadModel; None: fp32 against PEFT, which is in fp32, else auto.

    Raises ValueError, OSError, NotMeasured, MissingPackages (of `against`, or gguf, which writes adapters for `server`).
    """
    if against and (missing := [name for name in PEFT_PACKAGES if importlib.util.find_spec(name) is None]):
        raise MissingPackages(f"--against peft needs {' and '.join(missing)}, not installed here: "
                              f"{sys.executable} -m pip install {' '.join(missing)}")
    import psutil
    import torch

    from .bench_inputs import load_adapters, write_random_adapters
    from .bench_machine import machine
    from .bench_speeds import OwnSpeeds
    from .engine import Engine
    from .machine import use_cores
    load = psutil.getloadavg()
    use_cores()
    events: list[Any] = []
    engine = Engine(events.append)
    progress("loading the model")
    info = engine.load_model(LoadModel(model, device="cpu", dtype=dtype or ("fp32" if against else "auto"), slots=CHATS))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        paths = write_random_adapters(engine, rank, CHATS, folder, progress) if rank else adapters
        names = load_adapters(engine, model, paths, progress)
        names = sorted(names, key=lambda name: bool(engine.model.store.infos[name].invocation_tokens))[:CHATS]  # no prompt invokes one
        cases = _cases(engine, names)
        longest = _longest(cases, tokens, prompt_tokens, info.context)
        runs = {name: {OWN: run} for name, run in _runs(OwnSpeeds(engine, events), engine, cases, tokens, prompt_tokens).items()}
        peer: dict[str, Any] | None = None
        theirs: dict[str, Run] = {}
        if against == "peft":
            progress("loading transformers + PEFT")
            peer = {"name": PEFT, "version": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PEFT_PACKAGES)}
            theirs = _peft_runs(engine, cases, tokens)
        elif server:
            from .bench_server import LlamaServer
            from .bench_speeds import ServerSpeeds
            progress("starting llama-server")
            started = stack.enter_context(LlamaServer(server, engine.model, names, folder, longest, info.threads, CHATS))
            peer = {"name": SERVER, "version": started.version, "command": started.command}
            theirs = _runs(ServerSpeeds(started), engine, cases, tokens, prompt_tokens)
        for name, run in theirs.items():
            runs[name][peer["name"]] = run
        facts = {
            "measures": "speed", "machine": machine(torch.device("cpu")), "load_average": [round(value, 2) for value in load],
            "model": info.name, "dtype": info.dtype, "weights": info.weights, "threads": info.threads, "tokens": tokens,
            "prompt_tokens": prompt_tokens, "rounds": rounds, "rank": rank, "adapters": names, "peer": peer}
        return facts | _measure(runs, rounds, progress)


def _cases(engine: Engine, names: Sequence[str]) -> dict[str, Chats]:
    """What is decoded, by name."""
    from .bench_inputs import story_ids
    ids = [story_ids(engine, number) for number in range(CHATS)]
    own: list[Mix] = [(AdapterUse(names[i % len(names)], round(1.0 - 0.1 * i, 1)),) for i in range(CHATS)] if names else []
    cases: dict[str, Chats] = {BASE: [(ids[0], ())]}
    if names:
        cases[ONE] = [(ids[0], (AdapterUse(names[0]),))]
    cases[f"{CHATS} chats, base"] = [(one, ()) for one in ids]
    if names:
        cases[f"{CHATS} chats, {CHATS} mixes"] = list(zip(ids, own, strict=True))
    return cases


def _longest(cases: dict[str, Chats], tokens: int, prompt_tokens: int, context: int) -> int:
    """Tokens that a request comes to hold. Raises ValueError where the context ends before."""
    reply = tokens + max(len(ids) for chats in cases.values() for ids, _ in chats)
    for option, value, held in (("--tokens", tokens, reply), ("--prompt", prompt_tokens, prompt_tokens + 1)):
        if held > context:
            raise ValueError(f"{option} {value}: a request would hold {held} tokens, the context {context}; give at most "
                             f"{max(0, value - held + context)}")
    return max(reply, prompt_tokens + 1)


def _runs(side: Speeds, engine: Engine, cases: dict[str, Chats], tokens: int, prompt_tokens: int) -> dict[str, Run]:
    """What is measured of `side`, by name."""
    from .bench_inputs import random_ids
    draw = random.Random(0)
    runs: dict[str, Run] = {name: lambda chats=chats: side.decode(chats, tokens) for name, chats in cases.items()}
    if prompt_tokens:
        runs[f"prompt, {prompt_tokens} tokens"] = lambda: side.prefill(random_ids(engine, draw, prompt_tokens))
    return runs


def _peft_runs(engine: Engine, cases: dict[str, Chats], tokens: int) -> dict[str, Run]:
    """The same of transformers + PEFT, which have a chat at a time."""
    from .bench_peft import PeftBench
    from .bench_speeds import Speed
    ids, mix = cases.get(ONE, cases[BASE])[0]
    peft, prompt = PeftBench(engine.model, engine.model.store.infos[mix[0].name].path if mix else None), TokenIds(tuple(ids))
    return {name: lambda name=name: Speed(peft.decode(prompt, tokens, adapter=name == ONE)) for name in (BASE, ONE) if name in cases}


def _measure(runs: dict[str, dict[str, Run]], rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Every run in turn, `rounds` times after one that does not count, so that a busy moment of the machine hits all alike; of those that
    are compared another one begins in each round."""
    found: dict[tuple[str, str], list[Speed]] = {(name, who): [] for name, sides in runs.items() for who in sides}
    for turn in range(rounds + 1):
        for name, sides in runs.items():
            for who in sorted(sides, key=list(sides).index, reverse=turn % 2 == 0):
                progress(f"{f'round {turn} of {rounds}' if turn else 'warming up'}: {_label(name, who)}")
                speed = sides[who]()
                if turn:
                    found[name, who].append(speed)
    told = {_label(name, who): speeds for (name, who), speeds in found.items()}
    median = {label: statistics.median(speed.tokens_per_second for speed in speeds) for label, speeds in told.items()}
    ratio = {name: round(median[name] / median[_label(name, who)], 3) for name, who in found if who != OWN}
    return {
        "tokens_per_second": {label: round(value, 2) for label, value in median.items()}, "ratio": ratio,
        "every_round": {label: [round(speed.tokens_per_second, 2) for speed in speeds] for label, speeds in told.items()},
        "chats_at_once": {label: [speed.at_once for speed in speeds] for label, speeds in told.items()},
        "step_ms": {label: {op: round(ms, 3) for op, ms in speeds[-1].split.items()} for label, speeds in told.items() if speeds[-1].split}}


def _label(name: str, who: str) -> str:
    return name if who == OWN else f"{name}, {who}"


def main() -> int:
    """The program; returns its exit code (see program.answer)."""
    return answer(run_bench, exit_code)


if __name__ == "__main__":
    set_spins()
    sys.exit(main())
