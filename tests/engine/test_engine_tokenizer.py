from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from engine.formats.files import describe
from engine.formats.gguf_file import GGUFFile, read_gguf
from engine.tokenizer.gguf_tokenizer import gguf_tokenizer
from engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from springtide.errors import InvalidRequest, UnsupportedModel
from springtide.modelinfo import ModelInfo
from tests.support.models import make_tiny_llama

STRINGS = [
    "Hello, world!",
    "  leading and   inner spaces ",
    "12345 and 3.14159, 1,000,000",
    "don't I'LL we've",
    "naïve café — “quotes”…",
    "你好,世界。",
    "日本語のテキスト",
    "🎉👩‍👩‍👧 emoji",
    "\n\n\ttabs\r\nand lines\n",
    "<|im_start|>user\nhi<|im_end|>\n",
    "def f(x):\n    return x ** 2  # comment",
    "٣ Ⅷ ①",
    "",
]


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tokenizer") / "tiny")


def stream(tokenizer: Tokenizer, token_ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip_special_tokens)
    return [*map(detokenizer.push, token_ids), detokenizer.finish()]


def test_the_demo_tokenizer_splits_digits_as_llama_cpp_does(demo_tokenizer: Tokenizer) -> None:
    """Token ids as llama.cpp gives them for this file."""
    assert demo_tokenizer.encode("What is 12345 + héllo 你好 🎉?") == LLAMA_CPP_IDS
    assert len(demo_tokenizer.encode("98765")) == 5


LLAMA_CPP_IDS = [1780, 314, 216, 33, 34, 35, 36, 37, 1232, 294, 2756, 31394, 216, 18645, 250, 48392, 138, 15107, 232, 227, 47]


def test_directories_encode_as_transformers_does(tiny_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(describe(str(tiny_path))), AutoTokenizer.from_pretrained(tiny_path)
    for text in STRINGS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text), skip_special_tokens=True), text
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    for prompt in (True, False):
        wanted = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
        assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == wanted


def test_the_demo_chat_template_adds_its_system_prompt(demo_tokenizer: Tokenizer) -> None:
    text = demo_tokenizer.chat_template.render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = demo_tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert ids[0] == 1 and demo_tokenizer.decode(ids, skip_special_tokens=False) == text


@given(text=st.text(max_size=40))
@settings(max_examples=300, deadline=None)
def test_streamed_text_is_the_text(demo_tokenizer: Tokenizer, text: str) -> None:
    """Up to the few bytes that the model has no token for."""
    ids = demo_tokenizer.encode(text)
    assert "".join(stream(demo_tokenizer, ids, skip_special_tokens=False)) == demo_tokenizer.decode(ids, skip_special_tokens=False)


@given(token_ids=st.lists(st.integers(0, 49151), max_size=30))
@settings(max_examples=300, deadline=None)
def test_streaming_gives_what_decoding_at_once_gives_for_any_tokens(demo_tokenizer: Tokenizer, token_ids: list[int]) -> None:
    assert "".join(stream(demo_tokenizer, token_ids)) == demo_tokenizer.decode(token_ids)


def test_no_half_characters_are_streamed(demo_tokenizer: Tokenizer) -> None:
    text = "🎉 你好 👩‍👩‍👧 é"
    pieces = stream(demo_tokenizer, demo_tokenizer.encode(text))
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)
    assert "" in pieces[:-1], "some token is only part of a character"


def test_an_output_that_ends_within_a_character_says_so_at_the_end(demo_tokenizer: Tokenizer) -> None:
    first = demo_tokenizer.encode("🎉")[0]
    assert stream(demo_tokenizer, [first]) == ["", "\ufffd"]


def test_special_tokens_have_no_text_unless_asked_for(demo_tokenizer: Tokenizer) -> None:
    ids = [*demo_tokenizer.encode("Hi"), 2]
    assert "".join(stream(demo_tokenizer, ids)) == "Hi"
    assert "".join(stream(demo_tokenizer, ids, skip_special_tokens=False)) == "Hi<|im_end|>"


def test_tokens_have_bytes_and_text_for_logprobs(demo_tokenizer: Tokenizer) -> None:
    ids = demo_tokenizer.encode(" 🎉 café")
    assert b"".join(map(demo_tokenizer.token_bytes, ids)).decode() == " 🎉 café"
    assert demo_tokenizer.token_text(demo_tokenizer.encode(" the")[0]) == " the"
    assert demo_tokenizer.token_text(2) == "<|im_end|>"
    assert demo_tokenizer.token_bytes(10**6) == b""


