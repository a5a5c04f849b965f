"""Language models inside of models that also see: their part of config.json and their tensors. No torch."""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .models import WRAPPED
from .weights.entry import TensorEntry
from .weights.files import FormatError, show

_PREFIXES = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
"""how files name the language model's tensors, older and newer ones -> as a language model alone names them"""
_EYES = tuple(top + part for top in ("", "model.") for part in ("vision_tower.", "multi_modal_projector.", "image_newline"))


def is_wrapped(config: Mapping[str, Any]) -> bool:
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in WRAPPED


def language_config(config: Mapping[str, Any], tensors: Mapping[str, TensorEntry], path: Path) -> dict[str, Any]:
    """The config of the language model: text_config, with what stands beside it. Raises FormatError when there is none."""
    text, kind = config.get("text_config"), config["model_type"]
    if not isinstance(text, dict):
        raise FormatError(f"{path}: text_config is {show(text)} where model_type {show(kind)} has an object with its language model; "
                          "the file is incomplete")
    beside = {key: value for key, value in config.items() if key not in ("text_config", "vision_config", "architectures", "model_type")}
    tied = [value for value in (config.get("tie_word_embeddings"), text.get("tie_word_embeddings")) if isinstance(value, bool)]
    owned = any(name.endswith("lm_head.weight") for name in tensors)
    merged = beside | {key: value for key, value in text.items() if value is not None}
    return {"model_type": WRAPPED[kind]} | merged | {"tie_word_embeddings": tied[0] if tied else not owned}


def language_tensors(tensors: Mapping[str, TensorEntry], path: Path) -> tuple[dict[str, TensorEntry], str]:
    """The language model's tensors by the names that it alone would have, and what to say of the others."""
    found: dict[str, TensorEntry] = {}
    left_out = 0
    for name, entry in tensors.items():
        if name.startswith(_EYES):
            left_out += 1
            continue
        plain = next((new + name[len(old):] for old, new in _PREFIXES.items() if name.startswith(old)), name)
        if plain in found:
            raise FormatError(f"{path}: tensors {show(found[plain].name)} and {show(name)} are one and the same of the language model; "
                              "the file is corrupt")
        found[plain] = entry
    unseen = f"this model also sees pictures: its {left_out:,} tensors for that are not used, only its language model is"
    return found, unseen if left_out else ""
