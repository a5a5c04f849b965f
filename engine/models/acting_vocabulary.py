"""What adapters do to the embedding and to the head: LoRA on tokens, trained rows, whole matrices put in their place, added tokens.

A row of the base becomes base + s * (replacement - base); a row that the base lacks has no such scale: it acts whole for any s but 0.
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.dora import scale_rows
from ...kernels.weights import Weight, rows
from ..active import RowsActing
from ..dora_rows import EMBEDDING
from ..routing import Routing
from ..slots import VocabularyPart

Uses = Sequence[tuple[int, VocabularyPart]]
"""(column of the weights, what that adapter does)"""


def acting_embedding(ids: Tensor, weight: Weight, routing: Routing, acting: RowsActing) -> Tensor:
    """Rows [T, hidden] of the embedding for `ids` [T] with what the adapters of each token make of them."""
    uses, vocab = routing.embedding, routing.base_vocab
    x = rows(weight, ids.clamp(max=vocab - 1) if any(part.size > vocab for _, part in uses) else ids)
    replacing = [(column, part) for column, part in uses if part.replaced is not None or part.rows is not None]
    if replacing:
        x = _replace_rows(x, ids, replacing, acting.weights, vocab)
    if any(part.a is not None for _, part in uses):
        for phase in acting.phases:
            x = _pass_dora(x, ids, uses, phase.rows, phase.step.weights, phase.uses)
        if acting.step is not None:
            _add_lora_(x, ids, uses, acting.step.weights)
    return x


def _replace_rows(x: Tensor, ids: Tensor, uses: Uses, weights: Tensor, vocab: int) -> Tensor:
    """fp32 sums, in x's dtype; tokens without such an adapter keep their rows bit for bit."""
    found = [_row_of(ids, part) for _, part in uses]
    known = torch.stack([hit for _, hit in found], 1)
    shares = _columns(weights, uses) * known
    whole = _whole(shares)
    is_added = (ids >= vocab).unsqueeze(1)
    y = x.float() * torch.where(is_added, 0.0, 1 - shares.sum(1, keepdim=True))
    shares = torch.where(is_added, whole, shares)
    for index, (row, _) in enumerate(found):
        y += row.float() * shares[:, index : index + 1]
    return y.to(x.dtype)


def _row_of(ids: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """(the row that `part` has for every token [T, hidden], whether it has one [T])"""
    if part.replaced is not None:
        return F.embedding(ids.clamp(max=part.replaced.shape[0] - 1), part.replaced), ids < part.replaced.shape[0]
    assert part.ids is not None and part.rows is not None
    places = torch.searchsorted(part.ids, ids).clamp_(max=part.ids.shape[0] - 1)
    return F.embedding(places, part.rows), part.ids[places] == ids


def _whole(shares: Tensor) -> Tensor:
    """1 for the adapter that acts on a row; adapters that add the same token to one mix share it evenly."""
    acts = (shares != 0).float()
    return acts / acts.sum(1, keepdim=True).clamp_min(1)


def _add_lora_(x: Tensor, ids: Tensor, uses: Uses, weights: Tensor) -> None:
    """x[t] += weight * B A[:, ids[t]]; a token that an adapter's A does not know gets nothing of it."""
    for column, part in uses:
        if part.a is None or part.b is None:
            continue
        size = part.a.shape[0]
        share = weights[:, column : column + 1] * (ids < size).unsqueeze(1)
        h = F.embedding(ids.clamp(max=size - 1), part.a).float() * share
        x.addmm_(h.to(x.dtype), part.b)


def _pass_dora(x: Tensor, ids: Tensor, uses: Uses, phase_rows: Tensor | None, weights: Tensor, gained: Sequence) -> Tensor:
    ours, of_ids = (x, ids) if phase_rows is None else (x.index_select(0, phase_rows), ids.index_select(0, phase_rows))
    _add_lora_(ours, of_ids, uses, weights)
    for use in gained:
        gains = use.gains.get(EMBEDDING)
        if gains is not None:
            picked = slice(None) if use.rows is None else use.rows
            ours[picked] = scale_rows(ours[picked], gains, None)
    return ours if phase_rows is None else x.index_copy(0, phase_rows, ours)


def acting_head(y: Tensor, x: Tensor, uses: Uses, weights: Tensor) -> Tensor:
    """Logits [T, rows] of the base's rows and of those that an adapter adds, from the base's `y` [T, base's rows] and `x` [T, hidden].

    0 stands where a token has no such row: its vocabulary ends before.
    """
    base_rows = y.shape[1]
    replacing = [(column, part) for column, part in uses if part.replaced is not None]
    adding = [(column, part) for column, part in uses if part.size > base_rows]
    whole = dict(zip([column for column, _ in adding], _whole(_columns(weights, adding)).unbind(1), strict=True)) if adding else {}
    if replacing:
        y = (y.float() * (1 - _columns(weights, replacing).sum(1, keepdim=True))).to(y.dtype)
    if adding:
        y = torch.cat([y, y.new_zeros(y.shape[0], max(part.size for _, part in adding) - base_rows)], 1)
    for column, part in uses:
        share = weights[:, column : column + 1]
        acts = whole[column].unsqueeze(1) if column in whole else share
        if part.replaced is not None:
            size = min(part.replaced.shape[0], base_rows)
            y[:, :size].addmm_(_weighed(x, share), part.replaced[:size].T)
            if part.size > base_rows:
                y[:, base_rows : part.replaced.shape[0]].addmm_(_weighed(x, acts), part.replaced[base_rows:].T)
        elif part.ids is not None and part.rows is not None:
            here = torch.where(part.ids >= base_rows, acts, share)
            y.index_add_(1, part.ids, ((x @ part.rows.T).float() * here).to(y.dtype))
    return y


def _columns(weights: Tensor, uses: Uses) -> Tensor:
    """[T, uses]; slices, as an index would be copied to the device."""
    return torch.cat([weights[:, column : column + 1] for column, _ in uses], 1)


def _weighed(x: Tensor, share: Tensor) -> Tensor:
    return (x.float() * share).to(x.dtype)
