"""An adapter brought to the device in the dtype of its base."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..kernels.dora import RowStats
from ..kernels.weights import row_chunks, rows
from .adapters.adapter import VOCABULARY, Adapter, LoraPair, TokenRows
from .adapters.errors import AdapterError
from .dora_rows import EMBEDDING, BaseSquares, DoraRows, Place, embedding_stats, linear_stats
from .finite import check_finite
from .models.facts import module_shapes
from .page_image import PageImage
from .slots import FusedPart, SlotContent, VocabularyPart, fused_modules

if TYPE_CHECKING:
    from .models.decoder import Decoder

PRODUCT_ROWS = 256
"""of a product in double precision that are held at once"""


def build_content(adapter: Adapter, decoder: Decoder, squares: BaseSquares, image: PageImage | None = None) -> SlotContent:
    """`adapter` as a slot of this base holds it, but for what `image` has for pages; scaling is folded into B in fp32 before it is rounded
    to the dtype.

    `squares` keeps what DoRA needs of the base. Raises AdapterError for numbers that are too large for the dtype.
    """
    return _Builder(adapter, decoder, squares, image).content()


def check_adapter(adapter: Adapter, decoder: Decoder) -> None:
    """Raises AdapterError for what can be told before a slot is filled: DoRA on a matrix of which the adapter has another than the base,
    and low-rank products that no number of the dtype holds, though A and B are finite."""
    for module, pair in adapter.modules.items():
        _check_product(adapter, module, pair, decoder.dtype)
    if adapter.weights.embedding is not None:
        _check_product(adapter, "embed_tokens", adapter.weights.embedding, decoder.dtype)
    builder = _Builder(adapter, decoder, BaseSquares())
    for name in VOCABULARY:
        pair = adapter.weights.embedding if name.startswith("embed") else adapter.modules.get("lm_head")
        if pair is not None and pair.magnitude is not None:
            builder.check_is_base(name)


class _Builder:
    def __init__(self, adapter: Adapter, decoder: Decoder, squares: BaseSquares, image: PageImage | None = None) -> None:
        self._adapter, self._weights, self._decoder, self._squares = adapter, adapter.weights, decoder, squares
        self._in_pages = image.ranks if image is not None else {}
        self._device, self._dtype = decoder.device, decoder.dtype
        self._shapes = module_shapes(decoder.facts)
        self._moved: dict[tuple[int, int], Tensor] = {}
        """by the addresses of the adapter's tensors that it was made of: tied matrices are held once"""

    def content(self) -> SlotContent:
        weights = self._weights
        parts, lora_biases = dict(self._parts()), dict(self._lora_biases())
        biases, norms = self._biases(), self._norms()
        embedding, head = self._embedding(), self._head()
        stats = dict(self._stats())
        dora = DoraRows(stats) if stats else None
        tensors = [tensor for part in parts.values() for tensor in (part.a, *part.b) if tensor is not None]
        tensors += [*lora_biases.values(), *biases.values(), *norms.values()]
        tensors += (tensor for part in (embedding, head) if part for tensor in part.tensors)
        return SlotContent(
            parts, nbytes_once(tensors) + (dora.nbytes if dora else 0), max((pair.rank for pair in weights.pairs), default=0),
            lora_biases, biases, norms, embedding, head, dora)

    def _parts(self) -> Iterator[tuple[Place, FusedPart]]:
        for place, modules in fused_modules(self._decoder.facts).items():
            pairs = [self._weights.modules.get(module) for module in modules]
            present = [pair for pair in pairs if pair is not None]
            if not present or self._is_in_pages(place):
                continue
            what = f"the weights of {' or '.join(modules)} times their effective scale"
            a = self._checked(torch.cat([pair.a.to(self._device, self._dtype) for pair in present]), what)
            yield place, FusedPart(a, tuple(None if pair is None else self._checked(self._expand_factor(pair), what) for pair in pairs))

    def _is_in_pages(self, place: Place) -> bool:
        layer, kind = place
        ranks = self._in_pages.get(kind)
        return ranks is not None and bool(ranks[0 if kind == "lm_head" else layer].any())

    def _expand_factor(self, pair: LoraPair) -> Tensor:
        """scaling * B^T [r, d_out], contiguous."""
        return pair.b.to(self._device, torch.float32).mul(pair.scaling).T.contiguous().to(self._dtype)

    def _lora_biases(self) -> Iterator[tuple[Place, Tensor]]:
        for place, modules in fused_modules(self._decoder.facts).items():
            pairs = {module: self._weights.modules[module] for module in modules if module in self._weights.modules}
            vectors = {module: pair.bias.to(self._device, torch.float32) * pair.scaling
                       for module, pair in pairs.items() if pair.bias is not None}
            if vectors:
                yield place, self._checked(self._joined(modules, vectors),
                                           f"the biases of {' or '.join(modules)} times their effective scale")

    def _joined(self, modules: Iterable[str], vectors: Mapping[str, Tensor]) -> Tensor:
        """A vector over the outputs of a fused linear, zero for the modules that have none."""
        return torch.cat([
            vectors[module].to(self._dtype) if module in vectors
            else torch.zeros(self._shapes[module][0], dtype=self._dtype, device=self._device)
            for module in modules])

    def _biases(self) -> dict[Place, Tensor]:
        found = {name.removesuffix(".bias"): self._difference(name) for name in self._weights.replaced if name.endswith(".bias")}
        return {
            place: self._joined(modules, found)
            for place, modules in fused_modules(self._decoder.facts).items() if any(module in found for module in modules)
        }

    def _norms(self) -> dict[Place, Tensor]:
        layers = self._decoder.facts.layers
        found = {}
        for name in self._weights.replaced:
            if name.endswith("norm.weight"):
                _, layer, inner = name.split(".", 2) if name.startswith("layers.") else ("", str(layers), name)
                found[int(layer), inner.removesuffix(".weight")] = self._difference(name).to(self._dtype)
        return found

    def _difference(self, name: str) -> Tensor:
        """What replaces a bias or a norm, minus the base's, fp32."""
        difference = self._weights.replaced[name].to(self._device, torch.float32) - self._decoder.vector_of(name).float()
        self._checked(difference.to(self._dtype), f"the trained values of {name}")
        return difference

    def _embedding(self) -> VocabularyPart | None:
        pair, replaced, trained = self._weights.embedding, *self._vocabulary("embed_tokens.weight")
        if pair is None and replaced is None and trained is None:
            return None
        a = b = None
        if pair is not None:
            what = "the LoRA of embed_tokens times its effective scale"
            a = self._checked(pair.a.to(self._device, self._dtype).T.contiguous(), what)
            b = self._checked(self._expand_factor(pair), what)
        ids, values = (None, None) if trained is None else (
            trained.ids.to(self._device), self._move(trained.values, "trained rows of embed_tokens"))
        return VocabularyPart(a, b, replaced, ids, values, _size(replaced, trained))

    def _head(self) -> VocabularyPart | None:
        replaced, trained = self._vocabulary("lm_head.weight")
        if replaced is None and trained is None:
            return None
        if trained is None:
            return VocabularyPart(replaced=replaced, size=_size(replaced, None))
        ids = trained.ids.to(self._device)
        weight, _, _ = self._decoder.rows_of("lm_head")
        known = (ids < weight.shape[0]).unsqueeze(1)
        base = rows(weight, ids.clamp(max=weight.shape[0] - 1)).float() * known
        differences = (trained.values.to(self._device, torch.float32) - base).to(self._dtype)
        return VocabularyPart(ids=ids, rows=self._checked(differences, "trained rows of lm_head"), size=_size(None, trained))

    def _vocabulary(self, name: str) -> tuple[Tensor | None, TokenRows | None]:
        """What stands for the whole matrix, with trained rows written into it; else the trained rows alone."""
        replaced, trained = self._weights.replaced.get(name), self._weights.rows.get(name)
        if replaced is not None and self._is_base(name, replaced):
            replaced = None
        if replaced is None:
            return None, trained
        return self._move(replaced, f"the trained values of {name}", trained), None

    def _is_base(self, name: str, replaced: Tensor) -> bool:
        """Whether it is a copy of the base's matrix: PEFT saves one beside a LoRA on the embedding."""
        weight, _, _ = self._decoder.rows_of(name.removesuffix(".weight"))
        if tuple(replaced.shape) != tuple(weight.shape):
            return False
        return all(torch.equal(replaced[first:first + chunk.shape[0]].to(chunk.device, self._dtype).float(), chunk)
                   for first, chunk in row_chunks(weight))

    def _stats(self) -> Iterator[tuple[Place, RowStats]]:
        for place, modules in fused_modules(self._decoder.facts).items():
            present = [module for module in modules if module in self._weights.modules]
            if any(self._weights.modules[module].magnitude is not None for module in present):
                self.check_is_base(f"{present[0]}.weight")
                weight, _, _ = self._decoder.rows_of(present[0])
                pairs = [(self._decoder.rows_of(module)[1], self._weights.modules[module]) for module in present]
                yield place, linear_stats(place, weight, pairs, self._squares)
        pair = self._weights.embedding
        if pair is not None and pair.magnitude is not None:
            self.check_is_base("embed_tokens.weight")
            weight, _, _ = self._decoder.rows_of("embed_tokens")
            yield EMBEDDING, embedding_stats(weight, pair, pair.magnitude, self._squares)

    def check_is_base(self, name: str) -> None:
        replaced = self._weights.replaced.get(name)
        if replaced is not None and not self._is_base(name, replaced):
            raise AdapterError(f"{self._adapter.info.path}: has DoRA on {name} and another {name} than the base: the lengths of "
                               "its rows are of that matrix; load the base that it was trained on")

    def _move(self, tensor: Tensor, what: str, trained: TokenRows | None = None) -> Tensor:
        """`tensor` of the adapter on the device, with the trained rows written into it."""
        key = tensor.data_ptr(), 0 if trained is None else trained.values.data_ptr()
        if key not in self._moved:
            moved = tensor.to(self._device, self._dtype, copy=trained is not None)
            if trained is not None:
                moved[trained.ids.to(self._device)] = trained.values.to(self._device, self._dtype)
            self._moved[key] = self._checked(moved, what)
        return self._moved[key]

    def _checked(self, tensor: Tensor, what: str) -> Tensor:
        return check_finite(tensor, self._adapter, what)


def _check_product(adapter: Adapter, module: str, pair: LoraPair, dtype: torch.dtype) -> None:
    """The whole product is made only where the largest elements of A and B do not rule it out that one of its own is too large."""
    limit = torch.finfo(dtype).max
    bound = abs(pair.scaling) * pair.rank * pair.a.abs().max().item() * pair.b.abs().max().item()
    if bound <= limit:
        return
    a = pair.a.double()
    if any((b.double() @ a).mul_(pair.scaling).abs_().max().item() > limit for b in pair.b.split(PRODUCT_ROWS)):
        raise AdapterError(f"{adapter.info.path}: B A of {module} times its effective scale holds numbers that are too large for "
                           f"{str(dtype).removeprefix('torch.')}; the file is damaged or its training diverged: use an earlier checkpoint")


def _size(replaced: Tensor | None, trained: TokenRows | None) -> int:
    if replaced is not None:
        return replaced.shape[0]
    return int(trained.ids[-1]) + 1 if trained is not None and len(trained.ids) else 0


def nbytes_once(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors; what lies at one address counts once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())
