"""A tokenizer from the metadata of a GGUF file: byte-level BPE ('gpt2') and SentencePiece BPE ('llama'). No torch, no transformers.

The file names its pre-tokenizer (`tokenizer.ggml.pre`) and llama.cpp knows what each name means (src/llama-vocab.cpp); so does this
module for those of the families that the engine runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.formats.gguf_file import GGUFFile
from springtide.errors import ConfigError, UnsupportedModel

_CONTROL, _USER_DEFINED = 3, 4
"""Of `tokenizer.ggml.token_type`."""
_TOKEN_KEYS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

_LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def gguf_special_tokens(file: GGUFFile) -> dict[str, str]:
    """The texts of `bos_token`, `eos_token` and so on, by those names."""
    tokens = file.texts("tokenizer.ggml.tokens")
    keys = {name: f"tokenizer.ggml.{key}_token_id" for name, key in _TOKEN_KEYS.items()}
    ids = {name: file.integer(key, least=0) for name, key in keys.items() if key in file.metadata}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id < len(tokens)}


def gguf_tokenizer(file: GGUFFile) -> Tokenizer:
    """Raises UnsupportedModel for another kind of tokenizer or pre-tokenizer, ConfigError when something is missing."""
    kind = file.text("tokenizer.ggml.model")
    if kind not in _BUILDERS:
        raise UnsupportedModel(f"{file.path}: tokenizer.ggml.model {kind!r} is not supported; {', '.join(_BUILDERS)} are")
    tokenizer = _BUILDERS[kind](file)
    _add_special_tokens(tokenizer, file)
    _add_bos_and_eos(tokenizer, file, kind)
    return tokenizer


def _byte_level(file: GGUFFile) -> Tokenizer:
    pre = file.text("tokenizer.ggml.pre", "default")
    if pre not in _PRE_TOKENIZERS:
        raise UnsupportedModel(f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported; {', '.join(_PRE_TOKENIZERS)} are")
    vocab = {token: index for index, token in enumerate(file.texts("tokenizer.ggml.tokens"))}
    merges = [tuple(merge.split(" ", 1)) for merge in file.texts("tokenizer.ggml.merges")]
    # Llama 3 takes a word that is a token as it is, whatever its merges would make of it.
    tokenizer = Tokenizer(_bpe(file, vocab=vocab, merges=merges, ignore_merges=pre in _LLAMA3))
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    """As transformers' LlamaTokenizer: BPE over characters whose merges follow from the pieces' scores, bytes as a fallback."""
    tokens = file.texts("tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = gguf_special_tokens(file).get("unk_token", "<unk>")
    merges = _merges_from_scores(tokens, vocab, file.numbers("tokenizer.ggml.scores", len(tokens)))
    tokenizer = Tokenizer(_bpe(file, vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first" if prefix else "never", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if prefix else steps)
    return tokenizer


def _bpe(file: GGUFFile, **parts: Any) -> BPE:
    try:
        return BPE(**parts)
    except Exception as error:  # tokenizers has no error of its own
        raise ConfigError(f"{file.path}: tokenizer.ggml.tokens and merges make no tokenizer: {error}") from None


def _merges_from_scores(tokens: Sequence[str], vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way to put a piece together from two others, best score first; SentencePiece merges in this order."""
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = sorted((vocab[left], vocab[right], left, right) for left, right in halves if left in vocab and right in vocab)
        merges += [(float(score), left, right) for _, _, left, right in known]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _add_special_tokens(tokenizer: Tokenizer, file: GGUFFile) -> None:
    tokens, key = file.texts("tokenizer.ggml.tokens"), "tokenizer.ggml.token_type"
    types = file.numbers(key, len(tokens)) if key in file.metadata else [0] * len(tokens)
    of_type = {kind: [token for token, its in zip(tokens, types, strict=True) if its == kind] for kind in (_CONTROL, _USER_DEFINED)}
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in of_type[_CONTROL]])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in of_type[_USER_DEFINED]])


def _add_bos_and_eos(tokenizer: Tokenizer, file: GGUFFile, kind: str) -> None:
    """llama.cpp's defaults where the file does not say: BOS for SentencePiece and Llama 3, else neither."""
    texts = gguf_special_tokens(file)
    default = kind == "llama" or file.text("tokenizer.ggml.pre", "") in _LLAMA3
    bos = texts.get("bos_token") if file.flag("tokenizer.ggml.add_bos_token", default) else None
    eos = texts.get("eos_token") if file.flag("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return
    special = [(text, tokenizer.token_to_id(text)) for text in (bos, eos) if text is not None]
    template = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)


def _split(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_QWEN2 = ("qwen2", "deepseek-r1-qwen")
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _split(_GPT2_SPLIT),
    "default": _split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "smollm": _split(r"\p{N}", _GPT2_SPLIT),
    **dict.fromkeys(_LLAMA3, _split(_LLAMA3_SPLIT)),
    **dict.fromkeys(_QWEN2, _split(_QWEN2_SPLIT)),
}
_BUILDERS: dict[str, Callable[[GGUFFile], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}
