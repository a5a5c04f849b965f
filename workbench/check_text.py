"""The report of a check as text: sections for the command line and for the details screen. All of it is cleaned here."""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from ..engine.protocol import AdapterInfo, CheckReport, DeltaNorm, FieldVerdict, Finding
from .charts import hbar
from .text import clean_line, counted, size_text
from .wrap import wrap

MARKS = {"refused": "✗", "warning": "!", "note": "·"}
UNSET = ("null", "false", "{}", "[]", '""', '"none"')
"""values, as JSON, of a field that sets nothing"""
MOST_NAMES = 12
EFFECT_HINT = "not run: F5 runs it"


@dataclass(frozen=True)
class Section:
    title: str
    lines: tuple[str, ...]


def sections(report: CheckReport, width: int, no_effect: str = EFFECT_HINT) -> list[Section]:
    """The report in parts, lines at most `width` columns; `no_effect` stands where no effect run was made."""
    parts = [
        Section(f"{_name(report)}: {verdict_text(report)}", _findings(report.findings, width)),
        Section("EFFECT ON THE BASE'S WORDS", _effect(report, no_effect) if report.usable or report.effect else ()),
        Section("WHAT IT IS", _identity(report, width)),
        Section("MODULES AND SCALES", _modules(report, width)),
        Section("HOW FAR IT MOVES THE WEIGHTS", _deltas(report.deltas, width)),
        Section("FIELDS OF ITS CONFIG", _fields(report.fields, width)),
        Section("WHAT ITS FILES SAY", _about(report.about, width)),
    ]
    return [part for part in parts if part.lines or part is parts[0]]


def verdict_text(report: CheckReport) -> str:
    """`usable`, `usable, 2 warnings`, `NOT usable`."""
    warnings = sum(finding.level == "warning" for finding in report.findings)
    if not report.usable:
        return "NOT usable"
    return f"usable, {counted(warnings, 'warning')}" if warnings else "usable"


def _name(report: CheckReport) -> str:
    return clean_line(report.name, 60)


def _wrapped(text: str, width: int, first: str = "", rest: str | None = None, limit: int = 1200) -> list[str]:
    """`text` cleaned and broken into lines, the first behind `first`, the others behind as many blanks."""
    behind = " " * len(first) if rest is None else rest
    return wrap(clean_line(text, limit), width, first, behind)


def _findings(findings: Sequence[Finding], width: int) -> tuple[str, ...]:
    return tuple(line for finding in findings for line in _wrapped(finding.text, width, f"{MARKS[finding.level]} "))


def _identity(report: CheckReport, width: int) -> tuple[str, ...]:
    lines = _wrapped(report.path, width)
    if report.info:
        lines += [line for text in _info_texts(report.info, report.model) for line in _wrapped(text, width)]
    elif report.tensors:
        dtypes = " ".join(f"{kind}×{count}" for kind, count in report.dtypes.items())
        lines += _wrapped(f"{counted(report.tensors, 'tensor')}: {dtypes}", width)
    return tuple(lines)


def _about(about: Mapping[str, str], width: int) -> tuple[str, ...]:
    return tuple(line for key, value in about.items() for line in _wrapped(value, width, f"{clean_line(key, 60)}: ", "    ", 400))


def _info_texts(info: AdapterInfo, model: str) -> Iterator[str]:
    kinds = [kind for kind, there in (("rsLoRA", info.rslora), ("DoRA", info.dora), ("aLoRA", bool(info.invocation))) if there]
    yield " · ".join([info.format, f"rank {_many(info.ranks)}", info.dtype, *kinds, size_text(info.bytes), f"sha {info.digest[:12]}"])
    yield f"trained on {info.base_model or 'a base that it does not name'}; the base here is {model}"
    if info.task:
        yield f"task: {info.task}"
    if info.invocation:
        yield f"acts only after its invocation: {info.invocation}"
    if info.replaced:
        more = f" and {len(info.replaced) - MOST_NAMES} more" if len(info.replaced) > MOST_NAMES else ""
        yield f"brings its own {', '.join(info.replaced[:MOST_NAMES])}{more}"
    for matrix, count in info.token_rows.items():
        yield f"brings {counted(count, 'trained row')} of {matrix}"
    if info.added_rows:
        yield f"adds {counted(info.added_rows, 'token')} to the vocabulary"
    if info.prompt_prefix:
        yield f"expects before a prompt (never put there unasked): {info.prompt_prefix[:500]}"


