"""The terminal cases of a bank: the real workbench in a pseudo-terminal, step by step as each case.json says, and judged.

`python tests/case_terminal.py BANK [--only REGEX] [--out FILE]`, or `make cases-terminal CASES=folder`. Exits with 1 when a case fails.
What the product calls otherwise is acted as what a person would do here: an alias is the name of an adapter's folder, a note is an
invocation, a search is the palette's. The bank's scripted base speaks a script after its `<|go:NAME|>`; in the copy that is opened the
chat template writes it for the message NAME.
"""
from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
from case_files import SCRIPTS, big_base, named_adapter, scripted_base
from terminal import BENCH, Terminal

Step = dict[str, Any]
KEYS = {"Enter": "\r", "Tab": "\t", "Escape": "\x1b", "C-c": "\x03", "C-z": "\x1a", "C-u": "\x15"}
MASHED = [*"abcdefghijklmnopqrstuvwxyz /[]0123456789=-+", *(chr(code) for code in range(1, 27) if chr(code) not in "\x11\x1a"),
          *(f"\x1b[{letter}" for letter in "ABCDHFZ"), *(f"\x1bO{letter}" for letter in "PQRS"), "\x1b", "\x7f", "\x1b[3~", "\x1b[5~",
          "\x1b[6~", "\x1b[20~", "\x1b[1;2C", "\x1b[1;5D", "\x1f"]
"""every key but Ctrl+Q, which leaves, and Ctrl+Z, which has a case of its own"""
IDLE = "engine idle"
BACKSPACE = "\x7f"


class CaseFailed(Exception):
    """What was expected did not come; the text says what."""


