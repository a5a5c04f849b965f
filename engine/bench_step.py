"""How long the engine's own steps take, for replies and for prompts, with adapters and without, beside what memory and plain torch allow.

`python -m lora_bench.engine.bench_step '{"shape": "135m", ...}'`, with the arguments of `run_step`, prints JSON lines: {"progress": text}
now and then, the result last.
"""
from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .bench_errors import exit_code as bench_exit_code
from .program import WRONG_USAGE, answer, set_spins

if TYPE_CHECKING:
    from .measured_base import MeasuredBase, Timed
    from .models.decoder import Decoder
    from .models.facts import ModelFacts
    from .protocol import StepFinished

ROUNDS = 3
"""in which all that is compared is run in turns, so that a busy moment hits all alike"""
ROUND_SECONDS = 1.0
"""after which a round of one of them starts no other step"""
MORE_TOKENS = 4
"""that requests come to hold beside those that are measured"""
SHAPE = {"cpu": "135m", "cuda": "8b"}
PREFILL = {"cpu": (512,), "cuda": (512, 2048)}
"""what is measured when nothing is named"""
BASE, ONE = "base", "1 adapter"


@dataclass(slots=True)
class _Measured:
    """One thing that is measured, over the rounds."""

    run: Callable[[], Timed]
    names: Sequence[str]
    ranks: Sequence[int]
    timed: list[Timed] = field(default_factory=list)

    @property
    def ms(self) -> list[float]:
        return [ms for timed in self.timed for ms in timed.ms]


@dataclass(frozen=True, slots=True)
class _Read:
    """What is read: adapters of these ranks in each of `steps`, keys and values of `stored` tokens in all."""

    ranks: Sequence[int]
    stored: int
    steps: int


