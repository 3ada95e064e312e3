"""Text to token ids and back, whatever file the vocabulary came from.

A `Tokenizer` wraps a fast tokenizer of the `tokenizers` library; encoding is that library's. Decoding is done here,
from the bytes behind each token, so that a stream of tokens can be decoded one at a time and give exactly the text of
the whole. It knows nothing of requests, stop strings or models.
"""

import codecs
import json
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import tokenizers

from jinfercept.errors import ModelError, RequestError
from jinfercept.tokenizer.gguf_vocab import read_vocab
from jinfercept.tokenizer.plain_backend import PlainBackend, encode
from jinfercept.tokenizer.special_names import SpecialNames

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_SETTINGS_FILE = "jinfercept_tokenizer.json"
_BARRED = re.compile("<[|｜].+[|｜]>", re.DOTALL)


@final
class Tokenizer:
    """One vocabulary, with its special tokens and its chat template.

    Attributes:
        bos_token_id: the token that begins a text, if there is one.
        eos_token_ids: tokens at which generation ends.
        special_ids: tokens that steer the model and are no text, left out of decoded text on request.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap `backend`.

        Args:
            backend: a byte-level or SentencePiece-like tokenizer.
            bos_token_id: see the class.
            eos_token_ids: see the class.
            special_tokens: what chat templates may name: `bos_token`, `eos_token`, and so on.
            chat_templates: Jinja sources: `default`, and `tool_use` for models with a second one.

        Raises:
            ModelError: the backend decodes in a way that is not known here.
        """
        backend.encode_special_tokens = False
        self._backend = backend
        self._plain: PlainBackend | None = None
        self._lock = threading.Lock()
        self._pieces = _read_decoder(backend)
        self._bytes: dict[int, bytes] = {}
        self._special_tokens = dict(special_tokens or {})
        self._chat_templates = dict(chat_templates or {})
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def from_gguf(cls, path: Path) -> Self:
        """The tokenizer inside a GGUF file.

        Raises:
            ModelError: the file cannot be read, or its vocabulary is of a kind that is not known.
        """
        vocab = read_vocab(path)
        return cls(
            vocab.backend,
            bos_token_id=vocab.bos_token_id,
            eos_token_ids=vocab.eos_token_ids,
            special_tokens=vocab.special_tokens,
            chat_templates=vocab.chat_templates,
        )

    @classmethod
    def from_directory(cls, path: Path) -> Self:
        """The tokenizer of a Hugging Face model directory, read by `transformers`.

        Raises:
            ModelError: the directory has no tokenizer, or one that has no fast form.
        """
        fix = "save the model's tokenizer there with save_pretrained (tokenizer.json and tokenizer_config.json)"
        if not any((path / name).is_file() for name in _TOKENIZER_FILES):
            raise ModelError("the model directory has no tokenizer", got=path, fix=fix)
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would ask for torch on import
        from transformers import AutoTokenizer

        try:
            loaded: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            configured = _configured_eos(path)
        except Exception as error:  # whatever a broken or foreign file makes of it
            raise ModelError("the tokenizer cannot be read", got=f"{path}: {error}", fix=fix) from error
        backend = getattr(loaded, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise ModelError("the tokenizer has no fast form", got=f"{path}: {type(loaded).__name__}", fix=fix)
        templates = loaded.chat_template or {}
        eos_token_ids = {loaded.eos_token_id} if loaded.eos_token_id is not None else set()
        return cls(
            backend,
            bos_token_id=loaded.bos_token_id,
            eos_token_ids=frozenset(eos_token_ids | configured),
            special_tokens={
                name: str(token) for name, token in loaded.special_tokens_map.items() if isinstance(token, str)
            },
            chat_templates={"default": templates} if isinstance(templates, str) else templates,
        )

    @classmethod
    def from_saved(cls, path: Path) -> Self:
        """The tokenizer that `save` wrote into a directory. Raises `ModelError` if its files are damaged."""
        try:
            backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
            settings = json.loads((path / _SETTINGS_FILE).read_text(encoding="utf-8"))
            eos_token_ids = frozenset(settings.pop("eos_token_ids"))
            texts = (*settings["special_tokens"].values(), *settings["chat_templates"].values())
            if not all(type(id_) is int for id_ in eos_token_ids) or not all(isinstance(text, str) for text in texts):
                raise TypeError(f"{_SETTINGS_FILE} has values of other types than it should")
            return cls(backend, eos_token_ids=eos_token_ids, **settings)
        except ModelError:
            raise
        except Exception as error:  # tokenizers raises plain exceptions
            raise ModelError(
                "the tokenizer cannot be read", got=f"{path}: {error}", fix="convert the model again"
            ) from error

    def save(self, path: Path) -> None:
        """Write all of it into a directory that exists; `from_saved` reads it without `transformers`."""
        self._backend.save(str(path / "tokenizer.json"))
        settings = {
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": sorted(self.eos_token_ids),
            "special_tokens": self._special_tokens,
            "chat_templates": self._chat_templates,
        }
        (path / _SETTINGS_FILE).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """How many tokens there are. A model's output layer may be larger: it is often padded."""
        return self._backend.get_vocab_size()

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(self._chat_templates)

    def chat_template(self, tools: bool = False) -> str:
        """The Jinja source of the model's chat template. Raises `ModelError` if it has none.

        Args:
            tools: of the one for conversations with tools, where there are two.
        """
        name = "tool_use" if tools and "tool_use" in self._chat_templates else "default"
        if name not in self._chat_templates:
            raise ModelError(
                "the model has no chat template",
                got=f"templates {sorted(self._chat_templates)}",
                fix="send a plain prompt, put a chat_template.jinja beside the tokenizer, or pass chat_template=…",
            )
        return self._chat_templates[name]

    def encode(self, text: str, add_special_tokens: bool = False, *, plain: bool = False) -> list[int]:
        """The ids of `text`.

        Args:
            text: any text.
            add_special_tokens: whether to begin and end it as the vocabulary says (with a BOS token, mostly).
            plain: special tokens written out in the text stay text (it comes from a stranger); otherwise they become those
                tokens.

        Raises:
            RequestError: the text holds half a surrogate pair, which no encoding can express.
        """
        return encode(self._plain_backend().backend if plain else self._backend, text, add_special_tokens)

    def encode_own(self, text: str, own: Sequence[tuple[int, int]]) -> list[int]:
        """The ids of `text`, in which special tokens are those whose names stand at these places, and no others.

        Args:
            text: any text.
            own: begin and end of names, in ascending order.

        Raises:
            RequestError: as `encode`.
        """
        return self._plain_backend().encode(text, own)

    @cached_property
    def special_names(self) -> SpecialNames:
        """The names of the tokens that steer the model."""
        added = self._backend.get_added_tokens_decoder()
        steering = [token for id_, token in added.items() if id_ in self._steering_ids]
        normalizer = self._backend.normalizer
        return SpecialNames(
            [token.content for token in steering],
            [token.content for id_, token in added.items() if id_ not in self._steering_ids],
            normalizer.normalize_str if normalizer and any(token.normalized for token in steering) else None,
        )

    @cached_property
    def _steering_ids(self) -> frozenset[int]:
        """Added tokens that are special, end a turn, or are likely to begin one though they are not declared special.

        The latter are written `<|user|>` or `<｜User｜>`, or the chat template names them, unless they come in pairs, as
        `<tool_call>` and `</tool_call>` do: those are within a turn, and texts may have them.
        """
        names = {id_: token.content for id_, token in self._backend.get_added_tokens_decoder().items()}
        steering = (self.special_ids | self.eos_token_ids) & names.keys()
        known, sources = {*names.values()}, "".join(self._chat_templates.values())
        for id_, name in names.items():
            paired = name.startswith("<") and {f"</{name[1:]}", f"<{name[2:]}"} & known
            if _BARRED.fullmatch(name) or (name in sources and not paired):
                steering |= {id_}
        return steering

    def _plain_backend(self) -> PlainBackend:
        """The backend that takes special tokens for text; a switch of the other one would have to wait for who uses it."""
        steering = self._steering_ids
        with self._lock:
            if self._plain is None:
                self._plain = PlainBackend.of(self._backend, steering)
            return self._plain

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens)
        return "".join([*map(detokenizer.add, ids), detokenizer.flush()])

    def token_text(self, token_id: int) -> str:
        """One token as text, for showing to people: special tokens by name, half characters as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to the text; none for an id outside the vocabulary."""
        if token_id not in self._bytes:
            token = self._backend.id_to_token(token_id)
            self._bytes[token_id] = b"" if token is None else self._pieces.to_bytes(token)
        return self._bytes[token_id]

    @property
    def leading_spaces(self) -> int:
        """How many spaces that begin a decoded text are the vocabulary's, not the text's (SentencePiece: 1)."""
        return self._pieces.leading_spaces

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the model was trained to see it; encode it with `add_special_tokens=False`.

        Args:
            messages: OpenAI-style messages: `role`, `content`, and what else the template reads.
            tools: OpenAI-style tool declarations; a template that knows nothing of tools leaves them out.
            add_generation_prompt: whether the text ends where the assistant's answer begins.
            chat_template: a Jinja source instead of the model's.
            variables: what else the template reads, `enable_thinking` for example.

        Raises:
            ModelError: the model has no chat template.
            RequestError: the template refuses the messages, or is none.
        """
        source = self.chat_template(bool(tools)) if chat_template is None else chat_template
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template  # sandboxed; two seconds to import

        try:
            (text,), _ = render_jinja_template(  # pyright: ignore[reportAssignmentType]
                conversations=[list(messages)],  # pyright: ignore[reportArgumentType]
                tools=list(tools) if tools else None,  # pyright: ignore[reportArgumentType]
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                **(self._special_tokens | variables),  # pyright: ignore[reportArgumentType]
            )
        except TemplateSyntaxError as error:
            raise RequestError(
                "the chat template is not valid Jinja", got=f"line {error.lineno}: {error.message}", fix="correct it"
            ) from error
        except Exception as error:  # a template is a program: it may fail in any way
            raise RequestError(
                "the model's chat template does not take these messages",
                got=f"{type(error).__name__}: {error}",
                fix="give the roles, their order and the fields that the model's template expects",
            ) from error
        return text


def load_tokenizer(source: Path | None) -> Tokenizer | None:
    """The tokenizer of a model directory, converted or not, or of a `.gguf` file; None where there is none to read.

    Raises:
        ModelError: there is a tokenizer, and it cannot be used.
    """
    if source is None:
        return None
    if source.suffix == ".gguf":
        return Tokenizer.from_gguf(source)
    if (source / _SETTINGS_FILE).is_file():
        return Tokenizer.from_saved(source)
    if any((source / name).is_file() for name in _TOKENIZER_FILES):
        return Tokenizer.from_directory(source)
    return None


@final
class IncrementalDetokenizer:
    """Decodes a stream of tokens one at a time; all that it returned, joined, is `Tokenizer.decode` of the stream.

    A character is returned when its last byte has come. The work per token does not grow with the text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._leading_spaces = tokenizer.leading_spaces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token_id: int) -> str:
        """The text that is certain now that `token_id` has come; often empty, never half a character."""
        if token_id in self._skipped:
            return ""
        return self._strip(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """What is left of an unfinished character: U+FFFD or nothing. The next token begins a new one."""
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, text: str) -> str:
        if not self._leading_spaces or not text:
            return text
        stripped = text.lstrip(" ")
        removed = min(self._leading_spaces, len(text) - len(stripped))
        self._leading_spaces = 0 if stripped else self._leading_spaces - removed
        return text[removed:]


