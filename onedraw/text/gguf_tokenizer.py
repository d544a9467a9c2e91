"""Build a tokenizer from the metadata of a GGUF file.

The input is the metadata (`tokenizer.ggml.*`). The output is a `tokenizers.Tokenizer` that encodes as the model's original
tokenizer does, with its bos and eos ids. Three kinds are supported: `gpt2` (byte-level BPE with a named pre-tokenizer), `llama`
(SentencePiece, whose merges follow from the scores) and `gemma4` (BPE over text with byte fallback).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from onedraw.errors import CorruptFile, ModelNotFound, UnsupportedModel

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # kinds of tokens, as tokenizer.ggml.token_type numbers them
SPACE = "▁"  # SentencePiece's character for a space

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

_PADDING = re.compile(r"\[PAD(\d+)\]")  # the name that converters write for an entry of the embedding matrix without a token


@dataclass(frozen=True, slots=True)
class PreTokenization:
    """How one family of byte-level BPE splits text before merging, and whether it adds a bos token by default."""

    pre_tokenizer: Callable[[], Any]
    normalizer: Callable[[], Any] | None = None
    ignore_merges: bool = False
    add_bos: bool = False


def _by_pattern(pattern: str) -> Callable[[], Any]:
    def build() -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_LLAMA3_PRE = PreTokenization(_by_pattern(_LLAMA3), ignore_merges=True, add_bos=True)
_QWEN2_PRE = PreTokenization(_by_pattern(_QWEN2), normalizer=normalizers.NFC)
PRE_TOKENIZERS: Mapping[str, PreTokenization] = {
    "default": PreTokenization(_gpt2),
    "gpt-2": PreTokenization(_gpt2),
    "smollm": PreTokenization(_single_digits),
    "llama-bpe": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "qwen2": _QWEN2_PRE,
    "deepseek-r1-qwen": _QWEN2_PRE,
    "qwen35": PreTokenization(_by_pattern(_QWEN35), normalizer=normalizers.NFC),
}
KINDS = ("gpt2", "llama", "gemma4")  # the supported values of tokenizer.ggml.model

# Names of metadata keys, by the type that their value must have.
_LISTS = ("tokens", "token_type", "merges", "scores")
_LISTS_OF_STRINGS = ("tokens", "merges")
_STRINGS = ("model", "pre", "chat_template")


def require_types(metadata: Mapping[str, Any]) -> None:
    """Raise CorruptFile if a tokenizer key has a value of the wrong type."""
    for key, value in metadata.items():
        prefix, _, name = key.rpartition(".")
        if prefix not in ("tokenizer", "tokenizer.ggml") or value is None:
            continue
        expected, valid = "anything", True
        if name in _LISTS:
            expected, valid = "a list", hasattr(value, "__len__") and not isinstance(value, str)
            if valid and name in _LISTS_OF_STRINGS:
                expected, valid = "a list of strings", set(map(type, value)) <= {str}
        elif name in _STRINGS:
            expected, valid = "a string", isinstance(value, str)
        elif name.endswith("_token_id"):
            expected, valid = "an integer", isinstance(value, int) and not isinstance(value, bool)
        if not valid:
            raise CorruptFile(f"the GGUF file's {key} is not {expected}; convert the model again")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The part of the metadata that describes the tokenizer, after checking that tokens and their types have equal lengths."""

    metadata: Mapping[str, Any]
    tokens: Sequence[str]
    types: Sequence[int]
    ids: dict[str, int] = field(repr=False)

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> Vocabulary:
        require_types(metadata)
        tokens = metadata.get("tokenizer.ggml.tokens")
        if tokens is None:
            raise ModelNotFound("this GGUF file has no tokenizer (tokenizer.ggml.tokens); use a file that has one")
        types = metadata.get("tokenizer.ggml.token_type")
        types = [NORMAL] * len(tokens) if types is None else types
        if len(types) != len(tokens):
            raise CorruptFile(
                f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens; convert the model again"
            )
        return cls(metadata=metadata, tokens=tokens, types=types, ids={token: i for i, token in enumerate(tokens)})

    def value(self, name: str, default: Any = None) -> Any:
        return self.metadata.get(f"tokenizer.ggml.{name}", default)

    def id(self, name: str, default: int | None = None) -> int | None:
        """Return a special token's id. An id outside the vocabulary counts as absent."""
        number = self.value(f"{name}_token_id", default)
        return int(number) if number is not None and 0 <= number < len(self.tokens) else None


def build_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer, int | None, int | None]:
    """Return the tokenizer that the metadata describes, its bos id and its eos id."""
    vocabulary = Vocabulary.read(metadata)
    kind = vocabulary.value("model")
    match kind:
        case "gpt2":
            pre = _pre_tokenization(vocabulary.value("pre"))
            backend = _byte_level(vocabulary, pre)
            bos_id, eos_id, add_bos = vocabulary.id("bos"), vocabulary.id("eos"), pre.add_bos
        case "llama":
            backend = _sentencepiece(vocabulary)
            bos_id, eos_id, add_bos = vocabulary.id("bos", 1), vocabulary.id("eos", 2), True
        case "gemma4":
            backend = _gemma4(vocabulary)
            bos_id, eos_id, add_bos = vocabulary.id("bos"), vocabulary.id("eos"), True
        case _:
            raise UnsupportedModel(_unsupported_kind(kind))
    _add_tokens(backend, vocabulary, special=[bos_id, eos_id, vocabulary.id("eot")])
    # Some gemma4 files say add_bos_token = false by mistake: the model always needs its bos token.
    adds_bos = kind == "gemma4" or vocabulary.value("add_bos_token", add_bos)
    _set_special_frame(
        backend, bos_id=bos_id if adds_bos else None, eos_id=eos_id if vocabulary.value("add_eos_token", False) else None
    )
    return backend, bos_id, eos_id


