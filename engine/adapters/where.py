"""Where an adapter acts: what its config covers, by the rules of PEFT (check_target_module_exists and inject_adapter of
peft.tuners.tuners_utils).

PEFT makes LoRA layers of the modules that the config covers, and of a file uses what belongs to these. A module is matched by the name
that the file gives it, which it had where the adapter was trained: "model.layers.0.mlp.up_proj", in a model that also sees another prefix.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..models.facts import ModelFacts, module_shapes
from ..weights.files import show
from .errors import AdapterError
from .file import AdapterFile
from .fused import other_shapes
from .match import TOKEN_MODULES, Places, ending
from .patterns import ends_in, matched

DEFAULT_TARGETS = dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "gemma3"), ("q_proj", "v_proj"))
"""what PEFT takes by model type where a config has no target_modules"""
ALL_LINEAR = "all-linear"
CONDENSED = 20
"""names in target_modules, from which on PEFT shortens them before it matches"""


def within(places: Places, facts: ModelFacts, file: AdapterFile) -> Places:
    """`places` without what the config leaves out, which `outside` and `passed_over` then name.

    Raises AdapterError when no LoRA nor anything else is left, and for fields that PEFT refuses.
    """
    if not file.settings.by_config:
        return places
    pairs = places.pairs
    modules = {place.rpartition(".")[0]: whole.module
               for place, whole in places.whole.items()} | {name: pair.path for name, pair in pairs.items()}
    known = {*module_shapes(facts), *other_shapes(facts), "embed_tokens"}
    left_out = _Coverage(file, facts, {name: path for name, path in modules.items() if name in known}).left_out()
    passed_over = _passed_over(places, left_out.keys(), modules.keys() & known, file, facts)
    kept = replace(
        places, modules={name: pair for name, pair in places.modules.items() if name not in left_out},
        embedding=None if "embed_tokens" in left_out else places.embedding,
        whole={place: whole for place, whole in places.whole.items() if whole.name not in passed_over},
        outside={pair.path: left_out[name] for name, pair in pairs.items() if name in left_out}, passed_over=passed_over)
    if not kept.pairs and not kept.whole and not kept.rows:
        fields = " and ".join(sorted(set(kept.outside.values()))) or "modules_to_save and target_modules"
        first = next(iter((*kept.outside, *passed_over)))
        raise AdapterError(f"{file.config_path}: {fields}: nothing of what the file holds is covered (it has {show(first, 160)}), so that "
                           "with PEFT it changes nothing; correct the config")
    return kept


def _passed_over(places: Places, left_out: Iterable[str], known: Iterable[str], file: AdapterFile, facts: ModelFacts) -> dict[str, str]:
    """Whole tensors that PEFT has no place for, and why: it looks for one by how it wrapped the module."""
    settings = file.settings
    trained = {*settings.token_rows, *(["lm_head"] if facts.tied and "embed_tokens" in settings.token_rows else [])}
    found = {}
    for place, whole in places.whole.items():
        module = place.rpartition(".")[0]
        listed = any(whole.module.endswith(name) for name in settings.saved)
        wrapped = module in known and module not in left_out or module in trained
        if whole.saved and not listed:
            found[whole.name] = "modules_to_save does not list its module"
        elif whole.copy and not wrapped:
            found[whole.name] = "it is the base's own below a LoRA, and the config puts no LoRA there"
        elif wrapped and not (whole.copy or listed):
            found[whole.name] = "the config puts a LoRA or trained rows there, beside which PEFT reads base_layer alone"
    return found


class _Coverage:
    """`modules`: canonical name -> path in the file, of those that a LoRA can be on."""

    def __init__(self, file: AdapterFile, facts: ModelFacts, modules: Mapping[str, str]) -> None:
        self.file, self.facts, self.settings = file, facts, file.settings
        # a file without any prefix may be of the bare decoder or have lost it
        self.names = {module: (path, f"model.{path}") if path == module != "lm_head" else (path,) for module, path in modules.items()}
        self.targets, self.absent = self._targets()
        self.parameters = frozenset(self.settings.parameters)

    def left_out(self) -> dict[str, str]:
        """Module -> the field that leaves it out."""
        saved = self._matched(self.settings.saved, "modules_to_save", "part") if self.settings.saved else set()
        excluded = self._chosen(self.settings.excluded, "exclude_modules")
        chosen = self._chosen(self.targets, "target_modules")
        tied = self._tied()
        found = {}
        for module, names in self.names.items():
            if module == "lm_head" and tied or self._is_parameter(names):
                continue
            if module in excluded:
                found[module] = "exclude_modules"
            elif module in saved:
                found[module] = "modules_to_save"
            elif module not in chosen and not tied & {module}:
                found[module] = f"target_modules{self.absent}"
            elif chosen.get(module) == "end" and not self._in_layers(names):
                found[module] = "layers_to_transform"
            elif chosen.get(module) == "whole":
                self._refuse_condensed(module, names)
        return found

    def _targets(self) -> tuple[tuple[str, ...] | str, str]:
        if self.settings.targets is not None:
            return self.settings.targets, ""
        default = DEFAULT_TARGETS.get(self.facts.architecture)
        if default is None and not self.settings.parameters:
            raise AdapterError(f"{self.file.config_path}: target_modules is absent, and PEFT has no default for {self.facts.architecture}; "
                               "set it to the modules that the adapter was trained on")
        return default or (), f" (absent: PEFT takes {', '.join(default)})" if default else " (absent)"

    def _chosen(self, entries: tuple[str, ...] | str, field: str) -> dict[str, str]:
        """Module -> how `entries` choose it: "whole" by its whole name, "end" by the end of it, "text" by an expression."""
        if isinstance(entries, str):
            if field == "target_modules" and entries.lower() == ALL_LINEAR:
                return {module: "text" for module in self.names if module not in TOKEN_MODULES}
            return dict.fromkeys(self._matched((entries,), field, "whole") if entries else (), "text")
        given = set(entries)
        elsewhere = {ending(entry, self.names) for entry in entries if entry not in self.names}
        return {module: how for module, names in self.names.items() if (how := _listed(names, module, given, elsewhere))}

    def _matched(self, patterns: tuple[str, ...], field: str, form: str) -> set[str]:
        found = matched(patterns, [name for names in self.names.values() for name in names], f"{self.file.config_path}: {field}", form)
        return {module for module, names in self.names.items() if not found.isdisjoint(names)}

    def _tied(self) -> set[str]:
        """Embedding and head where ensure_weight_tying gives both a LoRA because target_modules names one."""
        if not self.settings.tying or not self.facts.tied or any(name.rpartition(".")[2] in TOKEN_MODULES for name in self.settings.saved):
            return set()
        if isinstance(self.targets, str):
            named = matched((self.targets,), TOKEN_MODULES, f"{self.file.config_path}: target_modules", "whole")
        else:
            named = {name.rpartition(".")[2] for name in self.targets} & {*TOKEN_MODULES}
        return set(TOKEN_MODULES) if named else set()

    def _is_parameter(self, names: Iterable[str]) -> bool:
        return any(ends_in(f"{name}.weight", self.parameters) for name in names)

    def _in_layers(self, names: Iterable[str]) -> bool:
        return not self.settings.layers or any(self._layer(name) in self.settings.layers for name in names)

    def _layer(self, name: str) -> int | None:
        lists = [rf"(?:^|.*?\.){pattern}" for pattern in self.settings.layers_patterns] or [r".*?\.[^.]*"]
        found = next((number for before in lists if (number := re.match(rf"{before}\.(\d{{1,18}})\.", name))), None)
        return int(found[1]) if found else None

    def _refuse_condensed(self, module: str, names: Iterable[str]) -> None:
        if len(set(self.targets)) >= CONDENSED and not self._in_layers(names):
            raise AdapterError(f"{self.file.config_path}: target_modules names {module} whole, and layers_to_transform leaves out its "
                               "layer; which of them holds depends on how PEFT shortens the names, "
                               "remove layers_to_transform or the names")


def _listed(names: tuple[str, ...], module: str, given: set[str], elsewhere: set[str | None]) -> str:
    if not given.isdisjoint(names):
        return "whole"
    if any(ends_in(name, given) for name in names):
        return "end"
    # the whole name of the module in a model with other prefixes
    return "whole" if module in elsewhere else ""
