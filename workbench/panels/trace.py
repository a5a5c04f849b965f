"""The trace of a step as a table: every kernel or op by its name, the longest first, and what none of them covers."""
from __future__ import annotations

from textual.content import Content

from ...engine.protocol import StepTraced, TracedOp
from ..charts import hbar
from ..state import BenchState
from ..styles import QUIET
from ..text import clean_line, counted
from .engine import Line, Panel, title

WIDE, BAR = 100, 12
"""columns from which there is room for bars of so many"""


class TracePanel(Panel):
    """What the profiler recorded of the last step that was traced; or why there is none yet."""

    def __init__(self) -> None:
        super().__init__("trace")
        self.styles.text_overflow = "ellipsis"

    def show(self, state: BenchState) -> None:
        lines: list[Line] = [_pending(state)] if state.tracing or state.trace_failed else []
        if state.trace is not None:
            lines += [*_summary(state.trace, state.step_times()[1]), "", *_table(state.trace, self.columns)]
        self.put(lines or [Content.assemble(("no step was traced yet: t traces the next one", QUIET))])


def _pending(state: BenchState) -> Content:
    if state.trace_failed:
        return Content.assemble((f"✗ no trace: {clean_line(state.trace_failed, 400)}", "$text-error"))
    if state.snapshot.running:
        return Content.assemble(("the next step is traced …", "$accent"))
    return Content.assemble(("no step runs now: a trace is made of the next one, which comes with the next reply", "$text-warning"))


def _summary(trace: StepTraced, usual: float) -> list[Line]:
    step = trace.step
    facts = f"{step.prefill_tokens}+{step.decode_tokens} tok · {counted(step.requests, 'seq')} · {counted(step.adapters, 'adapter')}"
    idle = max(trace.ms - trace.busy_ms, 0.0)
    share = idle / trace.ms if trace.ms else 0.0
    if trace.device == "cuda":
        ran, rest = "on the device", "nothing ran there: it waited for the host, or between kernels"
    else:
        ran, rest = "in the ops below", "in none of them: Python between ops"
    return [
        title(f"TRACE OF STEP {step.step}", facts + (f" · {clean_line(step.path, 80)}" if step.path else "")),
        f"{trace.ms:.2f} ms under the profiler, which slows it; steps take {usual:.2f} ms (p50)",
        f"{trace.busy_ms:9.2f} ms {1 - share:4.0%}  {ran}",
        f"{idle:9.2f} ms {share:4.0%}  {rest}",
        Content.assemble((f"{trace.cost_ms:9.2f} ms       more to start and read the profiler; replies stood still", QUIET))]


def _table(trace: StepTraced, width: int) -> list[Line]:
    beside, bar = trace.device == "cuda", BAR if width >= WIDE else 0
    head = f"{'calls':>6} {'µs':>11} {'share':>6}  {'beside':>9}  " if beside else f"{'calls':>6} {'µs':>11} {'share':>6}  "
    lines: list[Line] = [Content.assemble((f"{head}{'':{bar + 1 if bar else 0}}name", QUIET))]
    lines += [_row(op, trace.ms * 1e3, beside, bar) for op in trace.ops]
    if beside:
        lines.append(Content.assemble(("beside: µs of these, while another stream was busy too", QUIET)))
    return lines


def _row(op: TracedOp, total: float, beside: bool, bar: int) -> Content:
    share = op.us / total if total else 0.0
    figures = f"{op.calls:6} {op.us:11,.1f} {share:6.1%}  " + (f"{op.beside_us:9,.1f}  " if beside else "")
    drawn = (f"{hbar(share, bar):{bar + 1}}", "$primary-lighten-2") if bar else ""
    return Content.assemble(figures, drawn, clean_line(op.name, 400))
