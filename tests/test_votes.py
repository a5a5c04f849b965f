"""Blind votes: what counts as the same pair, the interval, and a file that loses nothing."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import permutations
from pathlib import Path

import pytest
from fake_engine import adapter, model

from lora_bench.engine import protocol as p
from lora_bench.workbench.votes import VoteFile, side_of, tally_of, wilson

ADAPTERS = {"pirate": adapter("pirate", digest="aa"), "json": adapter("json", digest="bb"), "same": adapter("same", digest="aa")}
PIRATE, JSON, BASE = (p.AdapterUse("pirate", 0.75),), (p.AdapterUse("json", 0.3),), ()


def pair(first: p.Mix = PIRATE, second: p.Mix = BASE, **fields):
    return tally_of(model(**fields), (first, second), ADAPTERS)


def counts(tally) -> tuple[int, int, int, int]:
    return tally.first, tally.second, tally.tie, tally.bad


def test_votes_stay_and_are_seen_from_either_side(tmp_path: Path) -> None:
    for choice in ("first", "first", "second", "tie", "bad", "first"):
        _, problem = VoteFile(tmp_path / "deep" / "votes.jsonl").add(pair(), choice)
        assert not problem
    votes = VoteFile(tmp_path / "deep" / "votes.jsonl")
    assert counts(votes.counts(pair())[0]) == (3, 1, 1, 1)
    assert counts(votes.counts(pair(BASE, PIRATE))[0]) == (1, 3, 1, 1)
    votes.add(pair(BASE, PIRATE), "first")
    assert counts(votes.counts(pair())[0]) == (3, 2, 1, 1)
    assert counts(votes.counts(pair(PIRATE, JSON))[0]) == (0, 0, 0, 0)


def test_a_pair_is_its_content_not_its_names(tmp_path: Path) -> None:
    votes = VoteFile(tmp_path / "votes.jsonl")
    votes.add(pair(), "first")
    renamed = tally_of(model(), ((p.AdapterUse("same", 0.75),), ()), ADAPTERS)
    assert counts(votes.counts(renamed)[0]) == (1, 0, 0, 0)
    other = {"pirate": adapter("pirate", digest="cc")}
    for different in (pair((p.AdapterUse("pirate", 0.7),)), tally_of(model(), (PIRATE, BASE), other), pair(parameters=7),
                      tally_of(model(), (PIRATE, BASE), {"pirate": adapter("pirate", digest="aa", invocation_tokens=(5,))})):
        assert counts(votes.counts(different)[0]) == (0, 0, 0, 0)
    both = (*PIRATE, *JSON)
    assert len({side_of(mix, ADAPTERS) for mix in permutations(both)}) == 1
    dora = {**ADAPTERS, "json": adapter("json", digest="bb", dora=True)}
    assert len({side_of(mix, dora) for mix in permutations(both)}) == 2
    assert side_of((*PIRATE, p.AdapterUse("json", 0.0)), ADAPTERS) == side_of(PIRATE, ADAPTERS)


@pytest.mark.parametrize("damage", [b"\xff\xfe\x00garbage", b"{", b'{"model": 3}', b"[]", b"null", b'{"a":' * 2000],
                         ids=["bytes", "cut", "types", "list", "null", "deep"])
def test_a_damaged_file_is_said_kept_aside_and_its_good_lines_go_on(tmp_path: Path, damage: bytes) -> None:
    file = tmp_path / "votes.jsonl"
    votes = VoteFile(file)
    votes.add(pair(), "first")
    votes.add(pair(PIRATE, JSON), "tie")
    for number in ("", "-2"):
        before = file.read_bytes() + damage + b"\n"
        file.write_bytes(before)
        known, problem = votes.counts(pair())
        assert known.first and "damaged" in problem and "line 3" in problem
        voted, said = votes.add(pair(), "second")
        assert voted.second and f"votes.jsonl.damaged{number}" in said
        assert (tmp_path / f"votes.jsonl.damaged{number}").read_bytes() == before
        kept, problem = votes.counts(pair(PIRATE, JSON))
        assert kept.tie == 1 and not problem


def test_counts_that_cannot_be_are_damage(tmp_path: Path) -> None:
    file = tmp_path / "votes.jsonl"
    VoteFile(file).add(pair(), "first")
    good = file.read_bytes()
    for bad in (good.replace(b'"tie":0', b'"tie":-1'), good + good, good.replace(b'"bad":0', b'"bad":1e99'), b"x" * (17 << 20)):
        assert bad != good
        file.write_bytes(bad)
        assert "damaged" in VoteFile(file).counts(pair())[1]


def test_names_that_no_terminal_or_file_holds_are_kept_cleaned(tmp_path: Path) -> None:
    evil = "a\x1b]2;x\ud800[/x]\n"
    hostile = tally_of(model(name=evil), ((p.AdapterUse(evil, 1.0),), ()), {evil: adapter(evil, digest="dd")})
    assert VoteFile(tmp_path / "votes.jsonl").add(hostile, "tie")[1] == ""
    assert VoteFile(tmp_path / "votes.jsonl").counts(hostile)[0].tie == 1


def test_a_file_that_cannot_be_written_or_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    _, said = VoteFile(tmp_path / "file" / "votes.jsonl").add(pair(), "first")
    assert "was not kept" in said
    (tmp_path / "votes.jsonl").mkdir()
    assert "cannot be read" in VoteFile(tmp_path / "votes.jsonl").counts(pair())[1]
    voted, said = VoteFile(tmp_path / "votes.jsonl").add(pair(), "bad")
    assert voted.bad == 1 and "was not kept" in said


VOTER = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_votes import pair
from lora_bench.workbench.votes import VoteFile
votes = VoteFile(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    voted, said = votes.add(pair(), "first")
    assert not said, said
    print(voted.first, flush=True)
"""


def voter(file: Path, votes: int) -> subprocess.Popen:
    program = VOTER.format(tests=str(Path(__file__).parent))
    return subprocess.Popen([sys.executable, "-c", program, str(file), str(votes)], stdout=subprocess.PIPE, text=True)


def test_a_kill_at_any_time_loses_no_vote_that_was_kept(tmp_path: Path) -> None:
    file = tmp_path / "votes.jsonl"
    process = voter(file, 100_000)
    first = process.stdout.readline()
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    told = [int(line) for line in (first + process.communicate()[0]).splitlines()]
    tally, problem = VoteFile(file).counts(pair())
    assert not problem and told[-1] <= tally.first <= told[-1] + 1


def test_two_benches_that_vote_at_once_lose_no_vote(tmp_path: Path) -> None:
    processes = [voter(tmp_path / "votes.jsonl", 30) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0] and [process.stdout.close() for process in processes]
    assert VoteFile(tmp_path / "votes.jsonl").counts(pair())[0].first == 60


@pytest.mark.parametrize(("wins", "votes", "low", "high"), [(0, 0, 0.0, 1.0), (7, 10, 0.3968, 0.8922), (0, 10, 0.0, 0.2775),
                                                           (10, 10, 0.7225, 1.0), (1, 2, 0.0945, 0.9055), (81, 263, 0.2553, 0.3662)])
def test_wilsons_interval(wins: int, votes: int, low: float, high: float) -> None:
    assert wilson(wins, votes) == pytest.approx((low, high), abs=5e-4)
