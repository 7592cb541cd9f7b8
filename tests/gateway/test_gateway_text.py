"""Stop strings and text that comes in pieces."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from engine.tokenizer.detokenizer import StreamingDetokenizer
from gateway.answer import StopStrings, TextAssembler
from springtide.protocol.outputs import SampledToken


class Bytes:
    """A tokenizer whose token ids index a list of byte strings."""

    def __init__(self, vocabulary: list[bytes]) -> None:
        self._vocabulary = vocabulary

    def token_bytes(self, token_id: int) -> bytes:
        return self._vocabulary[token_id]

    def is_special(self, token_id: int) -> bool:
        return False


@given(
    text=st.text(alphabet="abä€𝄞", max_size=30),
    stops=st.lists(st.text(alphabet="abä€", min_size=1, max_size=4), max_size=3),
    borders=st.lists(st.integers(0, 100), max_size=12),
    batch=st.integers(1, 4),
)
def test_however_text_is_split_into_tokens_it_comes_out_once_up_to_the_first_stop_string(
    text: str, stops: list[str], borders: list[int], batch: int
) -> None:
    raw = text.encode()
    marks = sorted({0, len(raw), *(border for border in borders if border < len(raw))})
    vocabulary = [raw[begin:end] for begin, end in itertools.pairwise(marks)]
    assembler = TextAssembler(StreamingDetokenizer(Bytes(vocabulary)), StopStrings(stops))
    tokens = [SampledToken(token_id) for token_id in range(len(vocabulary))]
    out, placed, stopped = "", [], False
    for begin in range(0, len(tokens), batch):
        piece = assembler.push(tokens[begin : begin + batch])
        out += piece.text
        placed += piece.tokens
        stopped = stopped or piece.stop is not None
    last = assembler.finish()
    out += last.text
    placed += last.tokens

    # The stop string that is complete first ends the text, as it would for a reader of the stream.
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert (stopped or last.stop is not None) == bool(found)
    assert text.startswith(out)
    if not found:
        assert out == text and [entry.token for entry in placed] == tokens
    else:
        assert not any(stop in out for stop in stops)
        assert any(text[len(out) :].startswith(stop) for stop in stops)
    offsets = [entry.offset for entry in placed]
    assert offsets == sorted(offsets)
    assert [entry.token.token_id for entry in placed] == list(range(len(placed)))


@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=5), max_size=5),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), max_size=3),
)
def test_what_is_held_back_is_exactly_what_may_still_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    stops = [stop for stop in stops if stop not in text]
    strings, begun = StopStrings(stops), [0] * len(stops)
    for piece in pieces:
        strings.advance(begun, piece)
    assert begun == [max(length for length in range(len(stop)) if text.endswith(stop[:length])) for stop in stops]


def test_nothing_is_held_back_that_cannot_become_a_stop_string() -> None:
    assembler = TextAssembler(StreamingDetokenizer(Bytes([b"one STO", b"NE", b" ST", b"OP rest"])), StopStrings(["STOP"]))
    texts = [assembler.push([SampledToken(token_id)]).text for token_id in range(4)]
    assert texts == ["one ", "STONE", " ", ""]
    assert assembler.finish().stop == "STOP" and assembler.num_tokens == 4


def test_half_a_character_waits_for_its_other_half_and_is_replaced_when_none_comes() -> None:
    assembler = TextAssembler(StreamingDetokenizer(Bytes(["ä".encode()[:1], "ä".encode()[1:], "ö".encode()[:1]])), StopStrings([]))
    assert [assembler.push([SampledToken(token_id)]).text for token_id in range(3)] == ["", "ä", ""]
    assert assembler.finish().text == "�"