def test_a_template_that_refuses_is_an_invalid_request(tiny_path: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_path / name).read_bytes())
    info = describe(str(tmp_path))
    with pytest.raises(InvalidRequest, match="no chat template"):
        load_tokenizer(info).apply_chat_template([{"role": "user", "content": "x"}])
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        load_tokenizer(info).apply_chat_template([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"
    (tmp_path / "chat_template.jinja").write_text(
        "{{ ''.__class__.__mro__ }}{{ messages[0].role | tojson }}{{ strftime_now('%Y') | length }}"
    )
    with pytest.raises(InvalidRequest, match="unsafe"):
        load_tokenizer(info).chat_template.render([{"role": "user", "content": "x"}])
    (tmp_path / "chat_template.jinja").write_text(
        "{% generation %}{{ messages[0].role | tojson }}{% endgeneration %}{% for i in range(3) %}{% break %}{% endfor %}"
    )
    assert load_tokenizer(info).chat_template.render([{"role": "us<r", "content": "x"}]) == '"us<r"'


def sentencepiece_metadata() -> dict[str, object]:
    pieces = ["▁", "h", "e", "l", "o", "w", "r", "d", "▁h", "he", "ll", "llo", "▁he", "▁hello", "wo", "▁wo", "ld", "rld", "▁world", "▁worl"]
    scores = [-20.0] * 8 + [-float(i) for i in range(1, len(pieces) - 7)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + scores),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_from_gguf_equals_transformers() -> None:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import sentencepiece_tokenizer

    metadata = sentencepiece_metadata()
    ours = Tokenizer(gguf_tokenizer(GGUFFile(Path("test.gguf"), metadata, {}, 0)))
    theirs = sentencepiece_tokenizer({"tokens": metadata["tokenizer.ggml.tokens"], "scores": metadata["tokenizer.ggml.scores"]})
    for text in ("hello world", " hello", "hello  world\n", "héllo 🎉", "wwoorrlldd", "", "hello</s>hello"):
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.encode("hello")[0] == 1, "BOS comes first"


def test_sentencepiece_output_keeps_its_leading_space_and_whole_characters() -> None:
    tokenizer = Tokenizer(gguf_tokenizer(GGUFFile(Path("test.gguf"), sentencepiece_metadata(), {}, 0)))
    ids = tokenizer.encode("hello 🎉", add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == " hello 🎉" and "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2", "smollm", "default"])
def test_pre_tokenizers_keep_every_character(demo_info: ModelInfo, pre: str) -> None:
    file = read_gguf(Path(demo_info.path))
    changed = GGUFFile(file.path, {**file.metadata, "tokenizer.ggml.pre": pre}, file.tensors, file.data_offset)
    tokenizer = Tokenizer(gguf_tokenizer(changed))
    for text in STRINGS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_unknown_kinds_of_tokenizers_are_refused_by_name(demo_info: ModelInfo) -> None:
    file = read_gguf(Path(demo_info.path))
    for key, value in (("tokenizer.ggml.pre", "jais"), ("tokenizer.ggml.model", "rwkv")):
        with pytest.raises(UnsupportedModel, match=f"{key} '{value}' is not supported"):
            gguf_tokenizer(GGUFFile(file.path, {**file.metadata, key: value}, file.tensors, file.data_offset))
    backend = Backend(WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        Tokenizer(backend)


@pytest.mark.parametrize(
    "text", ["=" * 3000, " " * 3000, "<|im_start|>" * 200, "\u212a" * 500, "\n\n" * 900, "héllo 你好 🎉" * 100, "\x05" * 999]
)
def test_a_text_has_no_fewer_tokens_than_its_length_promises(demo_tokenizer: Tokenizer, tiny_path: Path, text: str) -> None:
    composing = Backend.from_str(load_tokenizer(describe(str(tiny_path)))._backend.to_str())
    composing.normalizer = normalizers.NFC()
    for tokenizer in (demo_tokenizer, Tokenizer(composing)):
        assert tokenizer.most_bytes_a_token is not None
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))
    assert demo_tokenizer.least_tokens("=" * 8100) == 100


def test_other_threads_go_on_while_a_long_text_is_encoded(demo_tokenizer: Tokenizer) -> None:
    """A million words take a second or so, in which a thread that sleeps for a millisecond at a time gets to its turn again and again."""
    encoded, turns = threading.Event(), 0

    def take_turns() -> None:
        nonlocal turns
        while not encoded.wait(0.001):
            turns += 1

    other = threading.Thread(target=take_turns)
    text = "the quick brown fox jumps over the lazy dog " * 120_000
    other.start()
    before = turns
    demo_tokenizer.encode(text)
    during = turns - before
    encoded.set()
    other.join()
    assert during > 20


def test_a_tokenizer_that_may_drop_text_promises_nothing(demo_tokenizer: Tokenizer, tiny_path: Path) -> None:
    assert load_tokenizer(describe(str(tiny_path))).most_bytes_a_token is not None
    assert demo_tokenizer.most_bytes_a_token == 81
    source = demo_tokenizer._backend.to_str()
    stripping, splitting, swallowing = Backend.from_str(source), Backend.from_str(source), Backend.from_str(source)
    stripping.normalizer = normalizers.NFC()  # of a vocabulary that drops bytes
    splitting.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()])
    swallowing.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert [Tokenizer(backend).most_bytes_a_token for backend in (stripping, splitting, swallowing)] == [None] * 3
