"""A long life of an engine: random requests, changes of running replies, loads, evictions, aborts, reloads, mixed batches.

`python tests/soak.py --seconds 600` (`make soak SECONDS=600`): each token that was drawn must be the one that a fresh engine draws there,
which has neither a cache nor CUDA graphs, or as good as that one by what the dtype rounds; and replies whose mix was never changed are
compared with those of a fresh engine that runs them under its own graphs. Memory must not grow.
"""
from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event as Flag

import psutil
import torch
from engine_bench import Bench
from oracle import COMMANDS, Contents, Drawn, Fresh, Life, Prompts, alike
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_bench.engine.base_file import open_base
from lora_bench.engine.default_model import ensure_default_model
from lora_bench.engine.engine import Engine
from lora_bench.engine.protocol import (
    GraphCaptured,
    HostEvicted,
    HostLoaded,
    LoadModel,
    RequestFailed,
    RequestFinished,
    RequestPreempted,
    RequestStarted,
    SlotEvicted,
    SlotLoaded,
    StepFinished,
)
from lora_bench.engine.random_base import random_adapter, shape_facts
from lora_bench.engine.random_files import write_adapter, write_base
from lora_bench.engine.weights.load import load_weights
from lora_bench.kernels.sampling import gumbel
from lora_bench.sample_adapters import sample_adapters

ROUNDING = {"fp32": 2.0**-17, "bf16": 2.0**-5, "fp16": 2.0**-8}
"""of the largest logit: what two ways to sum may change in the dtype"""
LEAST_EQUAL = {"fp32": 0.999, "bf16": 0.95, "fp16": 0.99}
"""share of the tokens that must be the very same"""
GROWTH_BYTES = {"device": 64 << 20, "process": 256 << 20}
"""that the least of the second half may lie above the least of the first, without its first tenth: what is in slots changes from round to
round, and only what stays is never given back"""
REFUSALS = "unloaded", "slots", "has changed since it was loaded", "changed while it was read"
"""for what an unload or a reload took from those that waited"""
STUCK_SECONDS = 60.0
COMMANDS_OF_ROUND = 120
ROUND_COMMANDS = COMMANDS | {"mix": 6, "reload": 1, "load_or_unload": 1}
PROMPT_LENGTHS = (1, 16, 30, 48, 90, 140)
REPLY_TOKENS = (1, 20, 60, 100)
CONTEXT = 256
PEFT_PREFIX = "base_model.model.model."
TOLD = (GraphCaptured, HostEvicted, HostLoaded, RequestFailed, RequestFinished, RequestPreempted, RequestStarted, SlotEvicted, SlotLoaded)


@dataclass(slots=True)
class Token(Drawn):
    """The one that was drawn."""

    id: int


class Lived(Bench):
    """An engine that reads adapters in a thread, with few slots and little memory; its draws are kept."""

    def __init__(self, base: Path, **load: object) -> None:
        self.events, self.draws, self.steps, self._news = [], [], [], Flag()
        self.engine = Engine(self.events.append, self._news.set)
        self.engine.load_model(LoadModel(str(base), context=CONTEXT, **load))
        accept = self.engine._accept

        def kept(request: object, token: int) -> None:
            self.draws.append(Token(request, len(request.ids), request.history, token))
            accept(request, token)

        self.engine._accept = kept

    def run(self, steps: int = 1 << 60) -> None:
        """So many steps, or until every request has ended; milliseconds of each go to `steps`."""
        moved = time.monotonic()
        while steps and self.engine.request_ids:
            began = time.perf_counter()
            if self.engine.step():
                self.steps.append((time.perf_counter() - began) * 1e3)
                steps, moved = steps - 1, time.monotonic()
            else:
                assert time.monotonic() - moved < STUCK_SECONDS, f"nothing goes on: {self.engine.snapshot()}"
                self._news.wait(0.01)
                self._news.clear()


@dataclass(slots=True)
class Seen:
    """What came of a life so far."""

    counts: Counter[str] = field(default_factory=Counter)
    nearest: float = 0.0
    """how far a token was behind the best one at most, of what rounding may change"""
    slowest_ms: float = 0.0

    @property
    def equal(self) -> float:
        return self.counts["equal tokens"] / max(1, self.counts["tokens"])


