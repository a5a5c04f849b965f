"""Tokenizers in adapters' folders: what they add, what they may not change, how text is cut with them."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizer_families import FAMILIES, gguf_metadata, of_fast, of_source, sentence_piece, texts
from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast

from lora_bench.engine.base_parts import TokenizerSource
from lora_bench.engine.chat import prompt_ids
from lora_bench.engine.protocol import Chat, Message
from lora_bench.engine.tokenizer import AddedVocabulary, TextStream, Tokenizer, read_added_vocabulary
from lora_bench.engine.weights.files import FormatError

NEW = ("<tool>", "</tool>", "newword")


def extended(fast: Fast, folder: Path, settings: dict | None = None, template: str | None = None) -> Fast:
    """The tokenizer with three more tokens, two of them special, saved as an adapter's."""
    more = Fast.from_str(fast.to_str())
    more.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in NEW[:2]])
    more.add_tokens([AddedToken(NEW[2], normalized=False)])
    folder.mkdir()
    more.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return more


@pytest.fixture(params=["byte-level, tokenizer.json", "byte-level, GGUF", "SentencePiece, tokenizer.json", "SentencePiece, GGUF"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Fast, Tokenizer]:
    kind, container = request.param.split(", ")
    fast = FAMILIES["qwen2, qwen3"][1]() if kind == "byte-level" else sentence_piece(True)
    if container == "GGUF":
        return fast, of_source(TokenizerSource(metadata=gguf_metadata(fast, pre="qwen2")), 4096)
    return fast, of_fast(fast, tmp_path)


def test_text_is_cut_as_the_adapter_cuts_it(base: tuple[Fast, Tokenizer], tmp_path: Path, seed: int) -> None:
    fast, tokenizer = base
    more = extended(fast, tmp_path / "adapter", {"eos_token": "</tool>"})
    size = fast.get_vocab_size()
    added = read_added_vocabulary(tmp_path / "adapter", tokenizer, rows=size + 3)
    assert added.tokens == {"<tool>": (size, True), "</tool>": (size + 1, True), "newword": (size + 2, False)}
    assert added.end_tokens == (size + 1,) and added.rowless == () and added.chat_template is None
    assert added.notes == (f"adds 3 tokens: '<tool>' ({size}), '</tool>' ({size + 1}), 'newword' ({size + 2})",)
    own = added.applied_to(tokenizer)
    assert own.end_tokens == (size + 1,) and tokenizer.end_tokens == () and own.special_texts["eos_token"] == "</tool>"
    before = {text: tokenizer.encode(text, special=True) for text in texts(seed, 20)}
    for special in (True, False):
        more.encode_special_tokens = not special
        for text in [*texts(seed, 40), "a<tool>b newword </tool>", "<tool><|im_start|></tool>"]:
            ids = more.encode(text, add_special_tokens=False).ids
            assert own.encode(text, special) == ids, text
            stream = TextStream(own)
            assert "".join(map(stream.push, ids)) + stream.finish() == own.decode(ids) == more.decode(ids)
    assert {text: tokenizer.encode(text, special=True) for text in before} == before, "the base's own tokenizer is untouched"
    assert size not in tokenizer.encode("<tool>", special=True) and tokenizer.decode([size]) == ""
    assert own.token_text([size, size + 2, size + 3]) == ["<tool>", "newword", f"<{size + 3}>"]


def test_ids_with_gaps(base: tuple[Fast, Tokenizer]) -> None:
    """Rows of a padded embedding, or new ones behind it: ids need not follow one another."""
    _, tokenizer = base
    own = tokenizer.with_added({"<a>": (4000, True), "<b>": (4100, False)})
    assert own.encode("x<b><a>", special=True)[-2:] == [4100, 4000]
    assert own.decode([4100, 4000, 4050]) == "<b>" and own.decode([4000], special=True) == "<a>" and own.token_text([4050]) == ["<4050>"]
    assert own.model_vocab == 4101 and tokenizer.model_vocab == 4096 and own.id_of("<a>") == 4000 and own.spelling(4100) == "<b>"
    assert tokenizer.with_added({}) is tokenizer
    twice = own.with_added({"<c>": (4050, True)})
    assert twice.encode("<a><c>", special=True)[-2:] == [4000, 4050] and own.encode("<c>", special=True) != [4050]


def test_a_copy_of_the_base_adds_nothing(base: tuple[Fast, Tokenizer], tmp_path: Path) -> None:
    fast, tokenizer = base
    (tmp_path / "adapter").mkdir()
    fast.save(str(tmp_path / "adapter" / "tokenizer.json"))
    added = read_added_vocabulary(tmp_path / "adapter", tokenizer, rows=4096)
    assert added == AddedVocabulary() and added.applied_to(tokenizer) is tokenizer and added.notes == ()
    (tmp_path / "empty").mkdir()
    assert read_added_vocabulary(tmp_path / "empty", tokenizer, rows=4096) == AddedVocabulary()


def test_tokens_without_a_row_stay_text_and_are_told(base: tuple[Fast, Tokenizer], tmp_path: Path) -> None:
    fast, tokenizer = base
    extended(fast, tmp_path / "adapter")
    added = read_added_vocabulary(tmp_path / "adapter", tokenizer, rows=fast.get_vocab_size() + 1)
    assert list(added.tokens) == ["<tool>"] and added.rowless == ("</tool>", "newword") and "no row in the embedding" in added.notes[1]


def test_a_row_that_the_base_keeps_free_gets_a_meaning(tmp_path: Path) -> None:
    fast = FAMILIES["gpt-2"][1]()
    fast.add_special_tokens([AddedToken(f"<|reserved_special_token_{i}|>", normalized=False, special=True) for i in range(3)])
    size = fast.get_vocab_size()
    tokenizer = of_fast(fast, tmp_path)
    changed = json.loads(fast.to_str())
    changed["added_tokens"][-2]["content"] = "<tool>"
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "tokenizer.json").write_text(json.dumps(changed))
    added = read_added_vocabulary(tmp_path / "adapter", tokenizer, rows=size)
    assert added.tokens == {"<tool>": (size - 2, True)}
    own = added.applied_to(tokenizer)
    assert own.encode("<tool>", special=True) == [size - 2] and own.token_text([size - 2]) == ["<tool>"]


