"""Random lives of requests in the KV memory, against a naive model that searches everything that was ever kept (model_kv.py)."""
from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from model_kv import BLOCK, Kept, KeptContents, Mixed, Model, Truth, Truths
from properties import check

from lora_bench.engine.blocks import blocks_for
from lora_bench.engine.kv_memory import KvMemory
from lora_bench.engine.protocol import CacheCleared, Event, KvEvicted
from lora_bench.engine.stretches import Acting, Stretch

MOST = 4
"""requests at once"""
WHO = st.integers(0, MOST - 1)
STEMS = {"zeros": [0] * 70, "pairs": [0, 1] * 35}
NAMES = ("a", "b", "c")
MIXES = ((), (), (("a", 1.0),), (("a", 1.0),), (("a", 0.5),), (("b", 1.0),), (("c", 1.0),),
         (("a", 1.0), ("b", 1.0)), (("b", 1.0), ("a", 1.0)))
"""what may act at once, by name and scale; the order counts, for DoRA"""
REASONS = ("the person asked", "adapter a was unloaded")
Chosen = tuple[tuple[str, float], ...]
MIX = st.sampled_from(MIXES)
ready = precondition(lambda self: hasattr(self, "memory"))
some_run = precondition(lambda self: self.models)


@dataclass
class InSlot:
    """A request as llama-server's rule has it in its slot."""

    user: int
    model: Model
    stretches: tuple[Stretch, ...]
    """when it computed last"""
    stored: int = 0
    """when it ended"""


