"""The tensors of an adapter file, read and fitted to a base."""
from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..models.facts import ModelFacts
from ..models.names import permuted_heads
from .adapter import Adapter, AdapterWeights, LoraPair
from .describe import describe
from .file import AdapterFile
from .fitting import check_pairs, check_settings, check_whole, vocabulary_rows
from .fused import regroup
from .gguf import FORMAT as GGUF
from .gguf import canonical
from .keys import sort_names
from .match import Places, match
from .scales import effective_scales, pattern_notes
from .tensors import Advance, TensorSource, open_tensors
from .vocabulary import shared_with_head, token_rows
from .where import within


def load_adapter(file: AdapterFile, facts: ModelFacts, name: str, advance: Advance = lambda count: None) -> Adapter:
    """Read the tensors of `file` into RAM and fit them to the base `facts`. Errors as of `open_adapter`.

    `advance` is told the bytes of every piece that was read; what it raises ends the load.
    """
    source = open_tensors(file, advance)
    names = file.names if file.names is not None else sort_names(source.names, file.weights_path)
    if file.format == GGUF:
        names = canonical(names, file.architecture, facts, file.weights_path)
    places = shared_with_head(within(match(names, facts, file.weights_path), facts, file), facts, file.settings)
    check_settings(file, places, facts)
    check_whole(file, places, source.shapes, facts)
    vocab = vocabulary_rows(places, source.shapes, facts)
    scalings = effective_scales(file, places.pairs, source.shapes)
    check_pairs(file, places, source.shapes, vocab, facts)
    weights = _read(file, places, source, scalings, vocab, facts)
    return Adapter(describe(file, name, weights, places, names, facts, pattern_notes(file, places.pairs)), weights)


def _read(
    file: AdapterFile, places: Places, source: TensorSource, scalings: Mapping[str, float], vocab: Mapping[str, int], facts: ModelFacts,
) -> AdapterWeights:
    loaded = {module: source.pair(pair, scalings[module]) for module, pair in sorted(places.pairs.items())}
    embedding = loaded.pop("embed_tokens", None)
    if file.format == GGUF:
        loaded = {module: _hugging_face_rows(pair, module, facts) for module, pair in loaded.items()}
    return AdapterWeights(
        modules=dict(sorted(regroup(loaded, facts, file.weights_path).items())), embedding=embedding,
        replaced=_whole(file, places, source, facts), rows=token_rows(file, places, source, vocab),
        tokenizer_json=file.tokenizer_json)


def _whole(file: AdapterFile, places: Places, source: TensorSource, facts: ModelFacts) -> dict[str, Tensor]:
    """By canonical name; what stands for two of the base's is one tensor. Norms are as the base has them in memory."""
    read: dict[str, Tensor] = {}
    result = {}
    for place, whole in sorted(places.whole.items()):
        tensor = read.get(whole.name)
        if tensor is None:
            tensor = read[whole.name] = source.tensor(whole.name)
        offset = facts.norm_offset if file.format != GGUF and place.removesuffix(".weight").endswith("norm") else 0.0
        result[place] = tensor.float() + offset if offset else tensor
    return result


def _hugging_face_rows(pair: LoraPair, module: str, facts: ModelFacts) -> LoraPair:
    """GGUF files of some architectures hold the rows of q and k, and so those of B, in another order."""
    heads = permuted_heads(facts, module)
    if heads is None:
        return pair
    b = pair.b.view(heads, facts.head_dim // 2, 2, -1).transpose(1, 2).reshape(pair.b.shape).contiguous()
    return LoraPair(pair.a, b, pair.scaling)
