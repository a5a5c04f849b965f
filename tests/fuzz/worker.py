"""The process in which inputs are made and tried: python's exceptions, slow inputs and touched memory are seen here, the rest by run.py."""
from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import struct
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import lora_bench.engine

from .coverage import Coverage
from .target import Target, Wrong, fault_of_message, find_target
from .usage import forget_peak, limit_address_space, peak_mb, processor_seconds, rss_mb

CLOCK = struct.Struct("dq")
"""what `clock` in the work folder holds: the monotonic time when the input being tried began, 0 between two; how many were tried"""
ADDRESS_SPACE = 4 << 30
"""more than what the process has when it is ready; the bound of a target is far below"""
TELL_SECONDS = 1.0
PRODUCT = str(Path(lora_bench.engine.__path__[0]).parent)


@dataclass
class Counts:
    """What a worker has done; told about once a second as a line of JSON."""

    executions: int = 0
    accepted: int = 0
    refused: int = 0
    lines: int = 0
    corpus: int = 0
    rss_mb: float = 0.0
    ready_rss_mb: float = 0.0
    slowest: float = 0.0


@dataclass
class Worker:
    """Works on one target in `folder`; `coverage` may be shared by several, one after the other."""

    name: str
    folder: Path
    seed: int
    coverage: Coverage
    target: Target = field(init=False)
    random: Random = field(init=False)
    counts: Counts = field(default_factory=Counts)
    seen: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.target = find_target(self.name)
        self.random = Random(self.seed)
        inputs = self.folder / "inputs"
        inputs.mkdir(parents=True, exist_ok=True)
        self._inputs = inputs
        self._run = self.target.prepare(inputs)
        self._names = self.target.names(inputs)
        self._clock = _clock(self.folder / "clock")
        self._told = 0.0
        os.chdir(self.folder)

    def work(self, seconds: float, executions: int) -> None:
        """Try the corpus, then broken copies of it, until either bound is reached."""
        end = time.monotonic() + seconds
        corpus = self._corpus()
        self.counts.ready_rss_mb = rss_mb()
        limit_address_space(ADDRESS_SPACE)
        for data in list(corpus):
            self._step(data, corpus, keep=False)
        while time.monotonic() < end and self.counts.executions < executions:
            data, other = self._pick(corpus), self._pick(corpus)
            self._step(self.target.mutate(data, other, self.random), corpus, keep=True)
        self._tell(corpus)

    def _corpus(self) -> list[bytes]:
        """The seeds, and what earlier workers of this run kept."""
        kept = [path.read_bytes() for path in sorted((self.folder / "corpus").glob("*"))]
        (self.folder / "corpus").mkdir(exist_ok=True)
        return self.target.seeds() + kept

    def _pick(self, corpus: list[bytes]) -> bytes:
        """Newer entries more often: they are at the edge of what is known."""
        return corpus[int(len(corpus) * self.random.random() ** 0.7)]

    def _step(self, data: bytes, corpus: list[bytes], keep: bool) -> None:
        fault = self._try(data)
        if fault:
            self._report(fault, data)
        elif keep and self.coverage.found and len(data) < 1 << 20:
            corpus.append(data)
            (self.folder / "corpus" / hashlib.sha1(data).hexdigest()[:16]).write_bytes(data)
        if time.monotonic() - self._told > TELL_SECONDS:
            self._tell(corpus)

    def _try(self, data: bytes) -> str:
        """Run one input; what is wrong with what happened, "" when nothing is."""
        self.counts.executions += 1
        (self.folder / "current").write_bytes(data)
        self._accepted = False
        fault, seconds, megabytes = self._measured(data)
        self.counts.accepted += self._accepted
        self.counts.refused += not self._accepted
        self.counts.slowest = max(self.counts.slowest, seconds)
        if not fault and megabytes > self.target.megabytes + 8 * len(data) / 1e6:
            fault = f"memory: {megabytes:.0f} MB more than before"
        if not fault and seconds > self.target.seconds:
            again = min(seconds, *(self._measured(data)[1] for _ in range(2)))
            fault = f"slow: {again:.1f} s" if again > self.target.seconds else ""
        if not fault and os.path.lexists("CANARY"):
            os.remove("CANARY")
            fault = "code of the input ran"
        return fault

    def _measured(self, data: bytes) -> tuple[str, float, float]:
        """The fault of the outcome, seconds of processor time, megabytes touched beyond what was held before."""
        forget_peak()
        before, peak = rss_mb(), peak_mb()
        began = processor_seconds()
        CLOCK.pack_into(self._clock, 0, time.monotonic(), self.counts.executions)
        try:
            with self.coverage:
                self._run(data)
            self._accepted = True
            fault = ""
        except self.target.documented as error:
            fault = fault_of_message(str(error), self._inputs, self._names)
            fault = f"{fault}: {str(error)[:300]!r}" if fault else ""
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            fault = f"{type(error).__name__}: {str(error)[:300]!r} {_where(error)}"
        CLOCK.pack_into(self._clock, 0, 0.0, self.counts.executions)
        after = peak_mb()
        return fault, processor_seconds() - began, after - before if after > peak else 0.0

    def _report(self, fault: str, data: bytes) -> None:
        kind = _kind(fault)
        first = kind not in self.seen
        self.seen.add(kind)
        name = ""
        if first:
            data = self._smaller(data, fault)
            name = hashlib.sha1(data).hexdigest()[:12]
            (self.folder / "findings").mkdir(exist_ok=True)
            (self.folder / "findings" / name).write_bytes(data)
        print(json.dumps({"target": self.name, "finding": kind, "fault": fault, "file": name, "seed": self.seed,
                          "execution": self.counts.executions}), flush=True)

    def _smaller(self, data: bytes, fault: str) -> bytes:
        """A shorter input with the same exception at the same place, as far as a few seconds go."""
        where = fault.rpartition("(")[2]
        if fault.startswith(("slow", "memory", "message", "code")):
            return data
        end, size = time.monotonic() + 4, len(data) // 2
        while size >= 1:
            place = 0
            while place < len(data):
                if time.monotonic() > end:
                    return data
                shorter = data[:place] + data[place + size:]
                if self._measured(shorter)[0].rpartition("(")[2] == where:
                    data = shorter
                else:
                    place += size
            size //= 2
        return data

    def _tell(self, corpus: list[bytes]) -> None:
        self._told = time.monotonic()
        self.counts.lines, self.counts.corpus, self.counts.rss_mb = self.coverage.lines, len(corpus), rss_mb()
        print(json.dumps({"target": self.name, "counts": asdict(self.counts)}), flush=True)


