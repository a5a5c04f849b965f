"""Ids and text both ways: the default base against golden ids, SentencePiece against a plain merge, streams against whole decoding."""
from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Fast

from lora_bench.engine.base_file import open_base
from lora_bench.engine.base_parts import TokenizerSource
from lora_bench.engine.tokenizer import TextStream, Tokenizer
from lora_bench.engine.tokenizer.pre import PRE_TOKENIZERS
from lora_bench.engine.tokenizer.token_bytes import byte_alphabet
from lora_bench.engine.weights.files import FormatError


@pytest.fixture(scope="module")
def sample(sample_base: Path) -> Tokenizer:
    return Tokenizer(open_base(sample_base))


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = TextStream(tokenizer)
    return [*(stream.push(i) for i in ids), stream.finish()]


def of_source(source: TokenizerSource, vocab: int) -> Tokenizer:
    """A tokenizer of a base of which only the tokenizer matters."""
    return Tokenizer(SimpleNamespace(tokenizer=source, facts=SimpleNamespace(vocab=vocab), end_tokens=(), path=Path("x.gguf")))


# -- the default base -----------------------------------------------------------------------------
def test_golden_strings(sample: Tokenizer, golden: Path) -> None:
    """Strings and ids from llama.cpp and the tokenizers library, which agree on all of them."""
    cases = json.loads((golden / "tokenizer.json").read_text())
    assert len(cases) > 200
    for case in cases:
        assert sample.encode(case["text"], special=True) == case["ids"], case["text"]
        assert sample.decode(case["ids"], special=True) == case["text"]
        assert "".join(streamed(sample, case["ids"])) == sample.decode(case["ids"])


def test_golden_prompts(sample: Tokenizer, golden: Path) -> None:
    for prompt in json.loads((golden / "prompts.json").read_text()).values():
        assert sample.encode(prompt["text"], special=True) == prompt["ids"]


def test_special_tokens_are_parsed_only_when_asked(sample: Tokenizer) -> None:
    assert sample.encode("<|im_end|>", special=True) == [2]
    as_text = sample.encode("<|im_end|>", special=False)
    assert len(as_text) > 3 and 2 not in as_text and sample.decode(as_text) == "<|im_end|>"
    assert sample.decode([2]) == "" and sample.decode([2], special=True) == "<|im_end|>"
    assert sample.token_text([1, 2]) == ["<|im_start|>", "<|im_end|>"] and 2 in sample.end_tokens
    assert sample.encode("<|im_end|>", special=True) == [2], "the switch of the call before leaves no trace"


def test_any_text_comes_back(sample: Tokenizer, seed: int) -> None:
    chance = random.Random(seed)
    pools = ["abc XYZ 019", "àéîøß", "漢字かな", "👨‍👩‍👧🦜😀", " \t\n\r", "'\"<|>[]{}", "\u202e\u200b\x00\x1b", "ÿĀġ▁"]
    for _ in range(300):
        text = "".join(chance.choice(chance.choice(pools)) for _ in range(chance.randint(0, 30)))
        ids = sample.encode(text, special=False)
        assert sample.decode(ids) == text
        pieces = streamed(sample, ids)
        assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


def test_any_ids_stream_as_they_decode(sample: Tokenizer, seed: int) -> None:
    """Random ids make bytes that are no UTF-8, too."""
    chance = random.Random(seed)
    for _ in range(300):
        ids = [chance.randrange(-2, sample.vocab_size + 3) for _ in range(chance.randint(0, 40))]
        assert "".join(streamed(sample, ids)) == sample.decode(ids)


def test_a_lone_surrogate_is_no_crash(sample: Tokenizer) -> None:
    assert sample.decode(sample.encode("a\ud800b", special=True)) == "a?b"


def test_ids_beyond_the_vocabulary_have_no_text(sample: Tokenizer) -> None:
    assert sample.vocab_size == sample.model_vocab == 49152
    assert sample.decode([49152, -1]) == "" and sample.token_text([49152]) == ["<49152>"]


# -- streams --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def byte_tokens() -> Tokenizer:
    """Byte-level, one token a byte: id = byte, then </s> as 256."""
    texts = [text for text, _ in sorted(byte_alphabet().items(), key=lambda item: item[1])]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": [*texts, "</s>"],
                "tokenizer.ggml.token_type": [1] * 256 + [3], "tokenizer.ggml.merges": []}
    return of_source(TokenizerSource(metadata=metadata), 257)


@pytest.mark.parametrize("data, pieces", [
    ("Hi 😀".encode(), ["H", "i", " ", "", "", "", "😀", ""]),
    ("é".encode() + b"!", ["", "é", "!", ""]),
    (b"end " + "😀".encode()[:2], ["e", "n", "d", " ", "", "", "\ufffd"]),
    (b"\xff\xfeok", ["\ufffd", "\ufffd", "o", "k", ""]),
    ("😀".encode()[:3] + b"a", ["", "", "", "\ufffda", ""]),
    (b"\xc0\x80", ["\ufffd", "\ufffd", ""]),
    (b"", [""]),
])
def test_characters_come_whole(byte_tokens: Tokenizer, data: bytes, pieces: list[str]) -> None:
    assert streamed(byte_tokens, list(data)) == pieces
    assert byte_tokens.decode(data) == "".join(pieces) == data.decode("utf-8", errors="replace")


