"""What an adapter changes of single tokens: trained rows, rows of added tokens."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from ..models.facts import ModelFacts
from ..weights.files import show
from .adapter import TokenRows
from .config import LoraSettings
from .errors import AdapterError
from .file import AdapterFile
from .match import TOKEN_MODULES, Places
from .tensors import TensorSource


def shared_with_head(places: Places, facts: ModelFacts, settings: LoraSettings) -> Places:
    """`places`, where what the file holds of a tied matrix once stands for embedding and head.

    PEFT wraps a module of modules_to_save by itself, so that embedding and head part, unless ensure_weight_tying; what else is saved
    whole is the base's own matrix, which both share. Trained token rows of a tied embedding are the head's too.
    """
    if not facts.tied:
        return places
    whole, rows = dict(places.whole), dict(places.rows)
    for one, other in (TOKEN_MODULES, TOKEN_MODULES[::-1]):
        found = whole.get(f"{one}.weight")
        apart = any(name.endswith(one) for name in settings.saved) and not settings.tying
        if found is not None and f"{other}.weight" not in whole and not apart:
            whole[f"{other}.weight"] = found
    trained = whole.get("lm_head.weight")
    apart = "lm_head" in rows and "lm_head" in settings.token_rows
    if "embed_tokens" in rows and not apart and (trained is None or trained.copy):
        rows["lm_head"] = rows["embed_tokens"]
    return replace(places, whole=whole, rows=rows)


def token_rows(file: AdapterFile, places: Places, source: TensorSource, vocab: Mapping[str, int]) -> dict[str, TokenRows]:
    """The trained rows by the tensor that they are rows of, ids ascending. Raises AdapterError where ids and rows do not agree."""
    given = file.settings.token_rows
    for name in given:
        if name not in places.rows:
            raise AdapterError(f"{file.config_path}: trainable_token_indices names {show(name)}, of which the file holds no trained rows "
                               f"({' and '.join(TOKEN_MODULES)} can have them); it is incomplete or for another base")
    result: dict[str, TokenRows] = {}
    by_tensor: dict[str, TokenRows] = {}
    for module, tensor in places.rows.items():
        ids = given.get("embed_tokens" if tensor == places.rows.get("embed_tokens") else module)
        _check_rows(file, tensor, ids, source.shapes[tensor], vocab[module])
        if tensor not in by_tensor:
            order = torch.tensor(ids, dtype=torch.int64).argsort()
            by_tensor[tensor] = TokenRows(torch.tensor(ids, dtype=torch.int64)[order], source.tensor(tensor)[order].contiguous())
        result[f"{module}.weight"] = by_tensor[tensor]
    return result


def _check_rows(file: AdapterFile, tensor: str, ids: tuple[int, ...] | None, shape: tuple[int, ...], vocab: int) -> None:
    where = f"{file.weights_path}: tensor {show(tensor, 160)}"
    if ids is None:
        raise AdapterError(f"{where} holds trained rows of tokens, but trainable_token_indices in the config does not name them; "
                           "save the adapter again")
    if len(shape) != 2 or shape[0] != len(ids):
        raise AdapterError(f"{where} has shape {list(shape)}, trainable_token_indices names {len(ids)} tokens; "
                           "the config and the weights do not belong together")
    beyond = sorted(number for number in ids if number >= vocab)
    if beyond and beyond != list(range(vocab, vocab + len(beyond))):
        raise AdapterError(f"{where} is for the token {beyond[0]}, the vocabulary ends at {vocab - 1} and nothing says what the tokens "
                           "between are; load the base that it was trained on")