class _Pieces(NamedTuple):
    """How a vocabulary writes bytes as tokens."""

    byte_level: bool = False  # GPT-2's printable stand-ins, a character a byte
    byte_fallback: bool = False  # <0xE2>: a token that is one byte
    replacements: tuple[tuple[str, str], ...] = ()  # the SentencePiece underscore
    leading_spaces: int = 0

    def to_bytes(self, token: str) -> bytes:
        if self.byte_level:
            stand_ins = [_BYTE_OF.get(char) for char in token]
            return token.encode() if None in stand_ins else bytes(byte for byte in stand_ins if byte is not None)
        if self.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()


def _read_decoder(backend: tokenizers.Tokenizer) -> _Pieces:
    """What the backend's decoder does, a token at a time."""
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    pieces = _Pieces()
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                pieces = pieces._replace(byte_level=True)
            case {"type": "ByteFallback"}:
                pieces = pieces._replace(byte_fallback=True)
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                pieces = pieces._replace(replacements=(*pieces.replacements, (old, new)))
            case {"type": "Metaspace", "replacement": old, "prepend_scheme": scheme}:
                pieces = pieces._replace(
                    replacements=(*pieces.replacements, (old, " ")), leading_spaces=int(scheme != "never")
                )
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                pieces = pieces._replace(leading_spaces=start)
            case {"type": "Fuse"}:
                pass
            case _:
                raise ModelError(
                    "the tokenizer decodes in a way that cannot be streamed",
                    got=f"decoder step {step}",
                    fix="use a byte-level or SentencePiece-like tokenizer",
                )
    return pieces


def _configured_eos(path: Path) -> set[int]:
    """The end tokens that the model's own configuration adds to the tokenizer's."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (path / name).is_file():
            eos = json.loads((path / name).read_text(encoding="utf-8")).get("eos_token_id")
            ids.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if not all(type(id_) is int for id_ in ids):
        raise TypeError(f"eos_token_id {ids}"[:200])
    return ids


def _byte_stand_ins() -> dict[str, int]:
    """GPT-2's table, character to byte: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_stand_ins()