def test_end_tokens_have_no_text_even_inside_a_character(byte_tokens: Tokenizer) -> None:
    half = "é".encode()
    assert streamed(byte_tokens, [half[0], 256, half[1]]) == ["", "", "é", ""]


# -- SentencePiece --------------------------------------------------------------------------------
def spm_metadata(seed: int, prefix: bool = True) -> dict:
    """A random vocabulary: <unk> <s> </s>, 256 bytes, characters, and unions of pieces, with distinct scores."""
    chance = random.Random(seed)
    pieces = list("▁abcdé")
    while len(pieces) < 60:
        union = chance.choice(pieces) + chance.choice(pieces)
        if union not in pieces and len(union) < 9:
            pieces.append(union)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|x y|>"]
    scores = [0.0] * 259 + [-float(n) for n in chance.sample(range(1000), len(pieces))] + [0.0]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(pieces) + [4], "tokenizer.ggml.add_space_prefix": prefix,
    }


def plain_sentence_piece(metadata: dict, text: str) -> list[int]:
    """The algorithm as described: join the neighbours whose union scores highest, the leftmost first; what is no piece goes as bytes."""
    tokens, scores, kinds = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    numbers = {token: i for i, token in enumerate(tokens) if kinds[i] == 1}
    symbols = list(("▁" if metadata["tokenizer.ggml.add_space_prefix"] and text else "") + text.replace(" ", "▁"))
    while True:
        joins = [(-scores[numbers[a + b]], i) for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False)) if a + b in numbers]
        if not joins:
            break
        at = min(joins)[1]
        symbols[at:at + 2] = [symbols[at] + symbols[at + 1]]
    return [i for symbol in symbols for i in ([numbers[symbol]] if symbol in numbers else [3 + byte for byte in symbol.encode()])]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_piece_equals_a_plain_merge(prefix: bool, seed: int) -> None:
    metadata = spm_metadata(seed, prefix)
    tokenizer = of_source(TokenizerSource(metadata=metadata), len(metadata["tokenizer.ggml.tokens"]))
    chance = random.Random(seed + 1)
    for _ in range(200):
        text = "".join(chance.choice("aabbccddé  \n😀<") for _ in range(chance.randint(0, 25)))
        ids = tokenizer.encode(text, special=True)
        assert ids == plain_sentence_piece(metadata, text), text
        assert tokenizer.decode(ids) == text
        assert "".join(streamed(tokenizer, ids)) == text


def test_sentence_piece_adds_bos_unless_told_otherwise() -> None:
    metadata = spm_metadata(1)
    count = len(metadata["tokenizer.ggml.tokens"])
    assert of_source(TokenizerSource(metadata=metadata, bos=1), count).add_bos is True
    assert of_source(TokenizerSource(metadata=metadata, bos=1, add_bos=False), count).add_bos is False


def test_added_tokens_with_spaces() -> None:
    metadata = spm_metadata(2)
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    tokenizer = of_source(TokenizerSource(metadata=metadata), last + 1)
    ids = tokenizer.encode("a<|x y|>b", special=False)
    assert last in ids and tokenizer.decode(ids) == "a<|x y|> b", "a space goes before each stretch of text, as in llama.cpp"


# -- pre-tokenizers -------------------------------------------------------------------------------
@pytest.mark.parametrize("pre, text, words", [
    ("gpt-2", "I'm 12345  ok!!\n\nx", ["I", "'m", " 12345", " ", " ok", "!!", "\n", "\n", "x"]),
    ("smollm", "v12 34", ["v", "1", "2", " ", "3", "4"]),
    ("llama-bpe", "I'M 12345  ok!!\n\nx", ["I", "'M", " ", "123", "45", " ", " ok", "!!\n\n", "x"]),
    ("qwen2", "a 123\n b", ["a", " ", "1", "2", "3", "\n", " b"]),
    ("default", "a+b $9999", ["a", "+", "b", " ", "$", "999", "9"]),
    ("smaug-bpe", "I'M 1234", ["I", "'M", " ", "123", "4"]),
    ("qwen35", "e\u0301te\u0301 12", ["e\u0301te\u0301", " ", "1", "2"]),
    ("qwen2", "e\u0301te\u0301", ["e", "\u0301te", "\u0301"]),
    ("tekken", "camelCaseHTTPServer 12//\n/", ["camel", "Case", "HTTPServer", " ", "1", "2", "//\n/"]),
    ("gpt-4o", "camelCASE'S don'T 1234 //\n/", ["camel", "CASE'S", " don'T", " ", "123", "4", " //\n/"]),
    ("seed-coder", "a !!\n\nb", ["a", " !!", "\n\n", "b"]),
    ("deepseek-v3", "漢字かな x1234!ab", ["漢字かな", " x", "123", "4", "!ab"]),
    ("deepseek-coder", "漢字 ab12!?\n", ["漢字", " ab", "1", "2", "!?", "\n"]),
])
def test_words_are_cut_as_the_family_cuts_them(pre: str, text: str, words: list[str]) -> None:
    from tokenizers import Regex

    cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in PRE_TOKENIZERS[pre].patterns])
    assert [word for word, _ in cut.pre_tokenize_str(text)] == words


