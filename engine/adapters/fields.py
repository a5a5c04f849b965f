"""Every field of a PEFT LoRA config and what we do with it: nothing in a config is ignored without a reason. No torch."""
from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Verdict = Literal["honoured", "irrelevant", "refused"]


class Field(NamedTuple):
    """`verdict` "honoured": read and obeyed. "irrelevant": has no meaning once the adapter is trained. "refused": must be null or
    one of `neutral`, because any other value changes what the adapter computes in a way that is not done here."""

    verdict: Verdict
    reason: str
    """one clause: how it is obeyed, why it has no meaning, what another value would mean"""
    neutral: tuple[Any, ...] = ()


class FieldVerdict(NamedTuple):
    """A field as a config sets it. `value` is JSON, cut; untrusted, as is `name`."""

    name: str
    value: str
    verdict: Verdict
    reason: str


_OF_INIT = "a parameter of the initialisation that init_lora_weights names"
_OUTSIDE = "what the file holds for other modules does not act, and is named"

FIELDS: dict[str, Field] = {
    "peft_type": Field("honoured", "LORA; another method is refused by its name"),
    "r": Field("honoured", "the rank; the shapes of the tensors must agree"),
    "lora_alpha": Field("honoured", "scaling is alpha / r"),
    "rank_pattern": Field("honoured", "ranks by module, regular expressions as PEFT reads them: the first that matches"),
    "alpha_pattern": Field("honoured", "alphas by module, as rank_pattern"),
    "use_rslora": Field("honoured", "scaling is alpha / sqrt(r)"),
    "use_dora": Field("honoured", "rows are brought to the lengths of the magnitude vectors, at any scale"),
    "lora_bias": Field("honoured", "the bias of lora_B is added, scaled"),
    "bias": Field("honoured", "trained biases in the file stand in the place of the base's"),
    "modules_to_save": Field("honoured", "whole embed_tokens, lm_head and norms, beside which no LoRA acts; "
                                         "a whole linear or another head is refused by its name"),
    "trainable_token_indices": Field("honoured", "trained rows of embed_tokens and lm_head; a tied head gets those of the embedding"),
    "target_parameters": Field("honoured", "the weight of a linear is as a target module; a mixture of experts is refused by its shape"),
    "alora_invocation_tokens": Field("honoured", "acts from the first token of the last occurrence in the prompt"),
    "target_modules": Field("honoured", f"a list, a regular expression or all-linear, as PEFT matches them: {_OUTSIDE}"),
    "exclude_modules": Field("honoured", f"a list or a regular expression: {_OUTSIDE}"),
    "layers_to_transform": Field("honoured", f"layers of modules that target_modules names by their ends: {_OUTSIDE}"),
    "layers_pattern": Field("honoured", "the names of the list of layers that layers_to_transform counts in"),
    "layer_replication": Field("honoured", "accepted where it repeats no layer; a stack with repeated layers is another base, refused"),
    "fan_in_fan_out": Field("honoured", "for transposed weights; PEFT itself sets it to false for the linears of these bases"),
    "ensure_weight_tying": Field("honoured", "embedding and tied head change alike; the file holds both, or one that stands for both"),
    "init_lora_weights": Field("honoured", "an initialisation that leaves the base as it is; one that changes the base is refused"),
    "base_model_name_or_path": Field("honoured", "compared with the base and shown"),
    "task_type": Field("irrelevant", "the trained tensors are the same for every task; a head for another task is refused by its name"),
    "auto_mapping": Field("irrelevant", "how PEFT finds the class of the base"),
    "peft_version": Field("irrelevant", "which PEFT saved the file"),
    "revision": Field("irrelevant", "which revision of the base was fetched"),
    "inference_mode": Field("irrelevant", "whether PEFT freezes the weights"),
    "lora_dropout": Field("irrelevant", "acts in training alone"),
    "megatron_core": Field("irrelevant", "a module's name, used with megatron_config alone"),
    "qalora_group_size": Field("irrelevant", "used with use_qalora alone"),
    "runtime_config": Field("irrelevant", "how PEFT runs, never saved by it"),
    "velora_config": Field("irrelevant", "compresses what training keeps for the backward pass"),
    "loftq_config": Field("irrelevant", _OF_INIT),
    "corda_config": Field("irrelevant", _OF_INIT),
    "eva_config": Field("irrelevant", _OF_INIT),
    "lora_ga_config": Field("irrelevant", _OF_INIT),
    "use_qalora": Field("refused", "QA-LoRA, pooled inputs", (False,)),
    "use_bdlora": Field("refused", "block-diagonal LoRA", (False,)),
    "kasa_config": Field("refused", "KaSA, a truncated base and a diagonal between A and B", ({},)),
    "monteclora_config": Field("refused", "MonteCLoRA, sampled weights", ({},)),
    "arrow_config": Field("refused", "Arrow, routing between adapters by token", ({},)),
    "megatron_config": Field("refused", "Megatron's parallel layers", ({},)),
}
"""the fields of peft.LoraConfig"""

