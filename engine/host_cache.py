"""The host tier: adapters kept in RAM, bounded by bytes, least recently used out first; those that someone waits for last of all."""
from __future__ import annotations

from .adapters.adapter import Adapter
from .adapters.errors import AdapterError
from .eviction import Lru
from .protocol import Emit, HostEvicted, HostLoaded, HostView


class HostCache:
    """Adapters by name. Emits HostLoaded and HostEvicted for every move."""

    def __init__(self, limit_bytes: int, emit: Emit) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.kept: frozenset[str] = frozenset()
        """what someone waits for, in the tier or on its way; all of it fits"""
        self._adapters: dict[str, Adapter] = {}
        self._lru = Lru()
        self._emit = emit

    def check_fits(self, adapter: Adapter) -> None:
        """Raise AdapterError when the tier could not hold `adapter` even if it were empty."""
        if adapter.host_bytes > self.limit_bytes:
            raise AdapterError(
                f"{adapter.info.path}: the adapter takes {adapter.host_bytes:,} bytes, the host cache holds {self.limit_bytes:,}; "
                "start with a larger --host-cache"
            )

    def get(self, name: str) -> Adapter | None:
        """The adapter, marked as used now; None when it is not in the tier."""
        adapter = self._adapters.get(name)
        if adapter is not None:
            self._lru.touch(name)
        return adapter

    def has_room(self, adapter: Adapter) -> bool:
        """Whether `adapter` could be kept without the loss of what someone waits for."""
        waited_for = sum(self._adapters[name].host_bytes for name in self.kept if name in self._adapters)
        return waited_for + adapter.host_bytes <= self.limit_bytes

    def put(self, name: str, adapter: Adapter, ms: float, because: str = "") -> None:
        """Keep `adapter` under `name`, evicting others to make room. `check_fits` must hold. `because` completes "for ..."."""
        excess = self.used_bytes + adapter.host_bytes - self.limit_bytes
        for victim in sorted(self._lru, key=self.kept.__contains__):
            if excess <= 0:
                break
            excess -= self._adapters[victim].host_bytes
            freed = self.drop(victim)
            self._emit(HostEvicted(victim, freed, f"{name} needed {adapter.host_bytes:,} bytes of {self.limit_bytes:,}"))
        self._adapters[name] = adapter
        self._lru.touch(name)
        self.used_bytes += adapter.host_bytes
        self._emit(HostLoaded(name, adapter.host_bytes, ms, because))

    def drop(self, name: str) -> int:
        """Forget `name`; the bytes that it took, 0 when it was not here."""
        adapter = self._adapters.pop(name, None)
        if adapter is None:
            return 0
        self._lru.remove(name)
        self.used_bytes -= adapter.host_bytes
        return adapter.host_bytes

    def __contains__(self, name: str) -> bool:
        return name in self._adapters

    def view(self) -> HostView:
        return HostView(self.used_bytes, self.limit_bytes, tuple(self._lru))