def _modules(report: CheckReport, width: int) -> tuple[str, ...]:
    info = report.info
    if info is None:
        return ()
    lines = [f"{info.matched} of {counted(info.total, 'module')} {'match' if info.total != 1 else 'matches'} the base"]
    for group in report.scales:
        kinds = " ".join(f"{kind}×{count}" for kind, count in group.kinds.items())
        lines += _wrapped(kinds, width, f"effective scale {group.scale:g}: ", "  ")
    if report.unmatched:
        more = info.total - info.matched - info.outside - len(report.unmatched[:MOST_NAMES])
        names = ", ".join(report.unmatched[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        lines += _wrapped(f"no place in the base: {names}", width, "", "  ")
    if info.outside:
        lines.append(f"{counted(info.outside, 'module')} of the file left out by its config")
    return tuple(lines)


def _effect(report: CheckReport, no_effect: str) -> tuple[str, ...]:
    if not report.effect:
        return (no_effect,) if no_effect else ()
    positions = sum(part.positions for part in report.effect)
    lines = [f"{report.changed_share:.1%} of {positions} likeliest tokens change · KL(base‖adapter) {_nats(report.mean_kl)} nats a token"]
    for part in report.effect:
        changed = f"{part.changed}/{part.positions}"
        example = f"  {clean_line(part.before, 12)!r} → {clean_line(part.after, 12)!r}" if part.changed else ""
        lines.append(f"  {clean_line(part.prompt, 10):<10} {changed:>8} {part.changed / max(part.positions, 1):>6.1%}   KL "
                     f"{_nats(part.kl):<7}{example}")
    return tuple(lines)


def _nats(value: float) -> str:
    return f"{value:.3f}" if value >= 0.0005 or value == 0 else f"{value:.0e}"


def _deltas(deltas: Sequence[DeltaNorm], width: int) -> tuple[str, ...]:
    """‖ΔW‖/‖W‖ of every part with a bar, in columns read downwards."""
    if not deltas:
        return ()
    top = max((delta.share for delta in deltas if isfinite(delta.share)), default=0.0)
    label = max(len(delta.place) for delta in deltas)
    cells = [_cell(delta, top, label) for delta in deltas]
    columns = max(1, min(width // (label + 18), -(-len(cells) // 4)))
    height = -(-len(cells) // columns)
    room = width // columns
    rows = ["".join(f"{cell[:room - 1]:<{room}}" for cell in cells[row::height]).rstrip() for row in range(height)]
    largest = f", largest {_share(top)}" if any(isfinite(delta.share) for delta in deltas) else ""
    return (f"‖ΔW‖ / ‖W‖ at scale 1{largest}", *rows)


def _cell(delta: DeltaNorm, top: float, label: int) -> str:
    full = delta.share / top if top and isfinite(delta.delta) else 0.0
    return f"{clean_line(delta.place, label):<{label}} {_share_of(delta):>8} {hbar(full, 7)}"


def _share_of(delta: DeltaNorm) -> str:
    if not isfinite(delta.delta):
        return "not finite"
    return _share(delta.share) if isfinite(delta.share) else "new"


def _share(share: float) -> str:
    return f"{share:.2%}" if share >= 0.0001 or share == 0 else f"{share:.0e}"


def _fields(fields: Sequence[FieldVerdict], width: int) -> tuple[str, ...]:
    """Every field: refused ones with the reason, honoured ones with their value, then those that are not set or have no meaning here."""
    lines: list[str] = []
    for field in fields:
        if field.verdict == "refused":
            lines += _wrapped(f"{field.field} = {field.value}: refused: {field.why}", width, "✗ ")
        elif field.verdict == "honoured" and field.value not in UNSET:
            lines += _wrapped(f"{field.field} = {field.value}", width, "✓ ", "    ")
    unset = [field.field for field in fields if field.verdict == "honoured" and field.value in UNSET]
    idle = [field.field for field in fields if field.verdict == "irrelevant"]
    lines += _wrapped(", ".join(unset), width, "not set: ", "    ", 8000) if unset else []
    lines += _wrapped(", ".join(idle), width, "without meaning here: ", "    ", 8000) if idle else []
    return tuple(lines)


def _many(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}" if ranks else "?"
