"""Convert text to token ids and back, with the `tokenizers` library.

A Tokenizer is made from a folder with tokenizer.json or from the metadata of a GGUF file. It is immutable, so several threads may
use it. Special tokens that are spelled out in a text are encoded as such tokens, because chat templates produce text.

Decoding is defined on bytes: the bytes of all tokens are joined and decoded as UTF-8, with U+FFFD for invalid bytes. So a whole
text equals the concatenation of its stream, whatever the ids. The setting `clean_up_tokenization_spaces` is ignored: it changes
text after decoding, so a stream could not match.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from onedraw.errors import BadRequest, CorruptFile, ModelNotFound, UnsupportedModel
from onedraw.text.gguf_tokenizer import SPACE, build_tokenizer
from onedraw.text.least_tokens import LeastTokens

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SURROGATE = re.compile("[\ud800-\udfff]")
MOST_GAPS = 2**20  # A vocabulary may have this many ids without a token. Every id costs time when a model is loaded.
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def _alphabet() -> dict[str, int]:
    """Map the 256 characters that stand for bytes in byte-level BPE: printable bytes are themselves, the others U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _alphabet()


@dataclass(frozen=True, slots=True)
class ByteLevel:
    """Spelling in which every character of a token stands for one byte."""

    strips_space = False

    def bytes_of(self, token: str) -> bytes:
        try:
            return bytes([_BYTE_OF[character] for character in token])
        except KeyError:  # An added token is not in the byte alphabet: it is plain text and may contain any character.
            return token.encode()


@dataclass(frozen=True, slots=True)
class SentencePiece:
    """Spelling in which tokens are text with ▁ for spaces, and tokens such as <0x0A> are single bytes."""

    strips_space: bool  # encoding puts a space before the text, so decoding removes the first one
    byte_fallback: bool  # tokens such as <0x0A> stand for one byte

    def bytes_of(self, token: str) -> bytes:
        if self.byte_fallback and (found := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(found[1])
        return token.replace(SPACE, " ").encode()


Spelling = ByteLevel | SentencePiece


class Tokenizer:
    """A tokenizer. Construct it with `from_folder` or `from_gguf`."""

    def __init__(
        self, backend: tokenizers.Tokenizer, *, bos_id: int | None, eos_id: int | None, vocab_size: int | None = None
    ) -> None:
        """`vocab_size`: one more than the largest id; None: it is looked up, which takes a tenth of a second."""
        self._backend = backend
        self._spelling = _spelling(backend)
        self._special = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._containing = lru_cache(maxsize=16)(self._search)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.strips_space = self._spelling.strips_space  # decoding removes one leading space
        # Ids may have gaps, so this is one more than the largest id, not the number of tokens.
        if vocab_size is None:
            ids = backend.get_vocab(with_added_tokens=True).values()
            vocab_size = max(ids, default=-1) + 1
            if vocab_size > MOST_GAPS + len(ids):
                raise CorruptFile(
                    f"the tokenizer has {len(ids):,} tokens, and one has the id {vocab_size - 1:,}; get its file again"
                )
        self.vocab_size = vocab_size

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint folder: tokenizer.json, with the tokenizer_config.json of the same folder.

        As in transformers, tokenizer.json alone decides which tokens `add_special` adds.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelNotFound(
                f"{file} is missing; get the model's tokenizer.json, or write one from its other tokenizer files with "
                f"transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
            backend.no_truncation()
            backend.no_padding()
            backend.encode("a")  # The library finds some faults only when it encodes.
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # The library raises plain Exceptions, and a panic in its native code is a BaseException.
            raise CorruptFile(f"{file} cannot be read as a tokenizer ({error}); get the file again") from None
        config = tokenizer_config(folder)
        _add_configured_tokens(backend, config, folder)
        bos_id, eos_id = (_id_of(backend, special_text(config, name)) for name in ("bos_token", "eos_token"))
        return cls(backend, bos_id=bos_id, eos_id=eos_id)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """Build the tokenizer that a GGUF file's metadata describes."""
        backend, bos_id, eos_id = build_tokenizer(metadata)
        return cls(backend, bos_id=bos_id, eos_id=eos_id, vocab_size=len(metadata["tokenizer.ggml.tokens"]))

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, from which `from_folder` makes an equal tokenizer."""
        self._backend.save(str(folder / "tokenizer.json"))
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        config = {name: self._backend.id_to_token(i) for name, i in named.items() if i is not None}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return token ids. `add_special` adds the tokens that the model expects around a text, mostly a bos token."""
        try:
            return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special)[0].ids)
        except TypeError:  # The library raises this for half of a surrogate pair. `_utf8` raises an error that says so.
            _utf8(text)
            raise

    def least_tokens(self, text: str, *, enough: int) -> int:
        """Return a lower bound on the number of tokens of `text`, without tokenizing it. Counting may stop once the bound reaches
        `enough`."""
        return self._least.of(text, enough=enough)

    @cached_property
    def _least(self) -> LeastTokens:
        characters = {byte: character for character, byte in _BYTE_OF.items()}
        byte_level = characters if isinstance(self._spelling, ByteLevel) else None
        return LeastTokens(self._backend, map(self.token_bytes, range(self.vocab_size)), byte_level=byte_level)

    def encode_plain(self, text: str) -> list[int]:
        """Return the token ids of a text in which nothing is encoded as a special token."""
        return list(self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.encode_special_tokens = True
        return copy

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of these ids. An id without a token adds nothing."""
        joined = b"".join(self.token_bytes(i) for i in ids if not (skip_special and i in self._special))
        text = joined.decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; none for an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
            found = self._bytes[token_id] = b"" if token is None else self._spelling.bytes_of(token)
        return found

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of all special tokens, which `encode` recognizes in a text and `encode_plain` does not."""
        return tuple(self.token_bytes(i).decode("utf-8", "replace") for i in sorted(self._special))

    def ids_containing(self, texts: Sequence[str]) -> frozenset[int]:
        """Return the ids of all tokens, except special ones, whose text contains any of these texts. Results are cached."""
        return self._containing(tuple(texts))

    def _search(self, texts: tuple[str, ...]) -> frozenset[int]:
        # Every part of a token that is as long as one of the texts is looked up, so the work does not grow with their number.
        wanted = {_utf8(text) for text in texts}
        lengths = sorted({len(text) for text in wanted})

        def parts(token: bytes) -> Iterator[bytes]:
            for length in lengths:
                if length > len(token):
                    return
                yield from (token[i : i + length] for i in range(len(token) - length + 1))

        found = (i for i in range(self.vocab_size) if not wanted.isdisjoint(parts(self.token_bytes(i))))
        return frozenset(found) - self._special

    @cached_property
    def fingerprint(self) -> str:
        """Return a hash of every token's bytes. Tokenizers with equal ids and bytes have equal hashes, whatever file they came
        from."""
        digest = hashlib.sha256()
        for i in range(self.vocab_size):
            token = self.token_bytes(i)
            digest.update(b"%d %d " % (len(token), i in self._special) + token)
        return digest.hexdigest()[:16]


def _spelling(backend: tokenizers.Tokenizer) -> Spelling:
    """Return how the tokens represent bytes, which the tokenizer's decoder shows."""
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": None}
    steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return ByteLevel()
    spaced = "Metaspace" in kinds or any(
        step["type"] == "Replace" and step["pattern"] == {"String": SPACE} and step["content"] == " " for step in steps
    )
    if spaced and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return SentencePiece(
            strips_space="Strip" in kinds or any(step.get("prepend_scheme", "never") != "never" for step in steps),
            byte_fallback="ByteFallback" in kinds,
        )
    raise UnsupportedModel(
        f"the tokenizer's decoder {sorted(map(str, kinds))} is not supported; supported: byte-level and SentencePiece decoders"
    )


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"the text contains half of a surrogate pair ({text[error.start]!a} at {error.start}), which is not a character; "
            f"send valid Unicode",
            code="invalid_text",
        ) from None