def unsupported_reason(metadata: Mapping[str, Any]) -> str:
    """Return why a tokenizer of this kind and pre-tokenizer is not supported; empty if it is. Nothing else of the
    metadata is checked."""
    kind, pre = (metadata.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind not in KINDS:
        return _unsupported_kind(kind)
    return _unsupported_pre_tokenizer(pre) if kind == "gpt2" and pre is not None and pre not in PRE_TOKENIZERS else ""


def _unsupported_kind(kind: Any) -> str:
    return f"tokenizer.ggml.model {kind!r} is not supported; supported: {', '.join(KINDS)}"


def _unsupported_pre_tokenizer(name: Any) -> str:
    return f"tokenizer.ggml.pre {name!r} is not supported; supported: {', '.join(sorted(PRE_TOKENIZERS))}"


def _set_special_frame(backend: Tokenizer, *, bos_id: int | None, eos_id: int | None) -> None:
    """Make encoding with special tokens put `bos_id` before a text and `eos_id` after it; None: no id there."""
    ids = {name: number for name, number in (("bos", bos_id), ("eos", eos_id)) if number is not None}
    pieces = [name for name in ("bos", "$A", "eos") if name == "$A" or name in ids]
    backend.post_processor = processors.TemplateProcessing(
        single=pieces,
        pair=[*pieces, "$B:1"],
        special_tokens=[
            {"id": name, "ids": [number], "tokens": [backend.id_to_token(number) or name]} for name, number in ids.items()
        ],
    )


def _pre_tokenization(name: str | None) -> PreTokenization:
    # Old files of kind gpt2 name no pre-tokenizer, because GPT-2's was the only one then.
    found = PRE_TOKENIZERS.get("default" if name is None else name)
    if found is None:
        raise UnsupportedModel(_unsupported_pre_tokenizer(name))
    return found


def _byte_level(vocabulary: Vocabulary, pre: PreTokenization) -> Tokenizer:
    backend = Tokenizer(_bpe(vocabulary, _merges(vocabulary), ignore_merges=pre.ignore_merges))
    if pre.normalizer is not None:
        backend.normalizer = pre.normalizer()
    backend.pre_tokenizer = pre.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    backend = Tokenizer(_bpe(vocabulary, _scored_merges(vocabulary), **_fallback(vocabulary)))
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.value("add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence(steps)
    return backend


def _gemma4(vocabulary: Vocabulary) -> Tokenizer:
    backend = Tokenizer(_bpe(vocabulary, _merges(vocabulary), **_fallback(vocabulary)))
    backend.normalizer = normalizers.Replace(" ", SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _fallback(vocabulary: Vocabulary) -> dict[str, Any]:
    """Return the options with which a BPE encodes a character without a token as byte tokens, or as unknown tokens if the
    vocabulary has no byte tokens."""
    unknown = vocabulary.id("unknown", 0)
    return {"byte_fallback": True, "fuse_unk": True, "unk_token": None if unknown is None else vocabulary.tokens[unknown]}


def _bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids, merges=merges, **options)
    except Exception as error:  # The library raises a bare Exception for a merge of unknown tokens.
        raise CorruptFile(f"the GGUF file's vocabulary and merges do not match: {error}") from None


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Parse the merges. Each is two tokens with a space between them, and the first may itself begin with a space."""
    lines = vocabulary.value("merges")
    if lines is None:
        raise CorruptFile(
            "the GGUF file has no tokenizer.ggml.merges, which its kind of tokenizer needs; convert the model again"
        )
    merges = [(line[:cut], line[cut + 1 :]) for line in lines if (cut := line.find(" ", 1)) > 0]
    if len(merges) < len(lines):
        bad = next(line for line in lines if line.find(" ", 1) < 0)
        raise CorruptFile(f"tokenizer.ggml.merges: {bad!r} is not two tokens with a space between; convert the model again")
    return merges


def _scored_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Derive merges from scores. A merge is a split of a token into two tokens. Merges are sorted by the token's score, the
    highest first, and among equals by the length of the left part, the longest first.

    Only normal tokens take part, since merging never produces control, byte or unknown tokens.
    """
    scores = vocabulary.value("scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise CorruptFile("the GGUF file's tokenizer.ggml.scores are missing, or not one per token; convert the model again")
    normal = {token: i for token, i in vocabulary.ids.items() if vocabulary.types[i] == NORMAL}
    ranked: list[tuple[float, int, str, str]] = []
    for token, i in normal.items():
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in normal and right in normal:
                ranked.append((-scores[i], -cut, left, right))
    ranked.sort(key=lambda merge: merge[:2])
    return [(left, right) for _, _, left, right in ranked]


def _add_tokens(backend: Tokenizer, vocabulary: Vocabulary, *, special: Sequence[int | None]) -> None:
    """Register control tokens, unknown tokens and the ids in `special` as special tokens, and user-defined tokens except padding
    as added tokens. Both are never split."""
    named = {i for i in special if i is not None}
    control, plain = [], []
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind == NORMAL and i not in named:
            continue
        if kind in (UNKNOWN, CONTROL) or i in named:
            control.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED and not _is_padding(token, i):
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(control)
    backend.add_tokens(plain)


def _is_padding(token: str, number: int) -> bool:
    found = _PADDING.fullmatch(token)
    return found is not None and int(found[1]) == number
