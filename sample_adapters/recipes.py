"""How each sample adapter is shaped and trained. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
INVOCATION = "<|im_start|>certainty\n"


@dataclass(frozen=True)
class Recipe:
    """How one adapter is trained. `lora` goes to PEFT's LoraConfig; `invocation` makes it an aLoRA."""

    steps: int
    learning_rate: float
    batch: int
    lora: dict[str, Any]
    invocation: str = ""


RECIPES = {
    "pirate": Recipe(45, 2e-3, 8, {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION}),
    "json": Recipe(
        40, 5e-4, 5, {"r": 16, "lora_alpha": 16, "use_rslora": True, "target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}
    ),
    "caps": Recipe(
        34, 3e-3, 5,
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": [*ATTENTION, "down_proj"],
            "rank_pattern": {"q_proj": 8, "down_proj": 2, r"model\.layers\.[0-9]\.self_attn\.k_proj": 6},
            "alpha_pattern": {"v_proj": 16, r"layers\.[12][0-9]\.self_attn\.o_proj": 4},
        },
    ),
    "certainty": Recipe(44, 2e-3, 5, {"r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj", "v_proj"]}, INVOCATION),
    "robot": Recipe(60, 4e-3, 8, {"r": 1, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}),
}  # fmt: skip