class Soak:
    """Lives of one engine on `base`, checked round by round; see the module."""

    def __init__(self, base: Path, contents: Contents, prompts: Prompts, place: Path, draw: random.Random, dtype: str, device: str) -> None:
        """`contents` are taken turn by turn, out of `place`."""
        sizes = [sum(file.stat().st_size for file in folders[0].iterdir()) for folders in contents.values()]
        self.lived = Lived(base, device=device, dtype=dtype, slots=3, host_cache_bytes=max(3 * max(sizes), sum(sizes) // 2))
        self.fresh = Fresh(base, contents, device=device, dtype=dtype)
        self.life = Life(draw, self.lived, contents, place, prompts, REPLY_TOKENS, {"temperature": 0.8}, ROUND_COMMANDS)
        self.seen, self._rounding, self._graphs = Seen(), ROUNDING[dtype], Counter()

    def round(self, commands: int = COMMANDS_OF_ROUND) -> None:
        """So many commands with steps between them, until all has ended; then what was drawn is checked. Raises AssertionError."""
        lived, life, counts = self.lived, self.life, self.seen.counts
        lived.events.clear()
        lived.draws.clear()
        lived.steps.clear()
        life.asked.clear()
        for _ in range(commands):
            counts[life.next() or "refused"] += 1
            lived.run(life.draw.choice((0, 0, 1, 3)))
        lived.run()
        lived.engine.snapshot()  # events of the last step
        self._count()
        self._check_tokens()
        self._check_replies()
        counts["rounds"] += 1

    def _count(self) -> None:
        counts, memory = self.seen.counts, self.lived.engine.model.memory
        counts.update(type(event).__name__ for event in self.lived.events if isinstance(event, TOLD))
        paths = [event.path for event in self.lived.events if isinstance(event, StepFinished)]
        counts["steps"] += len(paths)
        counts["steps under graphs"] += sum(path.startswith("graph") for path in paths)
        self.seen.slowest_ms = max(self.seen.slowest_ms, *self.lived.steps)
        captured = [event for event in self.lived.events if isinstance(event, GraphCaptured)]
        self._graphs.update((event.rows, event.adapters, event.more) for event in captured)
        assert not any(event.problem for event in captured) and max(self._graphs.values(), default=1) == 1, self._graphs
        assert memory.free == memory.blocks and not self.lived.engine.model.scheduler.waiting
        ended = [event for event in self.lived.events if isinstance(event, RequestFinished | RequestFailed)]
        assert sorted(event.request_id for event in ended) == sorted(self.life.asked), "each request ends once"
        failed = [event.message for event in ended if isinstance(event, RequestFailed)]
        assert all(any(words in message for words in REFUSALS) for message in failed), failed

    def _check_tokens(self) -> None:
        for group in alike(self.lived.draws):
            request, history = group[0].request, group[0].history
            ids, by_place = request.ids[:max(token.tokens for token in group)], {token.tokens - 1: token for token in group}
            first = 0
            for logits in self.fresh.logits(ids, history):
                here = [by_place[place] for place in range(first, first + len(logits)) if place in by_place]
                if here:
                    self._check_rows(here, logits[[token.tokens - 1 - first for token in here]])
                first += len(logits)

    def _check_rows(self, tokens: Sequence[Token], logits: Tensor) -> None:
        """`logits` [tokens, vocab]: from which each was to be drawn."""
        scores, rooms = self._scores(tokens[0].request, logits, [token.tokens for token in tokens])
        drawn = torch.tensor([token.id for token in tokens], device=logits.device)
        behind = (scores.amax(-1) - scores.gather(1, drawn[:, None])[:, 0]) / rooms
        self.seen.counts.update({"tokens": len(tokens), "equal tokens": int((scores.argmax(-1) == drawn).sum())})
        worst = int(behind.argmax())
        self.seen.nearest = max(self.seen.nearest, float(behind[worst]))
        assert behind[worst] <= 1.0, (
            f"{float(behind[worst]):.2f} times what rounding may change behind {int(scores[worst].argmax())}: token {tokens[worst].id} "
            f"behind the first {tokens[worst].tokens} of request {tokens[worst].request.id}, {tokens[worst].history.stretches}")

    def _scores(self, request: object, logits: Tensor, places: Sequence[int]) -> tuple[Tensor, Tensor]:
        """[rows, vocab] the greatest of which is drawn, and [rows] how much rounding may change in a difference of two."""
        rooms, scores, sampling = 2 * self._rounding * logits.abs().amax(-1), logits, request.sampling
        if sampling.temperature:
            noise = torch.stack([gumbel(sampling.seed, place, logits.shape[-1], logits.device) for place in places])
            scores, rooms = logits.double() / sampling.temperature + noise, rooms / sampling.temperature
        return scores, rooms

    def _check_replies(self) -> None:
        """Whose mix was never changed replies as it does in a fresh engine, up to where the two are as good as equal."""
        histories: dict[int, set[object]] = {}
        for token in self.lived.draws:
            histories.setdefault(token.request.id, set()).add(token.history.stretches)
        last = {token.request.id: token for token in self.lived.draws}
        whole = {event.request_id: event.ids for event in self.lived.events if isinstance(event, RequestFinished)
                 and event.reason in ("length", "stop") and len(histories[event.request_id]) == 1
                 and last[event.request_id].history.mix.mix == self.life.asked[event.request_id].mix}
        asked = {number: self.fresh.asked(self.life.asked[number], last[number].history) for number in whole}
        replies = self.fresh.replies([*asked.values()])
        for number, ids in whole.items():
            self.seen.counts.update(["replies", *(["equal replies"] if ids == replies[number] else [])])
            if ids != replies[number]:
                at = next(i for i, (one, other) in enumerate(zip(ids, replies[number], strict=False)) if one != other)
                prompt = asked[number].prompt.ids
                self.fresh.bench.engine.clear_cache()
                logits = self.fresh.bench.engine.logits([*prompt, *ids[:at]], asked[number].mix)
                scores, rooms = self._scores(last[number].request, logits[None], [len(prompt) + at])
                apart = abs(float(scores[0, ids[at]] - scores[0, replies[number][at]]) / float(rooms[0]))
                assert apart <= 1.0, f"request {number} parts at token {at}, {apart:.1f} times what rounding may change apart"

    def memory(self) -> dict[str, int]:
        """Bytes that live on the device and in the process, while nothing runs."""
        gc.collect()
        return {"device": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0, "process": psutil.Process().memory_info().rss}


def live(soak: Soak, seconds: float, dtype: str) -> None:
    """Rounds for so long, told once a minute. Raises AssertionError."""
    began, told = time.monotonic(), 0.0
    taken: list[tuple[float, dict[str, int]]] = []
    while (now := time.monotonic() - began) < seconds:
        soak.round()
        taken.append((now / seconds, soak.memory()))
        if now - told > 60:
            told = now
            print(f"{now:5.0f} s {_told(soak, dtype)}", flush=True)
    last = taken[-1][1]
    first, second = ([memory for share, memory in taken if start <= share < end] or [last] for start, end in ((0.1, 0.5), (0.5, 1.0)))
    grown = {place: min(one[place] for one in second) - min(one[place] for one in first) for place in last}
    print(f"{seconds:5.0f} s {_told(soak, dtype)}\n{dtype}: grown by {grown} bytes of {last}; {dict(soak.seen.counts)}", flush=True)
    assert soak.seen.equal >= LEAST_EQUAL[dtype], f"{soak.seen.equal:.4%} of the tokens are equal"
    assert all(grown[place] <= GROWTH_BYTES[place] for place in grown), grown


def _told(soak: Soak, dtype: str) -> str:
    counts, seen = soak.seen.counts, soak.seen
    return (
        f"{dtype}: {counts['RequestFinished']} replies, {counts['tokens']} tokens checked, {seen.equal:.4%} equal, the others at most "
        f"{seen.nearest:.2f} of rounding behind; {counts['equal replies']} of {counts['replies']} whole replies equal; "
        f"{counts['mix']} changes of mix, {counts['SlotLoaded']} loads into slots, {counts['HostLoaded']} from disk, "
        f"{counts['SlotEvicted']} evictions, {counts['reload']} reloads, {counts['abort']} aborts, "
        f"{counts['RequestPreempted']} preemptions, {counts['GraphCaptured']} graphs, "
        f"{counts['steps under graphs']} of {counts['steps']} steps under them, the slowest step {seen.slowest_ms:.0f} ms")


def sample_contents(base: Path, place: Path) -> dict[str, list[Path]]:
    """The sample adapters, each again with half its alpha, and `more_contents`."""
    found: dict[str, list[Path]] = {}
    for name, folder in sample_adapters():
        tensors, config = _read(Path(folder))
        found[name] = [Path(folder), _written(place / name, tensors, config | {"lora_alpha": config["lora_alpha"] / 2})]
    return found | more_contents(base, found["robot"][0], place)


def more_contents(base: Path, lora: Path, place: Path) -> dict[str, list[Path]]:
    """Two adapters that have more than the low rank of `lora`, of random numbers: a DoRA, and one that trained the last norm and rows of
    the embedding."""
    found: dict[str, list[Path]] = {"dora": [], "saved": []}
    weights = load_weights(open_base(base), "cpu", torch.float32)
    tensors, config = _read(lora)
    for number in range(2):
        paths = [name.removesuffix(".lora_B.weight") for name in tensors if "lora_B" in name]
        sizes = {path: weights[f"{path.removeprefix(PEFT_PREFIX)}.weight"].norm(dim=1) for path in paths}
        magnitudes = {f"{path}.lora_magnitude_vector": size * (0.8 + 0.4 * torch.rand_like(size)) for path, size in sizes.items()}
        norm, rows = weights["norm.weight"], torch.arange(number, len(weights["embed_tokens.weight"]), 7)
        trained = {f"{PEFT_PREFIX}norm.weight": norm * (0.8 + 0.4 * torch.rand_like(norm)),
                   f"{PEFT_PREFIX}embed_tokens.token_adapter.trainable_tokens_delta": 0.02 * torch.randn(len(rows), len(norm))}
        saved = {"modules_to_save": ["model.norm"], "trainable_token_indices": {"embed_tokens": rows.tolist()}}
        found["dora"].append(_written(place / f"dora-{number}", tensors | magnitudes, config | {"use_dora": True}))
        found["saved"].append(_written(place / f"saved-{number}", tensors | trained, config | saved))
    return found


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Tensors and config of an adapter."""
    return load_file(folder / "adapter_model.safetensors"), json.loads((folder / "adapter_config.json").read_text())


def _written(folder: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def random_contents(base: Path, place: Path, ranks: Sequence[int] = (1, 8, 16, 24, 64)) -> dict[str, list[Path]]:
    """Adapters of `ranks`, two of each, and `more_contents`."""
    facts, found = open_base(base).facts, {}
    for rank in ranks:
        found[f"r{rank}"] = [place / f"{rank}-{number}" for number in range(2)]
        for folder in found[f"r{rank}"]:
            write_adapter(folder, random_adapter(facts, folder.name, rank, torch.device("cpu"), torch.bfloat16).adapter)
    return found | more_contents(base, found[f"r{ranks[0]}"][0], place)


def sample_prompts() -> Prompts:
    """Chats with the default base, and what invokes its aLoRA."""
    golden = Path(__file__).parent / "data" / "golden"
    chats = [prompt["ids"] for prompt in json.loads((golden / "prompts.json").read_text()).values()]
    certainty = json.loads((Path(dict(sample_adapters())["certainty"]) / "adapter_config.json").read_text())
    return Prompts([(chats[index] + chats[index + 1])[:150] for index in range(0, len(chats) - 1, 2)], PROMPT_LENGTHS,
                   ((), (), certainty["alora_invocation_tokens"]))


def random_prompts(base: Path, draw: random.Random) -> Prompts:
    vocab = open_base(base).facts.vocab
    return Prompts([[draw.randrange(vocab) for _ in range(150)] for _ in range(4)], PROMPT_LENGTHS, ((),))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of all dtypes together")
    parser.add_argument("--shape", help="random weights and adapters instead of the default base and the sample adapters")
    parser.add_argument("--dtype", nargs="+", choices=[*ROUNDING], default=["fp32", "bf16"])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    options = parser.parse_args()
    print(f"seed {options.seed}")
    torch.manual_seed(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        for number, dtype in enumerate(options.dtype):
            place, draw = Path(folder) / dtype, random.Random(options.seed + number)
            place.mkdir()
            if options.shape:
                base = place / "base"
                write_base(base, shape_facts(options.shape), torch.device("cpu"))
                contents, prompts = random_contents(base, place / "contents"), random_prompts(base, draw)
            else:
                base = ensure_default_model()
                contents, prompts = sample_contents(base, place / "contents"), sample_prompts()
            soak = Soak(base, contents, prompts, place / "adapters", draw, dtype, options.device)
            live(soak, options.seconds / len(options.dtype), dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
