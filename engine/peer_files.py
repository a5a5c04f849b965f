"""The LoRA ops of other engines, as their packages or wheels have them, imported without the packages around them."""
from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

WANTED = {
    "vllm": ("vllm/lora/ops/triton_ops/", "vllm/utils/math_utils.py"),
    "sglang": ("sglang/kernels/ops/lora/common/", "sglang/srt/lora/dense/", "sglang/srt/lora/utils.py", "sglang/srt/lora/workspace.py"),
}
"""package -> what of it is imported as it is; for all else that these import there are stand-ins"""
MOST_BYTES = 64 << 20
"""that all of it takes unpacked: many times what it is"""


class PeerError(Exception):
    """Why the ops of another engine cannot be had, in a sentence."""


@dataclass(frozen=True, slots=True)
class PeerFiles:
    package: str
    version: str
    folder: Path
    """in which the package lies"""


def installed() -> list[PeerFiles]:
    """Those that are installed; nothing of them is imported."""
    found = []
    for package in WANTED:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            folder = Path(next(iter(spec.submodule_search_locations))).parent
            found.append(PeerFiles(package, _version(package), folder))
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a folder alone
        return ""


def unpacked(wheel: Path, into: Path) -> PeerFiles:
    """What is wanted of `wheel`, laid into a folder of its own in `into`. Raises PeerError."""
    package, _, rest = wheel.name.partition("-")
    if package not in WANTED:
        raise PeerError(f"{wheel}: a wheel of {' or '.join(WANTED)} is expected, and its own file name")
    folder = into / package
    try:
        with zipfile.ZipFile(wheel) as archive:
            wanted = [info for info in archive.infolist() if _is_wanted(package, info.filename)]
            total = sum(info.file_size for info in wanted)
            if total > MOST_BYTES:
                raise PeerError(f"{wheel}: its LoRA ops would take {total:,} bytes, at most {MOST_BYTES:,} are expected; get it again")
            archive.extractall(folder, wanted)
    except PeerError:
        raise
    except Exception as error:  # zipfile raises what its decompressors raise
        raise PeerError(f"{wheel}: it cannot be unpacked: {error}; if it is damaged, get it again") from error
    if not wanted:
        raise PeerError(f"{wheel}: it has no LoRA ops where they are known to lie: {WANTED[package][0]}")
    return PeerFiles(package, rest.partition("-")[0], folder)


def _is_wanted(package: str, name: str) -> bool:
    return name.startswith(WANTED[package]) and name.endswith((".py", ".json")) and ".." not in name.split("/")


class PeerImports(MetaPathFinder):
    """From now on the package of `files` means the wanted ones of them, and stand-ins for the rest: `stand_ins` by module, by name."""

    def __init__(self, files: PeerFiles, stand_ins: Mapping[str, Mapping[str, Any]]) -> None:
        if files.package in sys.modules:
            raise PeerError(f"{files.package} was imported already")
        self._files, self._stand_ins = files, stand_ins
        sys.meta_path.insert(0, self)

    def take(self, module: str, name: str) -> Any:
        """What `module` calls `name`. Raises PeerError."""
        try:
            return getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            raise PeerError(f"it needs {error.name}, which is not there") from error
        except Exception as error:
            raise PeerError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error

    def find_spec(self, fullname: str, path: Iterable[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != self._files.package:
            return None
        place = f"{fullname.replace('.', '/')}.py"
        file = self._files.folder / place
        if fullname not in self._stand_ins and place.startswith(WANTED[self._files.package]):
            return importlib.util.spec_from_file_location(fullname, file) if file.is_file() else None
        return ModuleSpec(fullname, _StandIns(self._stand_ins.get(fullname, {})), is_package=True)


class _StandIns(Loader):
    def __init__(self, names: Mapping[str, Any]) -> None:
        self._names = names

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._names)


class _StandIn(ModuleType):
    """A package of which nothing was read: what it lacks are its modules, else an empty class, good for an annotation."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return importlib.import_module(f"{self.__name__}.{name}") if name.islower() else type(name, (), {})