class KvMachine(RuleBasedStateMachine):
    """Up to four requests at once in a memory of a few blocks, whose cells hold what they were truly computed from."""

    @initialize(blocks=st.integers(2, 14))
    def open(self, blocks: int) -> None:
        self.now, self.number = 0.0, 0
        self.events: list[Event] = []
        self.cells: list[list[Truth]] = [[-1] * BLOCK for _ in range(blocks)]
        self.memory = KvMemory(blocks, self._copy, self.events.append, lambda: self.now)
        self.truths, self.contents = Truths(), KeptContents()
        self.models: dict[int, Model] = {}
        self.past: list[Model] = []
        self.tables: dict[int, list[int]] = {}
        self.last_held: dict[int, float] = {}
        self.digests = {"a": "aa11", "b": "bb11", "c": "aa11"}  # c has the content of a
        self.counts: Counter[str] = Counter()
        self.idle: dict[int, Counter[str]] = {}
        """what was counted for requests that have not computed anything: it is taken back when they end so"""
        self.slot: list[InSlot] = []
        """the last request that computed something, then those that have begun since"""

    # -- what requests do ----------------------------------------------------------------------------
    @rule(stem=st.sampled_from([*STEMS]), cut=st.sampled_from([1, 15, 16, 17, 33, 48, 60]), rest=st.lists(st.integers(0, 2), max_size=3),
          first=MIX, later=MIX, start=st.sampled_from([0, 0, 0, 5, 16, 20, 33]), root=st.sampled_from([b"", b"", b"", b"long"]))
    def begin(self, stem: str, cut: int, rest: list[int], first: Chosen, later: Chosen, start: int, root: bytes) -> None:
        stretches = (Stretch(0, self._acting(first)), Stretch(start, self._acting(later))) if start else (Stretch(0, self._acting(later)),)
        if len(self.models) < MOST:
            self._begin(Model(STEMS[stem][:cut] + rest, stretches, root))

    @rule(turn=st.integers(0, 5), more=st.lists(st.integers(0, 2), max_size=20), mix=st.none() | MIX)
    def begin_next_turn(self, turn: int, more: list[int], mix: Chosen | None) -> None:
        """What a request had, and more, under the same mixes or under another one from its first token on."""
        if self.past and len(self.models) < MOST:
            model = self.past[turn % len(self.past)]
            self._begin(Model(model.ids + more, model.stretches if mix is None else (Stretch(0, self._acting(mix)),), model.root))

    @rule(stem=st.sampled_from([*STEMS]), cut=st.integers(0, 60), more=st.lists(st.integers(0, 2), min_size=1, max_size=20), mix=MIX)
    def serve(self, stem: str, cut: int, more: list[int], mix: Chosen) -> None:
        """A request from its beginning to its end, without a pause."""
        if len(self.models) < MOST:
            self._begin(Model(STEMS[stem][:cut] + more, (Stretch(0, self._acting(mix)),)))
            self.compute(len(self.models) - 1, 100)
            self.end(len(self.models) - 1, True)

    def _begin(self, model: Model) -> None:
        self.number += 1
        user, ids, stretches, root = self.number, model.ids, model.stretches, model.root
        self.models[user], self.idle[user] = model, Counter()
        truths, limit = self._truths(user), len(ids) - 1
        whole, part = self.contents.expected(truths)
        wrong = self.contents.wrong_by_name(model, truths, whole)
        cleared = self._cleared(model)
        self.slot.append(InSlot(user, model, stretches))
        use = self.memory.begin(user, ids, stretches, root)
        assert self.contents.explains(use, model, truths), f"the reasons are not true: {use}"
        self._look(user)
        assert use.prompt_tokens == len(ids) and use.hit_blocks == whole and use.hit_tokens == self.memory.stored(user) <= limit
        full = self.memory.free <= 1 and not use.copied_tokens  # one is what it would be copied from
        assert use.hit_tokens == whole * BLOCK + part or full, f"{whole} blocks and {part} tokens are there: {use}, {self.memory.free} free"
        assert use.copied_tokens == use.hit_tokens - whole * BLOCK
        assert use.name_keyed_wrong == wrong, f"{use}, {wrong}"
        assert use.base_tokens == sum(not acting for acting in model.acting()[:use.hit_tokens])
        assert 0 <= use.llama_cpp_tokens <= limit and use.llama_cpp_cleared == cleared
        self._count(user, looked_up_tokens=limit, hit_tokens=use.hit_tokens, copied_tokens=use.copied_tokens, name_keyed_wrong=wrong,
                    llama_cpp_tokens=use.llama_cpp_tokens, llama_cpp_cleared=cleared)

    @some_run
    @rule(who=WHO, tokens=st.sampled_from([1, 7, 16, 30, 100, 100, 100]))
    def compute(self, who: int, tokens: int) -> None:
        """Some of what is not computed yet, as a step would."""
        user = self._user(who)
        model, stored, free, had = self.models[user], self.memory.stored(user), self.memory.free, self.tables[user]
        end = min(stored + tokens, len(model.ids))
        need = max(blocks_for(end) - len(had), 0)
        assert self.memory.reserve(user, end) == (need <= free), "blocks were refused that are free, or promised that are not"
        self._look(user)
        if need > free:
            assert self.tables[user] == had and self.memory.free == free
            return
        assert self.tables[user][:len(had)] == had and len(self.tables[user]) == max(len(had), blocks_for(end))
        truths = self._truths(user)
        for at in range(stored, end):
            block = self.tables[user][at // BLOCK]
            assert [other for other, table in self.tables.items() if block in table] == [user], "two requests write one block"
            assert self.contents.of_block(block) is None, "what can be found is written over"
            self.cells[block][at % BLOCK] = truths[at]
        self.memory.commit(user, model.ids, model.stretches, end)
        assert self.memory.stored(user) == end
        self.idle.pop(user, None)
        places = [at for at, last in enumerate(self.slot) if last.user == user]
        if places:
            self.slot[:places[0] + 1] = [InSlot(user, model, model.stretches)]
        for at in range(stored // BLOCK, end // BLOCK):
            self.contents.add(model, truths, (at + 1) * BLOCK, self.tables[user][at], user)

    @some_run
    @rule(who=WHO, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=18))
    def draw_tokens(self, who: int, tokens: list[int]) -> None:
        if len(self.models[self._user(who)].ids) < 150:
            self.models[self._user(who)].ids += tokens

    @some_run
    @rule(who=WHO, mix=MIX)
    def splice(self, who: int, mix: Chosen) -> None:
        """Another mix from the next token on."""
        self._change_mix(self._user(who), mix)

    @some_run
    @rule(who=WHO)
    def extend(self, who: int) -> None:
        user = self._user(who)
        model, before = self.models[user], self.memory.stored(user)
        whole, part = self.contents.expected(self._truths(user), before // BLOCK)
        gained = self.memory.extend(user, model.ids, model.stretches)
        self._look(user)
        stored, found = self.memory.stored(user), whole * BLOCK + part
        assert gained == stored - before
        assert stored == max(before, found) or (self.memory.free <= 1 and stored == max(before, whole * BLOCK))
        self._count(user, hit_tokens=gained, copied_tokens=stored - max(before, whole * BLOCK))

    @some_run
    @rule(who=WHO, share=st.floats(0, 1), mix=st.none() | MIX)
    def rewind(self, who: int, share: float, mix: Chosen | None) -> None:
        """Back to some token; another mix may act from there on then."""
        user = self._user(who)
        before, table = self.memory.stored(user), self.tables[user]
        to = round(share * before)
        self.memory.rewind(user, to)
        last = self.contents.of_block(table[to // BLOCK]) if to % BLOCK else None
        if last is not None and table[to // BLOCK] in self.memory.table_of(user).blocks:
            assert self.memory.free == 0, "what can be found is written over though there is room"
            last.go("evicted", f"for request {user}")
        self._look(user)
        assert self.memory.stored(user) == to or (self.memory.free == 0 and self.memory.stored(user) == to // BLOCK * BLOCK)
        if mix is not None:
            self._change_mix(user, mix)

    @some_run
    @rule(who=WHO, keep=st.sampled_from([True, True, True, False]))
    def end(self, who: int, keep: bool) -> None:
        user = self._user(who)
        stored, table, truths = self.memory.stored(user), self.tables.pop(user), self._truths(user)
        if keep and stored % BLOCK:
            self.contents.add(self.models[user], truths, stored, table[stored // BLOCK], user)
        self.memory.end(user, keep)
        self.slot = [last for last in self.slot if last.user != user or user not in self.idle]
        for last in self.slot:
            last.stored = stored if last.user == user else last.stored
        self.counts.subtract(self.idle.pop(user, {}))
        self.past = [self.models.pop(user), *self.past[:5]]
        if not keep:
            for kept in self.contents.present:
                if kept.user == user and kept.block in set(table) - self._held():
                    kept.go("dropped")
        self._look(None)

    # -- what the engine does ------------------------------------------------------------------------
    @rule(what=st.sampled_from(["wait", "wait", "wait", "reload", "reload", "clear"]), data=st.data())
    def other(self, what: str, data: st.DataObject) -> None:
        if what == "wait":
            self.now += data.draw(st.sampled_from([1.0, 30.0, 500.0]))
        elif what == "reload":  # running requests go on as they are
            name = data.draw(st.sampled_from(NAMES))
            self.digests[name] = data.draw(st.sampled_from([name * 2 + "11", name * 2 + "22"]))
        else:
            self._clear(data.draw(st.sampled_from(REASONS)), data.draw(st.none() | st.sampled_from(["aa11", "bb11", "cc22"])))

    def _clear(self, because: str, digest: str | None) -> None:
        held = self._held()
        wanted = [kept for kept in self.contents.present if kept.block not in held
                  and (digest is None or any(use.digest == digest for acting in kept.acting for use in acting))]
        assert self.memory.clear(because, None if digest is None else {digest}) == len(wanted)
        for kept in wanted:
            kept.go("cleared", because)
        self._look(None, cleared=len(wanted))

    # -- what must hold ------------------------------------------------------------------------------
    @ready
    @invariant()
    def every_cell_is_what_its_request_would_compute(self) -> None:
        for user, table in self.tables.items():
            stored = self.memory.stored(user)
            assert [self.cells[table[at // BLOCK]][at % BLOCK] for at in range(stored)] == self._truths(user)[:stored]

    @ready
    @invariant()
    def what_can_be_found_is_what_its_key_says(self) -> None:
        for kept in self.contents.present:
            assert tuple(self.cells[kept.block][:len(kept.chain)]) == kept.chain
        assert len({kept.block for kept in self.contents.present}) == len(self.contents.present)

    @ready
    @invariant()
    def blocks_are_counted_right(self) -> None:
        memory, holders = self.memory, Counter(block for table in self.tables.values() for block in table)
        for user, table in self.tables.items():
            stored = memory.stored(user)
            assert len(set(table)) == len(table) >= blocks_for(stored)
            assert all((at + 1) * BLOCK <= stored for at, block in enumerate(table) if holders[block] > 1), "a block is shared unfinished"
        unheld = {kept.block for kept in self.contents.present} - set(holders)
        view = memory.view([(user, ()) for user in self.models])
        assert memory.free == memory.blocks - len(holders) and view.blocks == memory.blocks
        assert (view.held, view.cached) == (len(holders), len(unheld))
        ends = [run.first + run.count for run in view.runs]
        assert [run.first for run in view.runs] == [0, *ends[:-1]] and ends[-1] == memory.blocks
        for run in view.runs:
            for block in range(run.first, run.first + run.count):
                assert set(run.requests) == {user for user, table in self.tables.items() if block in table}
                assert (run.mix >= 0) == (block in holders or block in unheld)
        assert {(owner.request_id, owner.blocks, owner.tokens, owner.shared) for owner in view.owners} == {
            (user, len(table), memory.stored(user), sum(holders[block] > 1 for block in table)) for user, table in self.tables.items()}
        told = {name: getattr(view.counters, name) for name in view.counters.__struct_fields__}
        assert told == {name: self.counts[name] for name in told}

    @ready
    @invariant()
    def equal_next_keys_mean_equal_blocks(self) -> None:
        by_key: dict[bytes | None, set[Truth | None]] = defaultdict(set)
        for user, model in self.models.items():
            end = self.memory.stored(user) // BLOCK * BLOCK + BLOCK
            key = self.memory.next_key(user, model.ids, model.stretches)
            by_key[key].add(self._truths(user)[end - 1] if end <= len(model.ids) else None)
        assert all(len(truths) == 1 for truths in by_key.values()) and by_key.get(None, {None}) == {None}
        assert len(set().union(*by_key.values())) == len(by_key), "one block has two keys"

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        while self.models:
            self.end(0, True)
        self.blocks_are_counted_right()
        self.memory.clear("the test is over")
        view = self.memory.view([])
        assert self.memory.free == self.memory.blocks and view.cached == view.held == 0 and [run.mix for run in view.runs] == [-1]

    # -- inside --------------------------------------------------------------------------------------
    def _user(self, who: int) -> int:
        return list(self.models)[who % len(self.models)]

    def _truths(self, user: int) -> list[Truth]:
        model = self.models[user]
        return self.truths.all(model.ids, model.stretches, model.root)

    def _held(self) -> set[int]:
        return {block for table in self.tables.values() for block in table}

    def _copy(self, source: int, target: int, cells: int) -> None:
        self.cells[target][:cells] = self.cells[source][:cells]
        self.last_held[source] = self.now

    def _count(self, user: int, **counts: int) -> None:
        self.counts.update(counts)
        if user in self.idle:
            self.idle[user].update(counts)

    def _cleared(self, model: Model) -> int:
        """Blocks of the request in the one slot that are not lost here, when it is cleared for `model`."""
        if not self.slot:
            return 0
        last = self.slot[-1]
        was, now = Model(last.model.ids, last.stretches, last.model.root), Model(model.ids, model.stretches)
        if was.last_mix() == now.last_mix() or (now.is_late() and (was.is_late() or not was.last_mix())):
            return 0
        truths = self.truths.all(was.ids, was.stretches, was.root)
        stored = self.memory.stored(last.user) if last.user in self.models else last.stored
        there = {kept.truths for kept in self.contents.present}
        return sum(end > stored or tuple(truths[:end]) in there for end in range(BLOCK, len(was.ids), BLOCK))

    def _acting(self, mix: Chosen) -> Mixed:
        return tuple(Acting(name, self.digests[name], scale) for name, scale in mix)

    def _change_mix(self, user: int, mix: Chosen) -> None:
        model, stored = self.models[user], self.memory.stored(user)
        before = tuple(stretch for stretch in model.stretches if stretch.start < stored)
        model.stretches = (*before, Stretch(stored, self._acting(mix)))

    def _look(self, user: int | None, cleared: int = 0) -> None:
        """Take in what the memory did for `user`: its table, what lies elsewhere now, what was evicted. The events must tell the same."""
        held_before = self._held()
        for block in held_before:
            self.last_held[block] = self.now
        last_held = dict(self.last_held)
        if user is not None:
            self.tables[user] = list(self.memory.table_of(user).blocks)
        held = self._held()
        kept_now = {block for run in self.memory.view([]).runs if run.mix >= 0 and not run.requests
                    for block in range(run.first, run.first + run.count)}
        as_they_were = [kept for kept in self.contents.present
                        if kept.block in kept_now and tuple(self.cells[kept.block][:len(kept.chain)]) == kept.chain]
        unknown = kept_now - {kept.block for kept in as_they_were}
        evicted: list[Kept] = []
        for kept in self.contents.present:
            if kept in as_they_were or self._is_held(kept):
                continue
            there = next((block for block in unknown if tuple(self.cells[block][:len(kept.chain)]) == kept.chain), None)
            if there is None:
                evicted.append(kept)
            else:
                unknown.remove(there)
                self.last_held[there] = self.last_held[kept.block] = self.now
                kept.block = there
        assert not unknown, f"blocks {unknown} are kept for what nobody computed"
        if evicted:
            left = [self.last_held[kept.block] for kept in self.contents.present if kept.block in kept_now]
            assert max(last_held[kept.block] for kept in evicted) <= min(left, default=self.now), "others were unused for longer"
        for kept in evicted:
            kept.go("evicted", f"for request {user}")
        told = [event for event in self.events if isinstance(event, KvEvicted)]
        assert sum(event.blocks for event in told) == len(evicted), f"evicted {evicted}, told {told}"
        assert all(event.request_id == user for event in told)
        assert sum(event.blocks for event in self.events if isinstance(event, CacheCleared)) == cleared
        self.counts.update(evicted_blocks=len(evicted), cleared_blocks=cleared)
        self.events.clear()
        for block in held:
            self.last_held[block] = self.now

    def _is_held(self, kept: Kept) -> bool:
        """Whether a request has it at its place, all its tokens stored."""
        at = kept.first // BLOCK
        return len(kept.chain) == BLOCK and any(
            table[at:at + 1] == [kept.block] and self.memory.stored(user) >= len(kept.truths) for user, table in self.tables.items())


def test_the_kv_memory_does_as_the_naive_one() -> None:
    check(KvMachine, 60)
