"""Every field of a PEFT LoRA config and what we do with it: nothing in a config is ignored without a reason. No torch."""
from __future__ import annotations

from typing import Any, Literal, NamedTuple


class Field(NamedTuple):
    """`verdict` "honoured": read and obeyed. "irrelevant": has no meaning once the adapter is trained. "neutral": must be null or
    one of `neutral`, any other value is refused, because it changes what the adapter computes."""

    verdict: Literal["honoured", "irrelevant", "neutral"]
    neutral: tuple[Any, ...] = ()
    meaning: str = ""
    """what another value would mean, for the refusal"""


_HONOURED = Field("honoured")
_IRRELEVANT = Field("irrelevant")

FIELDS: dict[str, Field] = {
    "peft_type": _HONOURED,
    "r": _HONOURED,
    "lora_alpha": _HONOURED,
    "rank_pattern": _HONOURED,
    "alpha_pattern": _HONOURED,
    "use_rslora": _HONOURED,
    "alora_invocation_tokens": _HONOURED,
    "base_model_name_or_path": _HONOURED,
    # where the adapter acts: the tensors in the file say it, so these can only disagree with them
    "target_modules": _HONOURED,
    "exclude_modules": _IRRELEVANT,
    "layers_to_transform": _IRRELEVANT,
    "layers_pattern": _IRRELEVANT,
    # training, bookkeeping, how PEFT wraps the model
    "task_type": _IRRELEVANT,
    "auto_mapping": _IRRELEVANT,
    "peft_version": _IRRELEVANT,
    "revision": _IRRELEVANT,
    "inference_mode": _IRRELEVANT,
    "lora_dropout": _IRRELEVANT,
    "megatron_core": _IRRELEVANT,
    "qalora_group_size": _IRRELEVANT,
    "runtime_config": _IRRELEVANT,
    "velora_config": _IRRELEVANT,
    # these change what is computed
    "init_lora_weights": Field("neutral", (True, False, "gaussian", "orthogonal"), "an initialisation that may have changed the base too"),
    "bias": Field("neutral", ("none",), "trained biases of the base"),
    "lora_bias": Field("neutral", (False,), "a bias on lora_B"),
    "fan_in_fan_out": Field("neutral", (False,), "transposed base weights"),
    "modules_to_save": Field("neutral", ([],), "full copies of modules beside the low-rank deltas"),
    "trainable_token_indices": Field("neutral", ([], {}), "trained rows of the embedding"),
    "target_parameters": Field("neutral", ([],), "deltas on bare parameters (mixtures of experts)"),
    "layer_replication": Field("neutral", ([],), "a stack with repeated layers"),
    "use_dora": Field("neutral", (False,), "DoRA, a magnitude vector by module"),
    "use_qalora": Field("neutral", (False,), "QA-LoRA, pooled inputs"),
    "use_bdlora": Field("neutral", (False,), "block-diagonal LoRA"),
    "ensure_weight_tying": Field("neutral", (False,), "a delta tied between embedding and lm_head"),
    "loftq_config": Field("neutral", ({},), "LoftQ, a base changed by quantisation"),
    "corda_config": Field("neutral", ({},), "CorDA, a base changed by the initialisation"),
    "eva_config": Field("neutral", ({},), "EVA initialisation"),
    "lora_ga_config": Field("neutral", ({},), "LoRA-GA, a base changed by the initialisation"),
    "kasa_config": Field("neutral", ({},), "KaSA, a truncated base and a diagonal between A and B"),
    "monteclora_config": Field("neutral", ({},), "sampled weights"),
    "arrow_config": Field("neutral", ({},), "routing between adapters by token"),
    "megatron_config": Field("neutral", ({},), "Megatron's parallel layers"),
}
"""the fields of peft.LoraConfig"""

UNKNOWN = Field("neutral", (False, [], {}, ""), "a field that is not known here, perhaps of a newer PEFT")


def is_neutral(field: Field, value: Any) -> bool:
    """Whether `value` leaves the meaning of the adapter as it is. Types count: the text "false" is not False."""
    return value is None or any(type(value) is type(neutral) and value == neutral for neutral in field.neutral)
