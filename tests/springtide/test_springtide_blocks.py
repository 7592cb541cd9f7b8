"""Block keys: the same prefix gives the same keys, anything else others."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from springtide.blocks import KEY_BYTES, PackedKeys, block_keys, blocks_for, namespace_root
from springtide.errors import InvalidRequest
from springtide.ids import BlockKey

ROOT = namespace_root("model", "bfloat16", 4)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def keys_by_hashlib(parent: BlockKey, token_ids: Sequence[int], block_tokens: int) -> list[BlockKey]:
    """The keys by their definition, block by block: what `block_keys` is held to."""
    words = array("I", token_ids)
    keys = []
    for end in range(block_tokens, len(words) + 1, block_tokens):
        parent = BlockKey(blake2b(words[end - block_tokens : end].tobytes(), digest_size=KEY_BYTES, salt=parent).digest())
        keys.append(parent)
    return keys


@given(tokens, st.integers(1, 9))
def test_there_is_a_key_for_every_full_block(token_ids: list[int], block_tokens: int) -> None:
    keys = block_keys(ROOT, token_ids, block_tokens)
    assert len(keys) == len(token_ids) // block_tokens
    assert all(len(key) == KEY_BYTES for key in keys)


@given(tokens, tokens, st.integers(1, 9))
def test_keys_agree_exactly_as_far_as_the_tokens_do(left: list[int], right: list[int], block_tokens: int) -> None:
    agreeing = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    left_keys, right_keys = block_keys(ROOT, left, block_tokens), block_keys(ROOT, right, block_tokens)
    same = [a == b for a, b in zip(left_keys, right_keys, strict=False)]
    full = min(agreeing // block_tokens, len(same))
    assert same == [True] * full + [False] * (len(same) - full)


@given(tokens, st.integers(0, 10))
def test_a_chain_can_be_continued_from_any_block(token_ids: list[int], block: int) -> None:
    keys = block_keys(ROOT, token_ids, 4)
    block = min(block, len(keys))
    parent = keys[block - 1] if block else ROOT
    assert block_keys(parent, token_ids[4 * block :], 4) == keys[block:]


def test_namespaces_never_match_each_other() -> None:
    roots = {
        namespace_root("model", "bfloat16", 64),
        namespace_root("other", "bfloat16", 64),
        namespace_root("model", "float32", 64),
        namespace_root("model", "bfloat16", 32),
        namespace_root("model", "bfloat16", 64, "salt"),
    }
    assert len({block_keys(root, range(64), 64)[0] for root in roots}) == 5


def test_keys_do_not_depend_on_the_process() -> None:
    """Stores outlive processes and differ from gateways: the hash is part of the contract."""
    assert block_keys(namespace_root("model", "bfloat16", 4), [1, 2, 3, 4], 4)[0].hex() == "321f4d32a089200d5c1baf9c5493238b"


def test_an_id_that_is_no_token_is_refused() -> None:
    with pytest.raises(OverflowError):
        block_keys(ROOT, [-1], 1)


@pytest.mark.parametrize(("num_tokens", "blocks"), [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2)])
def test_a_partial_block_counts(num_tokens: int, blocks: int) -> None:
    assert blocks_for(num_tokens, 64) == blocks


@given(st.lists(st.integers(0, 2**32 - 1), max_size=300), st.integers(1, 150))
def test_keys_are_those_of_their_definition(token_ids: list[int], block_tokens: int) -> None:
    assert block_keys(ROOT, token_ids, block_tokens) == keys_by_hashlib(ROOT, token_ids, block_tokens)


@pytest.mark.parametrize(
    ("token_ids", "error"), [([1, 2**32], OverflowError), ([-1], OverflowError), ([1.5], TypeError), (["1"], TypeError)]
)
def test_what_is_no_token_id_is_refused(token_ids: list[Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        block_keys(ROOT, token_ids, 2)


@pytest.mark.parametrize("parent", [memoryview(array("f", [0.0] * 4)), bytearray(16), "x" * 16])
def test_a_parent_is_bytes(parent: Any) -> None:
    with pytest.raises(TypeError):
        block_keys(parent, [1, 2], 2)


@given(st.lists(st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES), max_size=20), st.data())
def test_keys_end_to_end_are_a_sequence_of_keys(keys: list[bytes], data: st.DataObject) -> None:
    packed = PackedKeys(b"".join(keys))
    assert packed == keys and len(packed) == len(keys) and list(packed) == keys
    start, stop = (data.draw(st.none() | st.integers(-25, 25)) for _ in range(2))
    assert packed[start:stop] == keys[start:stop]
    for position in (len(keys), -len(keys) - 1):
        with pytest.raises(IndexError):
            packed[position]


def test_half_a_key_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="17 bytes"):
        PackedKeys(bytes(17))
