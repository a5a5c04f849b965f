"""The host tier and the slots of one base, and the way of an adapter between them."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from .adapter_records import Records
from .adapters.adapter import Adapter, AdapterWeights
from .dora_rows import BaseSquares
from .host_cache import HostCache
from .models.facts import module_shapes
from .page_image import PageImage, build_image, page_needs
from .page_pool import PagePool
from .protocol import AdapterInfo, Emit
from .routing import Routing, RoutingCache
from .slot_content import build_content, check_adapter
from .slot_pool import Arrival, SlotPool
from .slots import fused_modules
from .untrained import leaves_base

if TYPE_CHECKING:
    from .models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Ready:
    """An adapter that has only to be placed."""

    arrival: Arrival
    adapter: Adapter


class Tiers:
    """Adapters by name in RAM (`host`) and on the device (`pool`); every move is emitted with its cause."""

    def __init__(self, decoder: Decoder, records: Records, slots: int, pages: int, host_bytes: int, emit: Emit) -> None:
        """`pages` of each kind of fused linear hold what adapters have of low rank; 0: it lies with the rest of them, as it comes."""
        self.host = HostCache(host_bytes, emit)
        self.pages = PagePool(decoder.facts, pages, decoder.dtype, decoder.device) if pages else None
        self.pool = SlotPool(slots, emit, self.pages)
        self._decoder, self._records = decoder, records
        self._squares = BaseSquares()
        shapes = module_shapes(decoder.facts)
        outputs = {key: [shapes[module][0] for module in modules] for key, modules in fused_modules(decoder.facts).items()}
        self._routings = RoutingCache(decoder.facts.layers, outputs, decoder.device, pool=self.pages)

    def rehearsal(self) -> Routing | None:
        """What steps of prompts are warmed up with (see RoutingCache.rehearsal)."""
        return self._routings.rehearsal()

    @property
    def composed_bytes(self) -> int:
        """Device bytes of adapters laid end to end for steps that use several at once, beside the slots."""
        return self._routings.copied_bytes

    def ready(self, name: str, adapter: Adapter, source: str = "host", read_ms: float = 0.0) -> Ready:
        """`adapter` made ready to enter a slot as `name`; any thread may. Raises AdapterError for numbers too large for the dtype."""
        began = perf_counter()
        image = adapter.image
        if image is None and self.page_needs(adapter.weights):
            image = self._image(adapter)
        content = build_content(adapter, self._decoder, self._squares, image)
        return Ready(Arrival(name, content, image, source, read_ms + (perf_counter() - began) * 1e3), adapter)

    def give_slots(
        self, names: Sequence[str], holds: Mapping[int, Sequence[str]], because: str, bring: Callable[[str], Ready],
    ) -> None:
        """Slots for `names`, those in `holds` held for its users. `bring` has what is in no slot. For errors see `SlotPool.plan`.

        All that can fail comes before any is evicted.
        """
        missing, victims = self.pool.plan(names, holds, self.needs(names))
        brought = [bring(name) for name in missing]
        for slot in self.pool.settle(names, [ready.arrival for ready in brought], victims, holds, because):
            self._routings.forget(slot)
        for ready in brought:
            arrival = ready.arrival
            if arrival.source == "disk" and self.host.has_room(ready.adapter):
                self.host.put(arrival.name, ready.adapter, arrival.ms, because)

    def page_needs(self, weights: AdapterWeights) -> dict[str, int]:
        """The pages that an adapter takes, by kind of fused linear; none where there are none. Any thread may ask."""
        return page_needs(weights, self.pages.shapes) if self.pages is not None else {}

    def needs(self, names: Iterable[str]) -> dict[str, Mapping[str, int]]:
        """name -> `page_needs` of it."""
        return {name: self._records[name].pages for name in names}

    def prepared(self, adapter: Adapter) -> Adapter:
        """`adapter` with the image of its pages, where there are pages and the host tier holds both; any thread may.

        Raises AdapterError for numbers that are too large for the dtype.
        """
        needs = self.page_needs(adapter.weights)
        if not needs or self.host_bytes(adapter.info, needs) == adapter.info.bytes:
            return adapter
        return replace(adapter, image=self._image(adapter))

    def host_bytes(self, info: AdapterInfo, needs: Mapping[str, int]) -> int:
        """What a prepared adapter takes of the host tier."""
        with_image = info.bytes + (self.pages.image_bytes(needs) if needs else 0)
        return with_image if with_image <= self.host.limit_bytes else info.bytes

    def check(self, adapter: Adapter) -> None:
        """Raises AdapterError for what no slot of this base could hold."""
        check_adapter(adapter, self._decoder)

    def leaves_base(self, adapter: Adapter) -> bool:
        """Whether `adapter` holds nothing but what this base has. Any thread may ask."""
        return leaves_base(adapter, self._decoder)

    def swap(
        self, name: str, adapter: Adapter, ms: float, ready: Ready | None, set_aside: Callable[[], str],
    ) -> tuple[tuple[int, ...], str]:
        """`adapter` in the place of what is called `name`; in its slot too, if it is `ready`. What can fail comes first.

        When requests hold the old content it keeps its slot for them, under the name that `set_aside()` gives. Returns (those
        requests, that name or "").
        """
        self.host.check_fits(adapter)
        slot, users = self.pool.get(name), self.pool.users(name)
        kept_as = set_aside() if users else ""
        if slot is not None:
            self._routings.forget(slot.index)
            if users:
                self.pool.rename(name, kept_as)
            else:
                self.pool.refill(name, ready.arrival if ready else None, "its file was read again")
        self.host.drop(name)
        self.host.put(name, adapter, ms)
        return users, kept_as

    def forget(self, name: str) -> int:
        """Take `name` out of both tiers; the bytes that it took."""
        if (slot := self.pool.get(name)) is not None:
            self._routings.forget(slot.index)
        self.pool.pinned.discard(name)
        return self.pool.remove(name) + self.host.drop(name)

    def place(self, name: str) -> tuple[Literal["slot", "host", "disk"], int]:
        """The fastest tier that has `name`, and its slot or -1."""
        slot = self.pool.get(name)
        return ("slot", slot.index) if slot is not None else ("host" if name in self.host else "disk", -1)

    def arriving(self, names: Iterable[str]) -> list[str]:
        """Those of `names`, all in slots, whose pages are still being filled."""
        return [name for name in dict.fromkeys(names) if (pages := self.pool.get(name).content.pages) and not self.pages.filled(pages)]

    def routing(self, names: Sequence[str]) -> Routing | None:
        """The composition of adapters that are in slots, in this order; None without any."""
        slots = [slot for name in names if (slot := self.pool.get(name)) is not None]
        if len(slots) != len(names):
            raise LookupError(f"of the adapters {list(names)} only {[slot.adapter for slot in slots]} are in slots; acquire them first")
        for slot in slots:
            if slot.content.pages is not None:
                self.pages.wait(slot.content.pages)
        return self._routings.get(slots) if slots else None

    def _image(self, adapter: Adapter) -> PageImage:
        return build_image(adapter, self.pages.shapes, self.pages.dtype, self.pages.pinned)
