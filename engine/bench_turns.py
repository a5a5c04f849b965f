"""How long the first token of a later turn takes when the turns share a long beginning, by what acted on it before and what acts now.

`python -m lora_bench.engine.bench_turns '{"model": PATH, ...}'`, with the arguments of `run_turns`, prints JSON lines: {"progress": text}
now and then, the result last. Every conversation is held with the KV cache and with a cache that is cleared before each turn, by turns in
the same process; with `server`, by a llama-server too, on the same GGUF base and the same adapters.
"""
from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_answers import Answer, Answers, OwnAnswers, ServerAnswers
from .bench_errors import exit_code
from .bench_inputs import load_adapters, random_ids
from .bench_server import LlamaServer
from .program import answer, set_spins
from .protocol import AdapterUse, LoadModel, Mix

if TYPE_CHECKING:
    from .engine import Engine

PREFIX_TOKENS = 1000
TURN_TOKENS, REPLY_TOKENS = 24, 8
"""what a turn adds to the one before: the reply, then this many tokens of the person"""
INVOCATION = " certainty:"
"""of the first adapter under its second name, where it is an aLoRA"""
FIRST, SECOND, ALORA = "A", "B", "A as aLoRA"
CONVERSATIONS: dict[str, tuple[Mix, ...]] = {
    "base, base": ((), ()),
    "base, aLoRA, base": ((), (AdapterUse(ALORA),), ()),
    "base, LoRA": ((), (AdapterUse(FIRST),)),
    "LoRA, the same": ((AdapterUse(FIRST),), (AdapterUse(FIRST),)),
    "there and back": ((AdapterUse(FIRST),), (AdapterUse(SECOND),), (AdapterUse(FIRST),), (AdapterUse(SECOND),)),
    "rescaled and back": ((AdapterUse(FIRST),), (AdapterUse(FIRST, 0.5),), (AdapterUse(FIRST),)),
}
"""name -> the mix of each turn"""
WITH, WITHOUT, SERVER = "reuse", "no reuse", "llama-server"


@dataclass(slots=True)
class Turns:
    """What was measured of one turn, over the rounds."""

    mix: Mix
    prompt_tokens: list[int] = field(default_factory=list)
    hit_tokens: list[int] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    why: str = ""

    def add(self, told: Answer) -> None:
        self.prompt_tokens.append(told.prompt_tokens)
        self.hit_tokens.append(told.hit_tokens)
        self.ttft_ms.append(round(told.ms, 2))
        self.why = told.why

    def summary(self) -> dict[str, Any]:
        return {"mix": [[use.name, use.scale] for use in self.mix], "ttft_ms": statistics.median(self.ttft_ms), "every_round": self.ttft_ms,
                "prompt_tokens": self.prompt_tokens, "hit_tokens": self.hit_tokens, "why": self.why}


