"""What a folder says of its tokenizer: tokenizer.json, tokenizer_config.json and their kin, the chat template. No torch, no tokenizers."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .base_parts import TokenizerSource, token_id
from .tokenizer_older import listed_tokens, older_tokenizer
from .tokenizer_sizes import check_added, check_pieces
from .weights.files import FormatError, present, read_bounded, read_json_object, show

MAX_TEMPLATE_BYTES = 1 << 20
ANY_ID = 1 << 31
_SHOWN = 5
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")

AddedTokens = dict[str, tuple[int, bool]]
"""content -> (id, special)"""


def folder_tokenizer(folder: Path, config: dict[str, Any], vocab: int) -> tuple[TokenizerSource, AddedTokens]:
    """The source, and the added tokens. `config` (config.json) names tokens that the tokenizer's own files do not.

    Raises FormatError naming the file and what in it cannot be honoured, OSError.
    """
    settings = tokenizer_settings(folder)
    path = folder / "tokenizer.json"
    if present(path):
        known = read_json_object(path)
        check_pieces(_unigram_pieces(known.get("model")), path)
        added = added_tokens(known, path, ANY_ID)
        ids, metadata, strips = _ids(known, added), None, {}
        more = _more(folder, settings, ids)
    else:
        tokens = older_tokenizer(folder, settings, vocab)
        path, metadata, strips = tokens.path, tokens.metadata, tokens.strips
        added, more, ids = tokens.added, {}, {text: i for i, text in enumerate(metadata["tokenizer.ggml.tokens"])}
    rowless = {text: number for text, (number, _) in (added | more).items() if number >= vocab}
    added, more = ({text: entry for text, entry in tokens.items() if text not in rowless} for tokens in (added, more))
    ids |= {text: number for text, (number, _) in more.items()}
    texts = token_texts(settings)
    _refuse_needed(rowless, texts, chat_template(folder) or "", path, vocab)
    bos, eos = (ids.get(texts[name]) if name in texts else None for name in ("bos_token", "eos_token"))
    add_bos = settings.get("add_bos_token")
    return TokenizerSource(
        metadata=metadata, path=path, texts=texts, strips=strips, more=more, rowless=tuple(rowless),
        bos=bos if bos is not None else _first_id(config.get("bos_token_id"), vocab, "bos_token_id", folder),
        eos=eos if eos is not None else _first_id(config.get("eos_token_id"), vocab, "eos_token_id", folder),
        add_bos=add_bos if isinstance(add_bos, bool) else None, added={text: number for text, (number, _) in added.items()},
    ), added | more


def rowless_note(texts: Sequence[str]) -> str:
    """What to say of tokens that a tokenizer names and the embedding has no row for; "" for none."""
    if not texts:
        return ""
    names = ", ".join(map(show, texts[:_SHOWN])) + (", …" if len(texts) > _SHOWN else "")
    return f"its tokenizer names tokens that have no row in the embedding ({names}); they stay text"


def _refuse_needed(rowless: Mapping[str, int], texts: Mapping[str, str], template: str, path: Path, vocab: int) -> None:
    """Raises FormatError where a token without a row in the embedding is one that every chat needs."""
    needs = {texts[name]: f"is the {name}" for name in ("bos_token", "eos_token") if name in texts}
    for text, number in rowless.items():
        need = needs.get(text) or ("stands in the chat template" if text and text in template else None)
        if need is not None:
            raise FormatError(f"{path}: the token {show(text)} ({number:,}) {need}, but the embedding has rows for {vocab:,} tokens alone; "
                              "the weights are not those that go with this tokenizer, download or save them together")


def _more(folder: Path, settings: dict[str, Any], ids: dict[str, int]) -> AddedTokens:
    """Tokens that tokenizer_config.json lists and tokenizer.json has not: they belong to it, as transformers adds them.

    Raises FormatError for one whose id is another token's.
    """
    path, listed = listed_tokens(folder, settings)
    more = {token["content"]: (i, token.get("special") is True) for i, token in listed.items() if token["content"] not in ids}
    taken = {i for i, _ in more.values()} & set(ids.values()) if more else ()
    for text, (number, _) in more.items():
        if number in taken:
            raise FormatError(f"{path}: names {show(text)} as token {number:,}, which is another one in tokenizer.json; "
                              "the two files are of different tokenizers, download the folder again")
    return more


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """special_tokens_map.json and tokenizer_config.json as one; the latter wins."""
    settings: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= read_json_object(folder / file) if present(folder / file) else {}
    return settings


def token_texts(settings: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, unk_token, pad_token as far as the settings name them."""
    return {name: text for name in _TOKEN_NAMES if (text := _token_text(settings.get(name))) is not None}


def added_tokens(known: dict[str, Any], path: Path, vocab: int) -> AddedTokens:
    """The added tokens of a tokenizer.json. Raises FormatError for ids from `vocab` on."""
    tokens, added = known.get("added_tokens") or [], {}
    if not isinstance(tokens, list) or not all(map(_is_token, tokens)):
        raise FormatError(f"{path}: added_tokens is no list of tokens with their id and content; download the file again")
    check_added([token["content"] for token in tokens], path)
    for token in tokens:
        text = token["content"]
        added[text] = (token_id(token["id"], vocab, f"the id of added token {show(text)}", path), token.get("special") is True)
    return added


def _unigram_pieces(model: Any) -> list[str]:
    """The texts of a unigram model's vocabulary; none for other models, and for what is no vocabulary."""
    vocab = model.get("vocab") if isinstance(model, dict) and model.get("type") == "Unigram" else None
    return [entry[0] for entry in vocab if isinstance(entry, list) and entry
            and isinstance(entry[0], str)] if isinstance(vocab, list) else []


def _is_token(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str) and value.get("id") is not None


def chat_template(folder: Path) -> str | None:
    """chat_template.jinja wins; then tokenizer_config.json, its "default" where there are several."""
    file = folder / "chat_template.jinja"
    if present(file):
        return read_bounded(file, MAX_TEMPLATE_BYTES).decode("utf-8", errors="replace")
    for name in ("tokenizer_config.json", "chat_template.json"):
        template = read_json_object(folder / name).get("chat_template") if present(folder / name) else None
        if isinstance(template, list):
            template = next((entry.get("template") for entry in template if isinstance(entry, dict) and entry.get("name") == "default"),
                            None)
        if isinstance(template, str):
            return template
    return None


def _token_text(value: Any) -> str | None:
    """A token in tokenizer_config.json: its text, or an object that has it as content."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _ids(known: dict[str, Any], added: AddedTokens) -> dict[str, int]:
    """Spelling -> id of a tokenizer.json, as far as its vocabulary is one of texts to ids."""
    model = known.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids = {text: number for text, number in vocab.items() if type(number) is int} if isinstance(vocab, dict) else {}
    return ids | {text: number for text, (number, _) in added.items()}


def _first_id(value: Any, vocab: int, what: str, folder: Path) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    return token_id(value, vocab, what, folder / "config.json")
