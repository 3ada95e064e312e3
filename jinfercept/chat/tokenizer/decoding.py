"""The bytes of each token of a vocabulary, and the incremental decoding of token ids to text."""

import codecs
import json
from typing import Any, NamedTuple, Protocol, final

import tokenizers

from jinfercept.errors import ModelError


class ByteEncoding(NamedTuple):
    """How a vocabulary writes bytes as tokens."""

    byte_level: bool = False  # tokens are written in GPT-2's printable stand-ins, one character a byte
    byte_fallback: bool = False  # a token `<0xE2>` is one byte
    # texts in tokens and their meaning: the SentencePiece underscore is a space
    replacements: tuple[tuple[str, str], ...] = ()
    leading_spaces: int = 0  # of a decoded text, which come from the vocabulary

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            stand_ins = [_BYTE_OF.get(char) for char in token]
            return token.encode() if None in stand_ins else bytes(byte for byte in stand_ins if byte is not None)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


def read_byte_encoding(backend: tokenizers.Tokenizer) -> ByteEncoding:
    """Read the encoding that a backend's decoder undoes. Raises `ModelError` if its tokens cannot be decoded one by one."""
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    encoding = ByteEncoding()
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                encoding = encoding._replace(byte_level=True)
            case {"type": "ByteFallback"}:
                encoding = encoding._replace(byte_fallback=True)
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                encoding = encoding._replace(replacements=(*encoding.replacements, (old, new)))
            case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                encoding = encoding._replace(
                    replacements=(*encoding.replacements, (old, " ")), leading_spaces=int(scheme != "never")
                )
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                encoding = encoding._replace(leading_spaces=start)
            case {"type": "Fuse"}:
                pass
            case _:
                raise ModelError(
                    "the tokenizer decodes in a way that cannot be streamed",
                    got=f"decoder step {step}",
                    fix="use a byte-level or SentencePiece-like tokenizer",
                )
    return encoding


def _byte_stand_ins() -> dict[str, int]:
    # GPT-2's table, character to byte: printable Latin-1 is its own byte, characters from U+0100 on are the other bytes
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(unprintable)}


_BYTE_OF = _byte_stand_ins()


class TokenVocabulary(Protocol):
    """The part of a `Tokenizer` that decoding needs."""

    special_ids: frozenset[int]

    @property
    def leading_spaces(self) -> int: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@final
class IncrementalDetokenizer:
    """Decodes a stream of tokens one at a time. The joined texts equal `Tokenizer.decode` of the stream.

    A character is returned when its last byte has arrived. The work per token does not grow with the text.

    `tokenizers.decoders.DecodeStream` cannot replace it. Without a flush, half a character at the end is lost; a U+FFFD that is
    text is held back; and it raises an exception where SentencePiece's bytes break off after a whole character.
    """

    def __init__(
        self, tokenizer: TokenVocabulary, skip_special_tokens: bool = True, markup: frozenset[int] = frozenset()
    ) -> None:
        """Begin an empty text. The special tokens in `markup` are never left out."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - markup if skip_special_tokens else frozenset()
        self._leading_spaces = tokenizer.leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """Return the text that one more token makes certain: often "", never half a character."""
        if token_id in self._skipped:
            return ""
        return self._strip(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    @property
    def half_character(self) -> bool:
        """Whether the text ends within a character."""
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        """End the text: U+FFFD for an unfinished character, otherwise "". The next token begins a new character."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if not self._leading_spaces or not text:
            return text
        stripped = text.lstrip(" ")
        removed = min(self._leading_spaces, len(text) - len(stripped))
        self._leading_spaces = 0 if stripped else self._leading_spaces - removed
        return text[removed:]