def _id_of(backend: tokenizers.Tokenizer, token: str | None) -> int | None:
    return None if token is None else backend.token_to_id(token)


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _flags(token: AddedToken) -> tuple[bool, ...]:
    return tuple(bool(getattr(token, name)) for name in _FLAGS)


def _configured_tokens(config: dict[str, Any], folder: Path) -> list[tuple[int, AddedToken]]:
    """Return the added tokens of tokenizer_config.json with their ids, in ascending order of ids."""
    found: list[tuple[int, AddedToken]] = []
    described = config.get("added_tokens_decoder") or {}
    try:
        for number, entry in described.items():
            content = entry["content"]
            _utf8(content)
            found.append((int(number), AddedToken(content, **{name: bool(entry.get(name, False)) for name in _FLAGS})))
    except (AttributeError, KeyError, TypeError, ValueError, BadRequest):
        raise CorruptFile(
            f"{folder}: added_tokens_decoder of tokenizer_config.json does not map ids to tokens; get the file again"
        ) from None
    return sorted(found, key=lambda pair: pair[0])


def _add_configured_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], folder: Path) -> None:
    """Add the tokens that only tokenizer_config.json has, and set its flags on tokens that tokenizer.json has as well."""
    added = backend.get_added_tokens_decoder()
    for number, token in _configured_tokens(config, folder):
        before = backend.token_to_id(token.content)
        if number in added and added[number].special:  # A token that is special in tokenizer.json stays special.
            token.special = True
        if before is None or (number in added and _flags(added[number]) != _flags(token)):
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
        if before is None and backend.token_to_id(token.content) != number:
            raise CorruptFile(
                f"{folder}: tokenizer_config.json gives {token.content!r} the id {number}, "
                f"which does not follow the ids of tokenizer.json"
            )
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for name in SPECIAL_NAMES:
        text = special_text(config, name)
        if text is not None and text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])


# ---------------------------------------------------------------------- tokenizer_config.json


def read_text(path: Path) -> str:
    """Return the text of a file. A file that is not UTF-8 raises CorruptFile."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFile(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); get the file again") from None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, or an empty one if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise CorruptFile(f"{path} is not valid JSON ({error}); get the file again") from None
    if not isinstance(value, dict):
        raise CorruptFile(f"{path} is not a JSON object; get the file again")
    return value


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return the merged configuration, in which tokenizer_config.json overrides the older special_tokens_map.json."""
    return {**read_object(folder / "special_tokens_map.json"), **read_object(folder / "tokenizer_config.json")}


def special_text(config: dict[str, Any], name: str) -> str | None:
    """Return the text of a special token, which is written as a string or as an object with `content`; None if not given."""
    value = config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    if isinstance(value, str) and has_surrogate(value):
        raise CorruptFile(f"tokenizer_config.json: {name} contains half of a surrogate pair, which is not a character")
    return value if isinstance(value, str) and value else None


# ---------------------------------------------------------------------- lone surrogates


def has_surrogate(text: str) -> bool:
    """Whether a string contains half of a surrogate pair. JSON can spell it as an escape such as \\ud83d, but UTF-8 cannot encode
    it, so such a text cannot be tokenized or sent."""
    return _SURROGATE.search(text) is not None


def replace_surrogates(text: str) -> str:
    """Replace every half of a surrogate pair with U+FFFD."""
    return _SURROGATE.sub("\ufffd", text)
