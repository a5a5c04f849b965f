"""What is loaded: bases, adapters, where an adapter acts, what a reply took."""
from __future__ import annotations

from .words import Struct


class ModelInfo(Struct):
    name: str
    path: str
    format: str
    """"gguf" or "safetensors" """
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    context: int
    """tokens a request may hold here"""
    trained_context: int
    parameters: int
    file_bytes: int
    weight_bytes: int
    """bytes of the weights in memory"""
    weight_types: dict[str, int]
    """tensor type in the file -> number of tensors"""
    device: str
    dtype: str
    tied: bool
    threads: int
    linear_modules: int
    chat_template: bool
    end_tokens: tuple[int, ...]
    notes: tuple[str, ...] = ()
    """things a user should know that did not stop the load"""
    weights: str = "dense"
    """"dense": numbers of `dtype`; "packed": matrices as they lie in the file, where that is smaller"""


class AdapterInfo(Struct):
    """What an adapter is and what of it acts on this base."""

    name: str
    path: str
    format: str
    digest: str
    """hex sha256 of its tensors' content and the fields that give them meaning; equal content, equal digest"""
    ranks: tuple[int, ...]
    """distinct ranks, ascending"""
    effective_scales: tuple[float, ...]
    """distinct alpha/r (or alpha/sqrt(r)) over its modules, ascending; multiplied by the user's scale"""
    matched: int
    """modules of the file that are in the base"""
    total: int
    """modules of the file"""
    targets: dict[str, int]
    """module kind (q_proj, ...) -> how many layers"""
    bytes: int
    """bytes of its tensors as kept in memory"""
    rslora: bool
    dtype: str
    base_model: str
    """what the adapter says it was trained on; untrusted text"""
    invocation: str = ""
    """aLoRA invocation as text, "" for a plain LoRA"""
    invocation_tokens: tuple[int, ...] = ()
    invocation_in_reply: bool = False
    """it also begins to act where the model itself writes the invocation"""
    unmatched: tuple[str, ...] = ()
    """the first of the modules of the file that have no place in the base, as the file names them"""
    outside: int = 0
    """modules of the file that its config leaves out, so that they do not act"""
    dora: bool = False
    replaced: tuple[str, ...] = ()
    """tensors of the base that whole tensors of the file stand for, by canonical name"""
    token_rows: dict[str, int] = {}
    """"embed_tokens.weight" / "lm_head.weight" -> how many of its rows were trained by themselves"""
    added_rows: int = 0
    """tokens that it adds to the base's vocabulary"""
    task: str = ""
    """what it is for, as its file says; as the next three untrusted and cut"""
    prompt_prefix: str = ""
    """what it expects before a prompt; offered, never applied unasked"""
    card: dict[str, str] = {}
    """of its model card: base_model, license, tags, ..."""
    metadata: dict[str, str] = {}
    """of its weights' file"""
    norms: tuple[float, ...] = ()
    """Frobenius norm of scale * B A summed in squares over the modules of a layer, by layer; what else it changes is in its check alone"""
    notes: tuple[str, ...] = ()
    """things a user should know that did not stop the load"""


class Activation(Struct):
    """Where one adapter of a mix starts to act in a prompt."""

    adapter: str
    found: bool
    start: int
    """index of the first token it acts on; -1 when not found"""
    length: int
    """tokens of the invocation; 0 for a plain LoRA, which is not reported"""
    detail: str
    """one clause that no other field says: the matched text, or the nearest miss"""
    tokens: tuple[str, ...] = ()
    """where it was found, the invocation token by token as it stands there; with what is around it untrusted"""
    before: str = ""
    """the text of a few tokens right before it, and right behind it"""
    after: str = ""


class RequestStats(Struct):
    prompt_tokens: int
    new_tokens: int
    ttft_ms: float
    """from the arrival of Generate to the first token; 0 when there was none"""
    prefill_ms: float
    decode_ms: float
    decode_tokens_per_second: float
    seed: int
