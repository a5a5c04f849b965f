"""KV memory: what it holds by owner and mix, what of the prompts was there, what was lost and why."""
from __future__ import annotations

from textual.content import Content

from ...engine.protocol import KvOwner, KvView
from ..cache_text import hit_text
from ..kv_map import map_lines, scale_text
from ..mixboard import mix_text
from ..state import BenchState, LoggedEvent
from ..styles import QUIET
from ..text import clean_line, counted, size_text
from .engine import Line, Panel, title


class KvPanel(Panel):
    """The compact form: how full, how often hit, a map of two lines, and the latest reason."""

    WRAPS = True
    ROWS, OWNERS, REASONS = 2, 3, 1

    def show(self, state: BenchState) -> None:
        kv = state.snapshot.kv
        lines: list[Line] = [title("KV", _size(kv))]
        if kv.blocks:
            lines.append(_bar(kv, self.columns))
            lines += self._figures(kv)
            lines += map_lines(kv, state.letters, self.columns, self.ROWS)
            lines += self._legend(state)
            lines += [_owner(owner, self.columns) for owner in kv.owners[:self.OWNERS]]
        self.put(lines + self._reasons(state))

    def _figures(self, kv: KvView) -> list[Line]:
        counters = kv.counters
        lost = [f"{what} {count:,}" for what, count in (("evicted", counters.evicted_blocks), ("cleared", counters.cleared_blocks),
                                                        ("preempted", counters.preemptions)) if count]
        of = f" of {counters.looked_up_tokens:,} tok" if counters.looked_up_tokens else ""
        return [" · ".join((f"hit {hit_text(counters)}{of}", *lost))]

    def _legend(self, state: BenchState) -> list[Line]:
        """Which letter is which mix."""
        kv = state.snapshot.kv
        there = sorted({run.mix for run in kv.runs if 0 <= run.mix < len(kv.mixes)}, key=lambda mix: state.letters[kv.mixes[mix]])
        words = [f"{state.letters[kv.mixes[mix]]} {clean_line(mix_text(kv.mixes[mix]), 40)}" for mix in there]
        return [Content.assemble((clean_line(" · ".join(words), self.columns * self.ROWS), QUIET))] if words else []

    def _reasons(self, state: BenchState) -> list[Line]:
        newest = sorted((*state.prefixes, *state.losses), key=lambda entry: entry.at)[-self.REASONS:]
        return [_reason(entry, 160) for entry in newest]


class KvMapPanel(KvPanel):
    """The whole of it: every block, every reply, the latest reasons, and what other rules would have done."""

    ROWS, OWNERS = 16, 12

    def _figures(self, kv: KvView) -> list[Line]:
        c = kv.counters
        looked, hit = c.looked_up_tokens, c.hit_tokens
        copied = f", {c.copied_tokens:,} of them copied" if c.copied_tokens else ""
        lines: list[Line] = [f"hit {hit_text(c)}: {hit:,} of {looked:,} prompt tokens were there{copied}"]
        if looked:
            lines.append(f"llama.cpp's rule, which keeps one mix and clears when adapters or scales change: {c.llama_cpp_tokens:,} "
                         f"({c.llama_cpp_tokens / looked:.0%}), {counted(c.llama_cpp_cleared, 'block')} cleared that were not lost here")
            wrong = f"{c.name_keyed_wrong:,} more, all wrong: of other content or scale" if c.name_keyed_wrong else "none wrongly so far"
            lines.append(f"a cache that knows adapters by name alone: {wrong}")
        lines.append(f"blocks evicted for room {c.evicted_blocks:,} · cleared {c.cleared_blocks:,} · replies paused {c.preemptions:,}")
        return [*lines, ""]

    def _legend(self, state: BenchState) -> list[Line]:
        kv = state.snapshot.kv
        if not any(run.mix >= 0 for run in kv.runs):
            return []
        words = f"{scale_text(kv, self.columns, self.ROWS)}. Upper case: a reply holds it; reversed: several do; lower case: kept for later"
        return [Content.assemble((words, QUIET)), *super()._legend(state)]

    def _reasons(self, state: BenchState) -> list[Line]:
        lines: list[Line] = []
        for name, means, entries in (("PREFIXES", "what prompts found, and why not more", state.prefixes),
                                     ("LOST", "blocks that are gone, and why", state.losses)):
            if entries:
                lines += ["", title(name, means), *(_reason(entry, 1000) for entry in reversed(entries))]
        return lines


def _size(kv: KvView) -> str:
    return f"{kv.held}/{kv.blocks} blocks of {kv.block_tokens} tok · {size_text(kv.bytes)}" if kv.blocks else ""


def _bar(kv: KvView, width: int) -> Content:
    """Held, kept to be found, free; what is above zero shows at least one cell."""
    words = f" held {kv.held / kv.blocks:.0%} kept {kv.cached / kv.blocks:.0%}"
    room = max(width - len(words), 4)
    held = max(round(kv.held / kv.blocks * room), min(kv.held, 1))
    kept = min(max(round(kv.cached / kv.blocks * room), min(kv.cached, 1)), room - held)
    return Content(f"{'█' * held}{'▒' * kept}{'░' * (room - held - kept)}{words}")


def _owner(owner: KvOwner, width: int) -> str:
    shared = f", {owner.shared} shared" if owner.shared else ""
    return clean_line(f"#{owner.request_id} {owner.tokens} tok, {counted(owner.blocks, 'block')}{shared} · {mix_text(owner.mix)}", width)


def _reason(entry: LoggedEvent, limit: int) -> Content:
    return Content.assemble((clean_line(f"{entry.at:%H:%M:%S} {entry.text}", limit), QUIET))