def run_turns(
    model: str | None, adapters: Sequence[str] = (), prefix_tokens: int = PREFIX_TOKENS, rounds: int = 5, server: str | None = None,
    dtype: str = "auto", progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The time to the first token [ms] of every turn of CONVERSATIONS, all rounds and their median, with the tokens found and why not more.

    Needs two adapters; without `model` the sample adapters are taken. `dtype` is that of LoadModel. Every conversation is one of random
    tokens that nobody had before; a turn's prompt is the one before, its reply and a few tokens more. Raises ValueError, OSError,
    NotMeasured, and MissingPackages when `server` is given and gguf, which writes its adapters, is not installed.
    """
    from .engine import Engine
    from .machine import use_cores
    use_cores()
    events: list[Any] = []
    engine = Engine(events.append)
    progress("loading the model")
    info = engine.load_model(LoadModel(model, device="cpu", dtype=dtype, context=0))
    paths = _two_adapters(engine, model, adapters, progress)
    longest = prefix_tokens + max(map(len, CONVERSATIONS.values())) * (TURN_TOKENS + REPLY_TOKENS) + REPLY_TOKENS
    if longest > info.context:
        raise ValueError(f"the longest conversation holds {longest} tokens, the context {info.context}; give --prefix {prefix_tokens} less "
                         f"than {info.context - longest + prefix_tokens}")
    facts = {"model": info.name, "dtype": info.dtype, "weights": info.weights, "threads": info.threads, "adapters": paths,
             "prefix_tokens": prefix_tokens, "reply_tokens": REPLY_TOKENS, "rounds": rounds}
    with ExitStack() as stack:
        answers: dict[str, Answers] = {WITH: OwnAnswers(engine, events, reuse=True), WITHOUT: OwnAnswers(engine, events, reuse=False)}
        if server:
            progress("starting llama-server")
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            names = (FIRST, SECOND, ALORA)
            started = stack.enter_context(LlamaServer(server, engine.model, names, Path(folder), longest, info.threads))
            answers[SERVER] = ServerAnswers(started)
            facts["server"] = started.version
        return facts | {"conversations": _hold(answers, engine, prefix_tokens, rounds, progress)}


def _two_adapters(engine: Engine, model: str | None, paths: Sequence[str], progress: Callable[[str], None]) -> dict[str, str]:
    """Two adapters under the names of CONVERSATIONS, the first of them also as an aLoRA; their files by these names."""
    infos = [engine.model.store.infos[name] for name in load_adapters(engine, model, paths, progress)]
    plain = [info.path for info in infos if not info.invocation_tokens]
    if len(plain) < 2:
        raise ValueError(f"two adapters without an invocation are needed to go there and back between them, {len(plain)} were given; "
                         "give each with --lora")
    for info in infos:
        engine.unload_adapter(info.name)
    chosen = {FIRST: plain[0], SECOND: plain[1], ALORA: plain[0]}
    for name, path in chosen.items():
        engine.load_adapter(path, name)
    engine.set_invocation(ALORA, INVOCATION)
    return chosen


def _hold(answers: dict[str, Answers], engine: Engine, prefix_tokens: int, rounds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Every conversation with everybody, `rounds` times after one that does not count; who begins changes from round to round."""
    draw = random.Random(0)
    told = {name: {who: [Turns(mix) for mix in mixes] for who in answers} for name, mixes in CONVERSATIONS.items()}
    for number in range(rounds + 1):
        for name, mixes in CONVERSATIONS.items():
            progress(f"{f'round {number} of {rounds}' if number else 'warming up'}: {name}")
            for who in sorted(answers, key=(WITH, WITHOUT, SERVER).index if number % 2 else (WITHOUT, WITH, SERVER).index):
                added = [random_ids(engine, draw, TURN_TOKENS + (0 if turn else prefix_tokens)) for turn in range(len(mixes))]
                found = _conversation(engine, answers[who], added, mixes)
                if number:
                    for turn, got in zip(told[name][who], found, strict=True):
                        turn.add(got)
    return {name: {who: [turn.summary() for turn in turns] for who, turns in by_who.items()} for name, by_who in told.items()}


def _conversation(engine: Engine, answers: Answers, added: Sequence[Sequence[int]], mixes: Sequence[Mix]) -> list[Answer]:
    """The answers to each turn, whose prompt is the one before, its reply and what is `added`; and the invocation where an aLoRA acts."""
    answers.forget()
    ids: list[int] = []
    found: list[Answer] = []
    for more, mix in zip(added, mixes, strict=True):
        ids += more
        if any(use.name == ALORA for use in mix):
            ids += engine.model.store.infos[ALORA].invocation_tokens
        found.append(answers.turn(ids, mix, REPLY_TOKENS))
        ids += found[-1].reply
    return found


def main() -> int:
    """The program; returns its exit code (see program.answer)."""
    return answer(run_turns, exit_code)


if __name__ == "__main__":
    set_spins()
    sys.exit(main())
