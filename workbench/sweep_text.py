"""A sweep for people: KL against scale as a table and a chart, and what every scale answers."""
from __future__ import annotations

from collections.abc import Sequence

from .charts import column_chart, hbar
from .comparison import Round, Setup, by_scale
from .comparison_text import heading, mean_distance, nats, reply_lines
from .text import clean_line

BAR = 24


def sweep_text(setup: Setup, round: Round, number: int, of: int) -> str:
    """All of one prompt, from the lowest scale to the highest."""
    lines = [*heading(round, number, of), *sweep_lines(setup, [round]), ""]
    for i in by_scale(setup.columns):
        lines += [*reply_lines(f"×{setup.columns[i].label}", round.replies[i]), ""]
    return "\n".join([*lines, ""])


def sweep_lines(setup: Setup, rounds: Sequence[Round]) -> list[str]:
    """A line for each scale over all of `rounds`: how far it is from scale 0 on what scale 0 answered; the chart under it."""
    order, scored = by_scale(setup.columns), [round.scored for round in rounds if round.scored is not None]
    name = clean_line(setup.columns[-1].mix[0].name, 40)
    found = [(i, mean_distance(scored, i)) for i in order]
    top = max((far.mean_kl for _, far in found if far), default=0.0)
    lines = [f"{name}: KL(×0 ‖ scale) on the reply of ×0, nats", f"{'scale':>8}{'mean':>9}{'max':>9}{'same':>7}  replies changed"]
    for i, far in found:
        changed = sum(round.replies[i].ids != round.replies[0].ids for round in rounds if not round.replies[i].failed)
        figures = f"{nats(far.mean_kl):>9}{nats(far.max_kl):>9}{far.same:>7.0%}" if far else f"{'–':>9}{'–':>9}{'–':>7}"
        bar = hbar(far.mean_kl / top, BAR) if far and top else ""
        lines.append(f"{setup.columns[i].label:>8}{figures}  {changed} of {len(rounds)}  {bar}".rstrip())
    if top > 0:
        values = [far.mean_kl if far else 0.0 for _, far in found]
        lines += ["", *column_chart(values, [setup.columns[i].label for i in order])]
    return lines
