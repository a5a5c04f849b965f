"""`python tests/fuzz [TARGET ...]`: break files and give them to the real entry points, each target in processes of its own.

A finding is an exception that is not documented, a message that does not help, an input that takes too long, hangs, ends the process,
touches memory out of proportion to its size, or makes something accepted that then fails. OUT/TARGET/findings holds the inputs,
OUT/summary.json the figures. `--replay FILE` tries one input again. The same seed gives the same inputs as long as no process was ended.
"""
from __future__ import annotations

import argparse
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .target import target_names
from .worker import CLOCK, replay

HANG_SECONDS = 60.0
"""then the process is ended, whatever the input; by the clock on the wall, so that waiting counts"""
MAX_ENDS = 25
"""processes that inputs may end before a target is given up"""
_SUMS = ("executions", "accepted", "refused")
_PEAKS = ("lines", "corpus", "rss_mb", "ready_rss_mb", "slowest")


def fuzz(name: str, seconds: float, seed: int, out: Path, executions: int = 1 << 60) -> dict[str, Any]:
    """Work on one target; its figures. `out/name` is emptied first."""
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    total: dict[str, Any] = dict.fromkeys((*_SUMS, *_PEAKS), 0) | {"seconds": 0.0, "ended": 0, "findings": {}}
    began = time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0 and total["executions"] < executions and total["ended"] <= MAX_ENDS:
        counts, end = _Process(name, folder, seed + total["ended"], left, executions - total["executions"], total["findings"]).watch()
        total |= {key: total[key] + counts.get(key, 0) for key in _SUMS}
        total |= {key: round(max(total[key], counts.get(key, 0)), 2) for key in _PEAKS}
        if not end:
            break
        total["ended"] += 1
        _add(total["findings"], {"finding": end, "fault": end, "file": _keep_current(folder), "seed": seed,
                                 "execution": counts.get("executions", 0)})
    return total | {"seconds": round(time.monotonic() - began, 1)}


def worker_command(names: list[str], out: Path, seed: int, seconds: float, executions: int) -> list[str]:
    return [sys.executable, "-m", "fuzz.worker", ",".join(names), str(out.resolve()), str(seed), str(seconds), str(executions)]


def worker_environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0"}


class _Process:
    """A worker under watch."""

    def __init__(self, name: str, folder: Path, seed: int, seconds: float, executions: int, findings: dict[str, Any]) -> None:
        self._folder, self._findings, self._counts, self._began = folder, findings, {}, 0.0
        (folder / "clock").write_bytes(bytes(CLOCK.size))
        self._log = (folder / "stderr").open("ab")
        self._process = subprocess.Popen(
            worker_command([name], folder.parent, seed, seconds, executions),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._log, env=worker_environment(), start_new_session=True)

    def watch(self) -> tuple[dict[str, float], str]:
        """The worker's last counts, and how an input ended it ("" when it ended by itself)."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._process.stdout, selectors.EVENT_READ)
                while not self._hangs():
                    if not selector.select(0.2):
                        continue
                    line = self._process.stdout.readline()
                    if not line:
                        return self._counts, self._death()
                    self._take(json.loads(line))
            return self._counts, f"hang: more than {HANG_SECONDS:g} s"
        finally:
            _kill(self._process)
            self._log.close()

    def _take(self, told: dict[str, Any]) -> None:
        if "counts" in told:
            self._counts = told["counts"]
        else:
            _add(self._findings, told)

    def _hangs(self) -> bool:
        """The same input for too long, seen twice: one reading may be of a number half written."""
        before = self._began
        self._look()
        return self._began == before != 0 and time.monotonic() - before > HANG_SECONDS

    def _look(self) -> None:
        self._began, self._counts["executions"] = CLOCK.unpack((self._folder / "clock").read_bytes())

    def _death(self) -> str:
        code = self._process.wait()
        self._look()
        if code == 0:
            return ""
        if not (self._folder / "current").exists():
            tail = (self._folder / "stderr").read_text(encoding="utf-8", errors="replace")[-2000:]
            raise SystemExit(f"the worker of {self._folder.name} could not start:\n{tail}")
        return f"crash: {signal.Signals(-code).name}" if code < 0 else f"crash: exit code {code}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The worker and what it started in its own session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    process.stdout.close()


def _keep_current(folder: Path) -> str:
    (folder / "findings").mkdir(exist_ok=True)
    name = f"ended-{len(list((folder / 'findings').iterdir()))}"
    shutil.copyfile(folder / "current", folder / "findings" / name)
    return name


def _add(findings: dict[str, Any], told: dict[str, Any]) -> None:
    """By kind: the first of each, and how many there were."""
    known = findings.setdefault(told["finding"], {key: told[key] for key in ("fault", "file", "seed", "execution")} | {"count": 0})
    known["count"] += 1


def main() -> int:
    """Exit code 1 when there are findings."""
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"all of them when none is named: {', '.join(target_names())}")
    parser.add_argument("--seconds", type=float, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets worked on at once")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"))
    parser.add_argument("--replay", type=Path, help="try this input with the one target named")
    arguments = parser.parse_args()
    if unknown := set(arguments.targets) - set(target_names()):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(target_names())}")
    if arguments.replay:
        data = arguments.replay.read_bytes()
        with tempfile.TemporaryDirectory() as folder:
            print(replay(arguments.targets[0], Path(folder), data))
        return 0
    return _all(arguments.targets or target_names(), arguments)


def _all(names: list[str], arguments: argparse.Namespace) -> int:
    def one(name: str) -> tuple[str, dict[str, Any]]:
        figures = fuzz(name, arguments.seconds, arguments.seed, arguments.out)
        print(f"{name}: {figures['executions']:,} inputs in {figures['seconds']:.0f} s, {figures['accepted']:,} accepted, "
              f"{figures['lines']} lines, {len(figures['findings'])} kinds of findings", flush=True)
        for kind, finding in figures["findings"].items():
            print(f"  {finding['count']} x {kind}  -> {arguments.out / name / 'findings' / finding['file']}", flush=True)
        return name, figures

    with ThreadPoolExecutor(arguments.jobs) as pool:
        summary = dict(pool.map(one, names))
    (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return int(any(figures["findings"] for figures in summary.values()))