def _kind(fault: str) -> str:
    """What findings of one cause share: numbers and quoted text apart; of an exception its type and its place."""
    if fault.startswith(("slow", "memory", "message")):
        return re.sub(r"\d+(\.\d+)?|'[^']*'|\"[^\"]*\"", "N", fault)[:160]
    return re.sub(r": .* (?=\()", " ", fault)


def _where(error: BaseException) -> str:
    """(file:function) of the innermost frame in the product, else of the innermost one."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, Wrong) and error.__cause__ is not None:
        frames = traceback.extract_tb(error.__cause__.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(PRODUCT) and "/tests/" not in frame.filename] or frames
    return f"({Path(own[-1].filename).name}:{own[-1].name})" if own else "()"


def _clock(path: Path) -> mmap.mmap:
    if not path.exists():  # who watches this process made it, and reads it at any moment
        path.write_bytes(bytes(CLOCK.size))
    with path.open("r+b") as stream:
        return mmap.mmap(stream.fileno(), CLOCK.size)


def main(names: str, out: str, seed: str, seconds: str, executions: str) -> None:
    """The targets of the comma-separated `names`, one after the other, each in a folder of its name."""
    import torch

    torch.set_num_threads(1)
    coverage = Coverage(Path(PRODUCT))
    for name in names.split(","):
        Worker(name, Path(out) / name, int(seed), coverage).work(float(seconds), int(executions))


def replay(name: str, folder: Path, data: bytes) -> str:
    """Try one input here; its fault, or what happened."""
    worker = Worker(name, folder, 0, Coverage(Path(PRODUCT)))
    fault = worker._try(data)
    return fault or ("accepted" if worker.counts.accepted else "refused, with a good message")


if __name__ == "__main__":
    main(*sys.argv[1:])