# -- tokenizer.json -------------------------------------------------------------------------------
def fast_file(folder: Path, post: bool = False, **options: object) -> Path:
    """A SentencePiece-like tokenizer.json, as converted llama tokenizers have it."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)} | {"▁": 259, "a": 260, "b": 261, "▁a": 262}
    fast = Fast(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    fast.decoder = options.get("decoder") or decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    fast.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<unk>", "<s>", "</s>")])
    if post:
        fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast.enable_truncation(3)
    fast.enable_padding(length=20)
    fast.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_tokenizer_json_without_its_truncation_and_padding(tmp_path: Path) -> None:
    tokenizer = of_source(TokenizerSource(path=fast_file(tmp_path)), 300)
    assert tokenizer.encode("a b é", special=True) == [262, 259, 261, 259, 3 + 0xC3, 3 + 0xA9]
    assert tokenizer.decode([262, 259, 261]) == "a b" and "".join(streamed(tokenizer, [262, 3 + 0xC3, 3 + 0xA9])) == "aé"
    assert tokenizer.vocab_size == 263 and tokenizer.model_vocab == 300


def test_bos_by_the_settings_else_by_the_post_processor(tmp_path: Path) -> None:
    path = fast_file(tmp_path, post=True)
    assert of_source(TokenizerSource(path=path, bos=1), 300).add_bos is True
    assert of_source(TokenizerSource(path=path, bos=1, add_bos=False), 300).add_bos is False
    assert of_source(TokenizerSource(path=path, bos=1), 300).encode("a", special=True) == [262], "encode adds nothing"
    assert of_source(TokenizerSource(path=fast_file(tmp_path), bos=1), 300).add_bos is False


@pytest.mark.parametrize("decoder, text", [
    (decoders.Metaspace(), "a b"), (decoders.Metaspace(prepend_scheme="never"), " a b"),
    (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), " a b"),
])
def test_the_first_space_is_taken_where_the_decoder_takes_it(tmp_path: Path, decoder: object, text: str) -> None:
    path = fast_file(tmp_path, decoder=decoder)
    tokenizer = of_source(TokenizerSource(path=path), 300)
    ids = [262, 259, 261]
    assert tokenizer.decode(ids) == "".join(streamed(tokenizer, ids)) == text == Fast.from_file(str(path)).decode(ids)


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="ids up to 262, the model's vocabulary holds 100"):
        of_source(TokenizerSource(path=fast_file(tmp_path)), 100)
    with pytest.raises(FormatError, match="decodes with WordPiece"):
        of_source(TokenizerSource(path=fast_file(tmp_path, decoder=decoders.WordPiece())), 300)
    with pytest.raises(FormatError, match="decodes with Replace"):
        of_source(TokenizerSource(path=fast_file(tmp_path, decoder=decoders.Replace("a", "b"))), 300)
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "None"}}')
    with pytest.raises(FormatError, match="tokenizer cannot be built"):
        of_source(TokenizerSource(path=tmp_path / "tokenizer.json"), 300)


@pytest.mark.parametrize("metadata, words", [
    ({"tokenizer.ggml.merges": ["zz qq"]}, "merge 'zz qq'"), ({"tokenizer.ggml.merges": ["th"]}, "merge 'th'"),
    ({"tokenizer.ggml.merges": None}, "no list tokenizer.ggml.merges"), ({"tokenizer.ggml.model": "bert"}, "model 'bert' is not supported"),
    ({"tokenizer.ggml.pre": "own-pre"}, "pre is 'own-pre'.*wrong tokens"), ({"tokenizer.ggml.model": "llama"}, "one score for each"),
])
def test_gguf_tokenizers_that_cannot_be_built(metadata: dict, words: str, tiny_gguf: Callable) -> None:
    base = open_base(tiny_gguf(metadata=metadata))
    with pytest.raises(FormatError, match=words):
        Tokenizer(base)


def test_both_formats_give_the_same_ids(tiny_gguf: Callable, tiny_folder: Callable) -> None:
    ours = [Tokenizer(open_base(path)) for path in (tiny_gguf(), tiny_folder())]
    for text in ("the", "the cat: <|im_end|>", "th.e", ""):
        for special in (True, False):
            first, second = (tokenizer.encode(text, special) for tokenizer in ours)
            assert first == second
    assert ours[0].decode(ours[0].encode("the cat", True)) == "the cat"