def change(known: dict, kind: str) -> None:
    if kind == "an id means another text":
        known["added_tokens"][3]["content"] = "<|other|>"
    elif kind == "a text has another id":
        known["added_tokens"].append({**known["added_tokens"][-1], "id": 3000, "content": "a"})
    else:
        known["model"]["vocab"]["more"] = 3000


@pytest.mark.parametrize("kind, words", [
    ("an id means another text", r"the token 3 is '<\|other\|>' here and '<\|im_start\|>' in the base"),
    ("a text has another id", "'a' is 3,000 here and"),
    ("more words", r"'more' \(3,000\) that the base has not, and not as an added token"),
])
def test_contradictions(kind: str, words: str, tmp_path: Path) -> None:
    fast = FAMILIES["gpt-2"][1]()
    tokenizer = of_fast(fast, tmp_path)
    (tmp_path / "adapter").mkdir()
    known = json.loads(fast.to_str())
    change(known, kind)
    (tmp_path / "adapter" / "tokenizer.json").write_text(json.dumps(known))
    with pytest.raises(FormatError, match=words):
        read_added_vocabulary(tmp_path / "adapter", tokenizer, rows=4096)


@pytest.mark.parametrize("file, content", [
    ("added_tokens.json", {"<tool>": 3000}),
    ("tokenizer_config.json", {"added_tokens_decoder": {"3000": {"content": "<tool>", "special": True}}}),
])
def test_folders_that_only_list_their_tokens(file: str, content: dict, tmp_path: Path) -> None:
    tokenizer = of_fast(FAMILIES["gpt-2"][1](), tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / file).write_text(json.dumps(content))
    assert read_added_vocabulary(tmp_path / "adapter", tokenizer, rows=4096).tokens == {"<tool>": (3000, True)}


def test_chat_with_the_adapters_own_template(tmp_path: Path) -> None:
    fast = FAMILIES["gpt-2"][1]()
    tokenizer = of_fast(fast, tmp_path)
    extended(fast, tmp_path / "adapter", {"eos_token": "</tool>"},
             "{% for m in messages %}<tool>{{ m.content }}{{ eos_token }}{% endfor %}")
    added = read_added_vocabulary(tmp_path / "adapter", tokenizer, rows=4096)
    own = added.applied_to(tokenizer)
    ids, text = prompt_ids(own, added.chat_template, Chat((Message("user", "hi</tool>"),)))
    size = fast.get_vocab_size()
    assert text == "<tool>hi</tool></tool>" and (ids[0], ids[-1]) == (size, size + 1)
    assert ids.count(size + 1) == 1, "what is typed stays text"