class Session:
    """One case: the program in its terminal, and what a person does there."""

    def __init__(self, case: Step, base: Path, home: Path) -> None:
        self.case, self.home, self.base = case, home, base
        words = case["terminal"]
        arguments = [str(base), *(["--device", "cpu"] if "--cpu" in words["argv"] else [])]
        switched = any(step["do"] == "soak" for step in case["action"])
        self.named = named_adapter(home, "switched" if switched else self._typed()) if switched or "markup" in case["id"] else None
        if self.named:
            arguments += ["--lora", str(self.named)]
        self.environment = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CONFIG", "STATE", "DATA")} | words["env"]
        self.size = {"columns": words["cols"], "rows": words["rows"]}
        self.arguments = arguments
        self.plain = any(step["do"] == "run_plain" for step in case["action"])
        self.in_shell = any(step["do"] == "shell" for step in case["action"])
        self.exit_code: int | None = None
        self.asked = ""
        if not self.plain:
            self.terminal = self._open()

    def _open(self) -> Terminal:
        if not self.in_shell:
            return Terminal(*self.arguments, **self.size, **self.environment)
        terminal = Terminal(command=("bash", "--norc", "-i"), PS1="SHELL$ ", **self.size, **self.environment)
        terminal.wait_for("SHELL$")
        terminal.type(shlex.join([*BENCH, *self.arguments]) + "\r")
        terminal.wait_for(IDLE)
        return terminal

    def _typed(self) -> str:
        return next(step["text"] for step in self.case["action"] if step["do"] == "rename_adapter_alias")

    @property
    def program(self) -> psutil.Process:
        own = psutil.Process(self.terminal.pid)
        return next(child for child in own.children() if "lora_bench" in " ".join(child.cmdline())) if self.in_shell else own

    @property
    def alive(self) -> bool:
        self.terminal.pump(0.05)
        return self.terminal.exit_code is None and self.program.is_running() and self.program.status() != psutil.STATUS_ZOMBIE

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self.terminal.pump(min(left, 0.05)):
            pass

    # -- steps ------------------------------------------------------------------------------------
    def wait_screen(self, step: Step) -> None:
        """The screen is not empty and stands still; a clock or an age may tick in it."""
        self._still(step["stable_s"], step["timeout_s"])

    def _still(self, stable_s: float, timeout_s: float) -> float:
        """How long it took until nothing but numbers changed for `stable_s`."""
        began = quiet = time.monotonic()
        last = None
        while time.monotonic() - quiet < stable_s or not (last or "").strip():
            if time.monotonic() - began > timeout_s:
                raise CaseFailed(f"the screen does not come to rest within {timeout_s} s:\n{self.terminal.text}")
            if not self.terminal.pump(0.05):
                return time.monotonic() - began  # it refused, or ended; the end is judged later
            now = re.sub(r"[\d.]+|[▀-▟⠀-⣿]", "", self.terminal.text)
            if now != last:
                last, quiet = now, time.monotonic()
        return time.monotonic() - began - stable_s

    def keys(self, step: Step) -> None:
        for key in step["keys"]:
            self.terminal.type(KEYS.get(key, key))
            self.run(0.02)

    def resize(self, step: Step) -> None:
        self.terminal.resize(step["cols"], step["rows"])

    def resize_random(self, step: Step) -> None:
        draw = random.Random(step["seed"])
        for _ in range(step["n"]):
            self.terminal.resize(draw.randint(1, 240), draw.randint(1, 70))
            self.run(step["seconds"] / step["n"])

    def sleep(self, step: Step) -> None:
        self.run(step["s"])

    def paste(self, step: Step) -> None:
        made = step.get("generate")
        self.terminal.paste(step["text"] if made is None else (made["repeat"] * (made["bytes"] // len(made["repeat"]) + 1))[:made["bytes"]])

    def prompt(self, step: Step) -> None:
        """Ask for a script; the endless one with many tokens allowed. Where lines alone are printed there is nobody to ask."""
        if not self._waits_for(IDLE):
            return
        if step["script"] == "loop":
            self.terminal.type("/set max_tokens 1000000\r")
            self._await("max_tokens = ")
        replies = self.terminal.text.count("tok/s")
        self.asked = step["script"]
        self.terminal.type(self.asked + "\r")
        if step["wait"]:
            self._await(lambda text: text.count("tok/s") > min(replies, 1) and SCRIPTS[self.asked] in re.sub(r"\s", "", text))
        else:
            self._await(lambda text: "generating" in text or "ticktock" in re.sub(r"\s", "", text))

    def _waits_for(self, text: str) -> bool:
        try:
            self._await(text)
        except CaseFailed:
            if self.terminal.pump(0.1):
                raise
            self.exit_code = self.terminal.wait_end()
            return False
        return True

    def _await(self, true: str | Callable[[str], bool]) -> None:
        try:
            self.terminal.wait_for(true)
        except AssertionError as error:
            raise CaseFailed(str(error)) from error

    def signal(self, step: Step) -> None:
        self.family = [self.program, *self.program.children(recursive=True)]
        self.program.send_signal(getattr(signal, f"SIG{step['sig']}"))

    def wait_exit(self, step: Step) -> None:
        began = time.monotonic()
        self.exit_code = self.terminal.wait_end()
        if (took := time.monotonic() - began) > min(step["timeout_s"], self.case["expect"]["exit_within_s"]):
            raise CaseFailed(f"it took {took:.1f} s to end")

    def shell_check(self, _: Step) -> None:
        """The main screen, the cursor and the echo are back."""
        if self.in_shell:
            self._await(lambda _: self.terminal.raw.endswith(b"SHELL$ ") or b"SHELL$ " in self.terminal.raw[-200:])
        raw = self.terminal.raw
        if not raw.rfind(b"\x1b[?1049l") > raw.rfind(b"\x1b[?1049h") or not raw.rfind(b"\x1b[?25h") > raw.rfind(b"\x1b[?25l"):
            raise CaseFailed("the main screen or the cursor is not back")
        if self.in_shell and not self.terminal.raw.rfind(b"\x1b[?2004l") > 0:
            raise CaseFailed("pastes are still bracketed")
        if self.in_shell:
            self.terminal.type("echo A$((20+3))B\r")
            self._await("A23B")

    def shell(self, step: Step) -> None:
        self.terminal.type(step["cmd"] + "\r")
        self._await(lambda text: "Message…" in text or IDLE in text or "generating" in text)

    def run_plain(self, step: Step) -> None:
        ours, theirs = os.openpty()
        done = subprocess.run([*BENCH, *self.arguments], stdin=theirs, capture_output=True, timeout=self.case["expect"]["exit_within_s"],
                              env={**os.environ, **self.environment})
        os.close(ours)
        os.close(theirs)
        self.exit_code, self.output = done.returncode, (done.stdout + done.stderr).decode()

    def rename_adapter_alias(self, step: Step) -> None:
        """The adapter's name is its folder's already; its invocation is what is typed."""
        self._await("+1.00 G0")
        self.terminal.type("\tf")
        self._await("nvocation")
        self.terminal.paste(step["text"])
        self.terminal.type("\r")
        self.run(1.0)
        self.terminal.type("\x1b")
        self.run(0.5)

    def search(self, step: Step) -> None:
        self.terminal.type("\x10")
        self._await("earch")
        self.terminal.paste(step["text"])
        self._await(step["text"])
        self.terminal.type("\x1b")
        self.run(0.5)

    def fuzz_keys(self, step: Step) -> None:
        draw, end = random.Random(step["seed"]), time.monotonic() + step["seconds"]
        while time.monotonic() < end:
            self.terminal.type(draw.choice(MASHED))
            if not self.terminal.pump(draw.choice((0.0, 0.0, 0.01, 0.05))):
                code = self.terminal.wait_end()
                if code:
                    raise CaseFailed(f"it ended with {code}:\n{self.terminal.raw[-3000:].decode(errors='replace')}")
                print("    it was left by a key, and is opened again")
                self.terminal.close()
                self.terminal = self._open()

    def soak(self, step: Step) -> None:
        """Mixes and prompts for minutes: memory must not grow, and keys are drawn at once."""
        self._await(IDLE)
        end = time.monotonic() + step["minutes"] * 60
        lags: list[float] = []
        settled, turn, number = 0.0, 0, 0
        while time.monotonic() < end:
            number += 1
            if number % round(step["prompt_every_s"] / step["toggle_every_s"]) == 1:
                turn += 1
                self.terminal.type("\x0e" if turn % 8 == 0 else ("emoji" if turn % 2 else "wide") + "\r")
            self.terminal.type("\t m\x1b[Z")
            self.run(step["toggle_every_s"] / 2)
            lags.append(self._lag())
            self.run(step["toggle_every_s"] / 2)
            if not settled and number >= 20:
                settled = self._memory()
                print(f"    after {number} turns of the keys {self._each()}", flush=True)
        grown = self._memory() - settled
        lags.sort()
        p99 = lags[int(len(lags) * 0.99) - 1] * 1e3
        p50 = lags[len(lags) // 2] * 1e3
        print(f"    at the end {self._each()}: grew {grown:.1f} MB, {len(lags)} keys p50 {p50:.0f} ms, p99 {p99:.0f} ms")
        if grown > self.case["expect"]["rss_growth_mb_max"] or p99 > self.case["expect"]["ui_latency_p99_ms_max"]:
            raise CaseFailed(f"memory grew by {grown:.1f} MB; the 99th percentile of a key's lag is {p99:.0f} ms")

    def _lag(self) -> float:
        """From a key to its letter on the screen; the letter is taken back."""
        self._await("Send")
        began = time.monotonic()
        self.terminal.type("ß")
        self._await("ß")
        lag = time.monotonic() - began
        self.terminal.type(BACKSPACE)
        return lag

    def _each(self) -> str:
        """Memory of the screen, the engine and its children."""
        return " + ".join(f"{process.memory_info().rss / 1e6:.1f}" for process in (self.program, *self.program.children(recursive=True)))

    def _memory(self) -> float:
        return sum(process.memory_info().rss for process in (self.program, *self.program.children(recursive=True))) / 1e6

    def limit_memory_extra_mb(self, step: Step) -> None:
        self._await(IDLE)
        for process in self.program.children(recursive=True):
            most = process.memory_info().vms + (step["mb"] << 20)
            resource.prlimit(process.pid, resource.RLIMIT_AS, (most, most))

    def open_base(self, step: Step) -> None:
        big = big_base(self.home / "big", self.base, step["generate_big_base_mb"])
        self.terminal.type("\x0f")
        self._await("Open a base model")
        self.terminal.type(f"{big}\r")
        self._await(lambda text: "memory" in text.lower() and "✗" in text or "out of memory" in text.lower())

    # -- the end ----------------------------------------------------------------------------------
    def judge(self) -> None:
        expect = self.case["expect"]
        text = self.output if self.plain else self.terminal.text
        refused = any(word.lower() in text.lower() for word in expect.get("or_clear_refusal", ())) and self.exit_code not in (None, 0)
        checks: Iterable[tuple[str, bool]] = (
            ("process_alive_at_end", refused or not expect.get("process_alive_at_end") or self.alive),
            ("no_traceback_on_screen", "Traceback" not in text),
            ("exit_code_not", self.exit_code not in expect.get("exit_code_not", ())),
            ("message_mentions", all(any(word in text.lower() for word in words) for words in expect.get("message_mentions", ()))),
            ("no_escape_in_output", "\x1b" not in text or not expect.get("no_escape_in_output")),
            ("screen_contains_literally", not expect.get("screen_contains_literally") or self._typed() in text),
            ("reply_marked", expect.get("reply_marked", "") in text),
            ("session_saved", not expect.get("session_saved") or self._saved()),
            ("no_orphan_processes", not expect.get("no_orphan_processes") or self._all_ended()),
            ("exit code of the signal", not expect.get("terminal_restored") or self.exit_code == 128 + signal.SIGTERM),
        )
        for name, holds in checks:
            if not holds:
                raise CaseFailed(f"{name}; the exit code is {self.exit_code}; the screen:\n{text}")
        if "after" in expect:
            self.terminal.type("there")
            self._await("hithere")
        if expect.get("earlier_base_still_right"):
            self.terminal.type("\x1b")
            self.prompt({"script": "emoji", "wait": True})
        if "ready_again_within_s" in expect:
            began = time.monotonic()
            self.terminal.type("ready?")
            self._await("ready?")
            if time.monotonic() - began > expect["ready_again_within_s"]:
                raise CaseFailed(f"the paste held it for {time.monotonic() - began:.1f} s")

    def _all_ended(self) -> bool:
        """Of the program and its children; one that nobody has waited for yet has ended."""
        return all(process.status() == psutil.STATUS_ZOMBIE for process in psutil.wait_procs(self.family, timeout=1)[1])

    def _saved(self) -> bool:
        return any(self.asked in file.read_text() for file in self.home.rglob("*.jsonl"))

    def close(self) -> None:
        if not self.plain:
            for process in psutil.Process(self.terminal.pid).children(recursive=True) if self.in_shell else ():
                process.kill()
            self.terminal.close()


def run_case(folder: Path, bank: Path) -> str:
    """Why it failed; "" when it passed."""
    case = json.loads((folder / "case.json").read_text(encoding="utf-8"))
    home = Path(tempfile.mkdtemp(prefix="case-"))
    session = None
    try:
        session = Session(case, scripted_base(home / "base", bank / "_bases" / "sa-scripted"), home)
        for step in case["action"]:
            getattr(session, step["do"])(step)
        session.judge()
    except (CaseFailed, AssertionError) as failed:
        return str(failed)
    finally:
        if session:
            session.close()
        shutil.rmtree(home, ignore_errors=True)
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bank", type=Path)
    parser.add_argument("--only", default=".")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    folders = sorted(file.parent for file in given.bank.glob("*/case.json") if '"terminal"' in file.read_text(encoding="utf-8"))
    results = []
    for folder in folders:
        if re.search(given.only, folder.name):
            began = time.monotonic()
            why = run_case(folder, given.bank)
            took = round(time.monotonic() - began, 2)
            results.append({"id": folder.name, "verdict": "fail" if why else "pass", "why": why, "seconds": took})
            print(f"{results[-1]['verdict']} {folder.name} {took} s {why}", flush=True)
    failed = sum(result["verdict"] == "fail" for result in results)
    print(f"{len(results) - failed} passed, {failed} failed")
    if given.out:
        given.out.write_text(json.dumps(results, indent=0))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