def run_step(
    model: str | None = None, shape: str | None = None, packed: str = "", device: str = "auto", dtype: str = "auto", adapters: int = 8,
    ranks: Sequence[int] = (16,), batch: Sequence[int] = (1, 8, 32), context: int = 256, prefill: Sequence[int] | None = None,
    steps: int = 30, progress: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Median milliseconds of decode and prefill steps of a base, the one in the file `model` or one of random weights of `shape` and
    `packed` (see random_base; neither: SHAPE), in three ways: alone, with one adapter on all rows, and with `adapters` of them on the rows
    in turn. These are random ones, of `ranks` in turn, on all linears of all layers.

    Decode: `batch` rows of `context` tokens; prefill: so many tokens together (None: PREFILL). Every cell has the least and the greatest
    of its milliseconds beside their median, its floor, that is bytes which must be read over the bandwidth of a copy that was measured
    too, and where the time went by op. Raises WrongShape, ValueError, OSError, OutOfMemory, NotMeasured.
    """
    import torch

    from .bench_machine import copy_bandwidth, machine
    from .blocks import blocks_for
    from .config import DTYPE_NAMES, pick_device
    from .machine import use_cores
    from .measured_base import MeasuredBase
    use_cores()
    on = pick_device(device)
    prefill = PREFILL[on.type] if prefill is None else prefill
    longest = max((context + steps, *prefill)) + MORE_TOKENS
    decoder, what = _base(model, shape or (None if model else SHAPE[on.type]), packed, device, dtype, longest, progress)
    progress("measuring how fast memory is copied")
    bandwidth = copy_bandwidth(on)
    progress(f"making {adapters} adapters")
    all_ranks = [ranks[number % len(ranks)] for number in range(adapters)]
    blocks = max(max(batch) * blocks_for(context + steps + MORE_TOKENS), blocks_for(longest) + adapters)
    with torch.inference_mode():
        base = MeasuredBase(decoder, all_ranks, max(batch), blocks)
        bench = _Bench(base, all_ranks, bandwidth, steps, progress)
        decode = [cell for rows in batch for cell in bench.decode(rows, context)]
        prompts = [cell for tokens in prefill for cell in bench.prefill(tokens)]
    facts = decoder.facts
    return {
        "measures": "step", "machine": machine(on),
        "base": what | {"device": str(on), "dtype": "packed" if decoder.multiplies_packed else DTYPE_NAMES[decoder.dtype],
                        "layers": facts.layers, "hidden": facts.hidden,
                        "heads": facts.heads, "kv_heads": facts.kv_heads, "head_dim": facts.head_dim, "intermediate": facts.intermediate,
                        "vocab": facts.vocab, "weight_bytes": decoder.nbytes},
        "adapters": {"count": adapters, "ranks": all_ranks, "linears": "all linears of all layers"},
        "flags": {"model": model, "shape": shape, "packed": packed, "device": device, "dtype": dtype, "adapters": adapters,
                  "ranks": list(ranks), "batch": list(batch), "context": context, "prefill": list(prefill), "steps": steps},
        "copy_bytes_per_second": round(bandwidth), "why_no_plain_torch": bench.why_no_plain, "decode": decode, "prefill": prompts}


def _base(
    model: str | None, shape: str | None, packed: str, device: str, dtype: str, tokens: int, progress: Callable[[str], None],
) -> tuple[Decoder, dict[str, Any]]:
    """A base that takes requests of so many tokens, and what it is."""
    from ..kernels.packed import PackedWeight
    from .base_file import open_base
    from .config import AUTO_DTYPE, DTYPES, make_config, pick_device
    from .models.decoder import Decoder
    from .protocol import LoadModel
    from .random_base import check_room, random_weights, shape_facts
    from .weights.load import load_weights
    if model is not None:
        file = open_base(model)
        _check_length(tokens, file.facts, file.name)
        config = make_config(LoadModel(model, device=device, dtype=dtype), file, lambda: None)
        progress(f"loading {file.name}")
        weights = load_weights(file, config.device, config.dtype, lambda item, done, total: None, lambda: False, config.packed,
                               config.recoded)
        return Decoder(file.facts, weights, tokens), {"name": file.name, "weights": "packed" if config.packed else "dense"}
    facts, on = shape_facts(shape), pick_device(device)
    _check_length(tokens, facts, f"shape {shape}")
    kind = DTYPES[AUTO_DTYPE[on.type] if dtype in ("auto", "packed") else dtype]
    if dtype == "packed" and not packed:
        raise ValueError(f"shape {shape}: dtype packed was asked for without a type; give --packed TYPE too, or another dtype")
    check_room(facts, on, kind, packed)
    progress(f"making random weights of shape {shape}")
    weights = random_weights(facts, on, kind, packed)
    if packed and on.type == "cpu" and dtype in ("auto", "packed"):
        weights = {name: replace(weight, recoded=True) if isinstance(weight, PackedWeight) else weight for name, weight in weights.items()}
    return Decoder(facts, weights, tokens), {"name": shape, "weights": f"random {packed}".strip()}


def _check_length(tokens: int, facts: ModelFacts, what: str) -> None:
    if tokens > facts.context:
        raise ValueError(f"{what}: requests would grow to {tokens} tokens, its context is {facts.context}; take a "
                         "shorter context or prompt")


class _Bench:
    """Cells on one base: each compared one in turns with the others of its row."""

    def __init__(
        self, base: MeasuredBase, ranks: Sequence[int], bandwidth: float, steps: int, progress: Callable[[str], None],
    ) -> None:
        from .bench_plain import plain_obstacle
        self._base, self._ranks, self._bandwidth, self._steps, self._progress = base, ranks, bandwidth, steps, progress
        self.why_no_plain = plain_obstacle(base.decoder)

    def decode(self, rows: int, context: int) -> list[dict[str, Any]]:
        from .bench_plain import PlainStep
        steps = max(1, self._steps // ROUNDS)
        cells = self._cells(rows, lambda names: self._base.decode(names, rows, context, steps, ROUND_SECONDS))
        plain = PlainStep(self._base.decoder, rows, context) if not self.why_no_plain else None
        plain_ms: list[float] = []
        for number in range(ROUNDS):
            self._turn(number, cells, f"decode, batch {rows}")
            if plain is not None:
                plain_ms += plain.measure(steps, ROUND_SECONDS)
        told = []
        for name, cell in cells.items():
            acting = cell.ranks[:min(rows, len(cell.ranks))]
            steps_of = [step for timed in cell.timed for step in timed.steps]
            told.append({"batch": rows, "context": context}
                        | self._told(name, cell, cells[BASE], _Read(acting, rows * context, 1), steps_of)
                        | {"plain_torch_ms": _median(plain_ms), "plain_torch_over": _ratio(plain_ms, cell.ms)})
        return told

    def prefill(self, tokens: int) -> list[dict[str, Any]]:
        def run(names: Sequence[str]) -> Timed:
            return self._base.prefill(names, tokens, max(1, self._steps // ROUNDS), ROUND_SECONDS)

        cells = self._cells(tokens, run)
        bases = {1: BASE}
        """those of so many prompts: a prompt's attention grows with its length"""
        for count in {len(cell.names) for cell in cells.values()} - {0, 1}:
            bases[count] = f"{BASE}, {count} prompts"
            cells[bases[count]] = _Measured(partial(run, [""] * count), [""] * count, ())
        for cell in cells.values():
            self._base.prompt_steps(cell.names, tokens)
        for number in range(ROUNDS):
            self._turn(number, cells, f"prefill, {tokens} tokens")
        told = []
        for name, cell in cells.items():
            steps = self._base.prompt_steps(cell.names, tokens)
            prompts = max(1, len(cell.names))
            told.append({"tokens": tokens, "prompts": prompts, "steps": len(steps)}
                        | self._told(name if cell.ranks else BASE, cell, cells[bases[prompts]], _Read(cell.ranks, 0, len(steps)), steps)
                        | {"tokens_per_second": round(tokens / statistics.median(cell.ms) * 1e3, 1)})
        return told

    def _cells(self, rows: int, run: Callable[[Sequence[str]], Timed]) -> dict[str, _Measured]:
        """What can be compared on so many rows, by name."""
        names, counts = self._base.names, {BASE: 0}
        if names:
            counts[ONE] = 1
        if len(names) > 1 and rows > 1:
            counts[f"{len(names)} adapters"] = len(names)
        return {name: _Measured(partial(run, names[:count]), names[:count], self._ranks[:count]) for name, count in counts.items()}

    def _turn(self, number: int, cells: dict[str, _Measured], what: str) -> None:
        for name, cell in cells.items():
            self._progress(f"{what}, {name}: round {number + 1} of {ROUNDS}")
            cell.timed.append(cell.run())

    def _told(
        self, name: str, cell: _Measured, base: _Measured, read: _Read, steps: Sequence[StepFinished],
    ) -> dict[str, Any]:
        """`ms_by_op` are shares of the median, by those of `steps`."""
        ms = statistics.median(cell.ms)
        floor = {part: count / self._bandwidth * 1e3 for part, count in _read_bytes(self._base.decoder, read).items()}
        ops = {op: statistics.median(step.ms_by_op.get(op, 0.0) for step in steps)
               for op in dict.fromkeys(op for step in steps for op in step.ms_by_op)}
        share = ms / sum(ops.values())
        return {
            "adapters": name, "ranks": list(read.ranks), "ms": round(ms, 4), "least_ms": round(min(cell.ms), 4),
            "greatest_ms": round(max(cell.ms), 4), "times": len(cell.ms), "over_base": _ratio(cell.ms, base.ms),
            "floor_ms": {part: round(value, 4) for part, value in floor.items()}, "of_floor": round(sum(floor.values()) / ms, 4),
            "ms_by_op": {op: round(share * value, 4) for op, value in ops.items()},
            "path": ", ".join(dict.fromkeys(step.path for step in steps))}


def _read_bytes(decoder: Decoder, read: _Read) -> dict[str, int]:
    """What cannot but be read: every matrix of the linears, A and B at their true ranks, keys and values."""
    from .random_base import adapter_bytes
    linears = [decoder.head, *(linear for layer in decoder.layers for linear in layer.linears)]
    facts, itemsize = decoder.facts, decoder.dtype.itemsize
    return {"weights": read.steps * sum(linear.weight.nbytes for linear in linears),
            "adapters": read.steps * sum(adapter_bytes(facts, rank, itemsize) for rank in read.ranks),
            "keys and values": 2 * facts.layers * facts.kv_out * itemsize * read.stored}


def _median(values: Sequence[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


def _ratio(values: Sequence[float], others: Sequence[float]) -> float | None:
    """Median over median."""
    return round(statistics.median(values) / statistics.median(others), 4) if values and others else None


def main() -> int:
    """The program; returns its exit code (see program.answer)."""
    return answer(run_step, exit_code)


def exit_code(error: Exception) -> int:
    from .random_base import WrongShape
    return WRONG_USAGE if isinstance(error, WrongShape) else bench_exit_code(error)


if __name__ == "__main__":
    set_spins()
    sys.exit(main())
