"""Which requests hold adapters, wait for them, and mean old content by their names."""
from __future__ import annotations

from collections.abc import Iterable, Mapping

from .adapter_records import Records
from .adapters.errors import AdapterError
from .protocol import AdapterInfo
from .slot_pool import SlotPool


class AdapterUsers:
    """Requests by number. What they hold is known by the slots of `pool`, what a name means by `records`."""

    def __init__(self, records: Records, pool: SlotPool) -> None:
        self._records, self._pool = records, pool
        self._waiting: dict[int, frozenset[str]] = {}
        """request -> what it will need"""
        self._kept: dict[int, dict[str, str]] = {}
        """running request -> name -> what its content is called since that name was reloaded"""

    def of(self, name: str) -> tuple[int, ...]:
        """The requests that hold `name`, then those that wait for it."""
        waiting = (user for user, names in self._waiting.items() if name in names)
        return tuple(dict.fromkeys((*self._pool.users(name), *waiting)))

    def check_stays(self, wanted: Mapping[int | None, Iterable[str]]) -> None:
        """Raises AdapterError when a user may not have one of its names: not loaded, or being unloaded and not its own already."""
        for user, names in wanted.items():
            for name in names:
                if user not in self.of(name) and self._records.known(name).leaving:
                    raise AdapterError(f"adapter {name!r} is being unloaded; load it again once that is done")

    def expect(self, user: int, names: Iterable[str]) -> None:
        """`user` waits for `names`, in place of what it waited for before."""
        self._waiting[user] = frozenset(names)

    def wait_again(self, user: int) -> None:
        """`user` holds nothing any more and waits for what it held."""
        self._waiting[user] = self._pool.release(user)

    def begun(self, users: Iterable[int]) -> None:
        """They hold what they waited for."""
        for user in users:
            self._waiting.pop(user, None)

    def over(self, user: int) -> None:
        """`user` holds nothing, waits for nothing and means nothing any more."""
        self._waiting.pop(user, None)
        self._kept.pop(user, None)
        self._pool.release(user)

    def keep(self, users: Iterable[int], name: str, kept_as: str) -> None:
        """For `users` the name goes on to mean what is called `kept_as` now."""
        for user in users:
            self._kept.setdefault(user, {})[name] = kept_as

    def forget(self, kept_as: str) -> None:
        """Nobody means the old content `kept_as` any more."""
        for kept in self._kept.values():
            for name in [name for name, called in kept.items() if called == kept_as]:
                del kept[name]

    def infos(self, user: int | None) -> Mapping[str, AdapterInfo]:
        """What is loaded, by name, as `user` has it."""
        kept = self._kept.get(user, {}) if user is not None else {}
        return {**self._records.infos(), **{name: self._records[called].info for name, called in kept.items()}}

    def leavers(self) -> list[str]:
        """Names that are being unloaded and that nobody holds or waits for."""
        return [name for name, record in self._records.items() if record.leaving and not self.of(name)]