OLDER: dict[str, Field] = {
    "merge_weights": Field("irrelevant", "whether the first PEFT merged the deltas into the base to evaluate"),
    "enable_lora": Field("refused", "LoRA on parts of a matrix in the layout of the first PEFT", ([],)),
    "invocation_string": Field("refused", "an aLoRA's invocation as text, from before PEFT had aLoRA: PEFT's field is "
                                          "alora_invocation_tokens, put the token ids of the text there in its place; or remove it, load "
                                          "the file as a plain LoRA and set the invocation in the bench", ("",)),
}
"""fields of what wrote adapters before peft.LoraConfig had the like"""
UNKNOWN = Field("refused", "a field that is not known here, perhaps of a newer PEFT", (False, [], {}, ""))

_CHANGED_BASE = "which changes the base too: the file holds a part of what was trained; convert it with PEFT's save_pretrained(" \
    "path_initial_model_for_weight_conversion=...)"
_INITS: dict[str, str] = {
    "gaussian": "", "orthogonal": "", "eva": "", "mica": "",
    "pissa": f"PiSSA, {_CHANGED_BASE}", "olora": f"OLoRA, {_CHANGED_BASE}", "corda": f"CorDA, {_CHANGED_BASE}",
    "lora_ga": f"LoRA-GA, {_CHANGED_BASE}",
    "loftq": "LoftQ, whose low-rank part makes up for a base quantised in one way; on another base it would act otherwise than trained",
}
"""values of init_lora_weights -> why it is refused, "" for those whose file holds all that was trained"""


_ALORA = "an aLoRA from before PEFT had it; PEFT's aLoRA has peft_type LORA and the token ids of its invocation in " \
    "alora_invocation_tokens: set both, and remove invocation_string"


def field_table() -> list[tuple[str, Verdict, str]]:
    """(field, verdict, reason) of every field of peft.LoraConfig, for the documentation."""
    return [(name, field.verdict, field.reason) for name, field in FIELDS.items()]


def verdicts(config: Mapping[str, Any]) -> list[FieldVerdict]:
    """What is done with each field of `config`, in its order; "refused" only where this value is."""
    return [_verdict(name, value, config) for name, value in config.items()]


def refusal(name: str, value: Any, beside: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Why `value` of the field `name` cannot be honoured; "" when it can, or leaves the adapter's meaning as it is.

    `beside` has the other fields of the config.
    """
    if name == "invocation_string" and beside.get("alora_invocation_tokens"):
        return ""
    if name == "peft_type":
        return "" if value == "LORA" else _ALORA if value == "ALORA" else f"another method than LoRA: only LORA is read, not {shown(value)}"
    if name == "init_lora_weights":
        return _init_refusal(value)
    field = (FIELDS | OLDER).get(name, UNKNOWN)
    if field.verdict != "refused" or value is None:
        return ""
    # types count: the text "false" is not False
    return "" if any(type(value) is type(neutral) and value == neutral for neutral in field.neutral) else field.reason


def shown(value: Any) -> str:
    """A value of a config as JSON, cut."""
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "…"


def _verdict(name: str, value: Any, config: Mapping[str, Any]) -> FieldVerdict:
    why, field = refusal(name, value, config), (FIELDS | OLDER).get(name, UNKNOWN)
    if why:
        return FieldVerdict(name, shown(value), "refused", why)
    if field.verdict == "refused":
        return FieldVerdict(name, shown(value), "irrelevant", "this value leaves the adapter's meaning as it is")
    return FieldVerdict(name, shown(value), field.verdict, field.reason)


def _init_refusal(value: Any) -> str:
    if value is None or type(value) is bool:
        return ""
    name = re.sub(r"_niter_\d+\Z", "", value).lower() if isinstance(value, str) else ""
    return _INITS.get(name, "an initialisation that is not known here and may change the base")
