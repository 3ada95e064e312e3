"""Token ids to text, one token at a time."""

import codecs
from typing import Protocol, final


class TokenVocabulary(Protocol):
    """The part of a `Tokenizer` that decoding needs."""

    special_ids: frozenset[int]

    @property
    def leading_spaces(self) -> int: ...

    def token_bytes(self, token_id: int) -> bytes: ...


@final
class IncrementalDetokenizer:
    """Decodes a stream of tokens one at a time; the returned texts, joined, are `Tokenizer.decode` of the stream.

    A character is returned when its last byte has come. The work per token does not grow with the text.

    `tokenizers.decoders.DecodeStream` cannot replace it: without a flush, half a character at the end is lost; a U+FFFD that is
    text is held back; and it raises an exception where SentencePiece's bytes break off behind a whole character.
    """

    def __init__(
        self, tokenizer: TokenVocabulary, skip_special_tokens: bool = True, markup: frozenset[int] = frozenset()
    ) -> None:
        """An empty text.

        Args:
            skip_special_tokens: whether special tokens are left out.
            markup: special tokens that are never left out.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - markup if skip_special_tokens else frozenset()
        self._leading_spaces = tokenizer.leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """The text that is certain after one more token; often empty, never half a character."""
        if token_id in self._skipped:
            return ""
        return self._strip(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    @property
    def half_character(self) -> bool:
        """Whether bytes of an unfinished character have come."""
        return bool(self._utf8.getstate()[0])

    def flush(self) -> str:
        """The end of the text: U+FFFD for an unfinished character, else nothing. The next token begins a new character."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if not self._leading_spaces or not text:
            return text
        stripped = text.lstrip(" ")
        removed = min(self._leading_spaces, len(text) - len(stripped))
        self._leading_spaces = 0 if stripped else self._leading_spaces - removed
        return text[removed:]
