"""`Tokenizer`: converts text to token ids and back, and conversations to text.

It wraps a fast tokenizer of the `tokenizers` library, which encodes. Decoding works on the bytes of each token, so tokens that
are decoded one at a time give exactly the text of the whole.
"""

import copy
import json
import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import compress, pairwise
from operator import not_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

import tokenizers

from jinfercept.chat.tokenizer.decoding import IncrementalDetokenizer, read_byte_encoding
from jinfercept.chat.tokenizer.special_tokens import LiteralBackend, Rendered, SpecialTokenNames, cutting_names, encode
from jinfercept.errors import ModelError, RequestError, shown
from jinfercept.values import plain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SETTINGS_FILE = "jinfercept_tokenizer.json"
"""Written by `Tokenizer.save` beside `tokenizer.json`."""
EFFORTS = ("minimal", "low", "medium", "high", "xhigh", "max")
"""What clients may send as a model's effort to reason, besides `none`."""
_BARRED = re.compile("<[|｜].+[|｜]>", re.DOTALL)


@final
class Tokenizer:
    """One vocabulary, with its special tokens and its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        # texts of the tokens that chat templates may name: `bos_token`, `eos_token`, and so on
        special_tokens: Mapping[str, str] | None = None,
        # Jinja sources: `default`, and `tool_use` for models with a second one
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap a byte-level or SentencePiece-like backend. Raises `ModelError` if its tokens cannot be decoded one by one."""
        backend.encode_special_tokens = False
        backend.no_truncation()  # as a tokenizer.json may say of the texts of its training
        backend.no_padding()
        self._backend = backend
        self._literal: LiteralBackend | None = None
        self._lock = threading.Lock()
        self._efforts: dict[tuple[str, bool, str | None], bool] = {}
        self._encoding = read_byte_encoding(backend)
        self._bytes: dict[int, bytes] = {}
        self._special_tokens = dict(special_tokens or {})
        self._chat_templates = dict(chat_templates or {})
        self.bos_token_id = bos_token_id  # begins a text
        self.eos_token_ids = eos_token_ids  # end the generation
        # tokens that steer the model and are no text, left out of decoded text on request
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)

    def __reduce__(self) -> tuple[Any, ...]:
        settings = {"bos_token_id": self.bos_token_id, "eos_token_ids": self.eos_token_ids}
        settings |= {"special_tokens": self._special_tokens, "chat_templates": self._chat_templates}
        return partial(type(self), self._backend, **settings), ()

    def to_transformers(self) -> "PreTrainedTokenizerFast":
        """Make a tokenizer of `transformers` with the same tokens and chat templates, on a copy of the backend."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=copy.deepcopy(self._backend),
            chat_template=self._chat_templates
            if len(self._chat_templates) > 1
            else self._chat_templates.get("default"),
            clean_up_tokenization_spaces=False,
            **self._special_tokens,
        )

    @property
    def texts(self) -> dict[str, str | None]:
        """The special tokens that templates may name, and the chat template, by transformers' names."""
        template = self._chat_templates.get("default")
        return {"bos_token": None, "eos_token": None} | self._special_tokens | {"chat_template": template}

    def has_tokens_of(self, other: "Tokenizer") -> bool:
        """Whether every id that both have stands for the same token, not counting special ones."""
        own_tokens, other_tokens = (
            {id_: token for token, id_ in tokenizer._backend.get_vocab(with_added_tokens=False).items()}
            for tokenizer in (self, other)
        )
        return all(own_tokens[id_] == other_tokens[id_] for id_ in own_tokens.keys() & other_tokens.keys())

    @classmethod
    def from_saved(cls, path: Path) -> Self:
        """Read a tokenizer that `save` wrote into a directory. Raises `ModelError` if its files are damaged."""
        try:
            backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
            settings = json.loads((path / SETTINGS_FILE).read_text(encoding="utf-8"))
            eos_token_ids = frozenset(settings.pop("eos_token_ids"))
            texts = (*settings["special_tokens"].values(), *settings["chat_templates"].values())
            if not all(type(id_) is int for id_ in eos_token_ids) or not all(isinstance(text, str) for text in texts):
                raise TypeError(f"{SETTINGS_FILE} has values of other types than it should")
            return cls(backend, eos_token_ids=eos_token_ids, **settings)
        except ModelError:
            raise
        except Exception as error:  # tokenizers raises plain exceptions
            raise ModelError(
                "the tokenizer cannot be read", got=f"{path}: {error}", fix="convert the model again"
            ) from error

    def save(self, path: Path) -> None:
        """Write the tokenizer into an existing directory; `from_saved` reads it without `transformers`."""
        self._backend.save(str(path / "tokenizer.json"))
        settings = {
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": sorted(self.eos_token_ids),
            "special_tokens": self._special_tokens,
            "chat_templates": self._chat_templates,
        }
        (path / SETTINGS_FILE).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")

    @property
    def vocab_size(self) -> int:
        """Number of tokens. A model's output layer may be larger, since it is often padded."""
        return self._backend.get_vocab_size()

    @cached_property
    def ids_below(self) -> int:
        return max(self._backend.get_vocab().values(), default=-1) + 1

    def chat_template(self, tools: bool = False) -> str:
        """Return the Jinja source of the model's chat template, or of its template for tools.

        Raises `ModelError` if it has none.
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
        """Encode a text. Raises `RequestError` for half a surrogate pair, which no encoding can express.

        Args:
            add_special_tokens: whether to add the tokens that begin and end a text in this vocabulary (mostly a BOS token).
            plain: names of special tokens stay text, as they must in text from outside; otherwise they become those tokens.
        """
        return encode(self._literal_backend().backend if plain else self._backend, [text], add_special_tokens)[0]

    def segments(self, text: str) -> list[str]:
        """Split a text into segments. Their tokens in a row are those of the text, and equal segments have equal tokens.

        Names of special tokens are these tokens, except for names in which a `Rendered` text has breaks.
        """
        breaks: Sequence[int] = text.breaks if isinstance(text, Rendered) else ()
        own = self.special_token_names.own(text, breaks) if breaks else None
        names, pattern, cuts_literal = self._cuts
        if own is None:
            own, breaks, starts = [], (), [match.start() for match in pattern.finditer(text)]
        elif cuts_literal:
            starts = [start for start, stop in own if text[start:stop] in names]
        else:
            return [self._literal_backend().aliased(text, own)]
        segments = list[str]()
        for start, stop in pairwise([0, *starts, len(text)]):
            if bisect_right(breaks, start) < bisect_left(breaks, stop):  # a literal name is in it
                first, last = bisect_left(own, (start, 0)), bisect_left(own, (stop, 0))
                spans = ((begins - start, ends - start) for begins, ends in own[first:last])
                segments.append(self._literal_backend().aliased(text[start:stop], spans))
            elif start < stop:
                segments.append(text[start:stop])
        return segments

    def encode_segments(self, segments: Sequence[str]) -> list[list[int]]:
        """Encode segments from `segments`. Raises `RequestError` as `encode` does."""
        literal = self._literal
        aliased = [literal is not None and segment.startswith(literal.secret) for segment in segments]
        if literal is None or not any(aliased):
            return encode(self._backend, segments)
        with_aliases = iter(literal.encode([*compress(segments, aliased)]))
        without_aliases = iter(encode(self._backend, [*compress(segments, map(not_, aliased))]))
        return [next(with_aliases if has_aliases else without_aliases) for has_aliases in aliased]

    @cached_property
    def _cuts(self) -> tuple[frozenset[str], re.Pattern[str], bool]:
        added = self._backend.get_added_tokens_decoder()
        steering = {added[id_].content: id_ for id_ in self._steering_ids}
        apart = cutting_names(self._backend, steering)
        sources = "".join([*self._chat_templates.values(), *self._special_tokens.values()])
        # texts are cut at special tokens that templates write, and at those that end a text
        names = frozenset(name for name in apart if name in sources or steering[name] in self.eos_token_ids)
        pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
        # last: whether segments with literal names may stand among others, because every name is found wherever it stands
        return names, pattern, apart == steering.keys() and min(map(len, apart), default=0) > 1

    @cached_property
    def special_token_names(self) -> SpecialTokenNames:
        added = self._backend.get_added_tokens_decoder()
        steering = [token for id_, token in added.items() if id_ in self._steering_ids]
        normalizer = self._backend.normalizer
        return SpecialTokenNames(
            [token.content for token in steering],
            [token.content for id_, token in added.items() if id_ not in self._steering_ids],
            normalizer.normalize_str if normalizer and any(token.normalized for token in steering) else None,
        )

    @cached_property
    def _steering_ids(self) -> frozenset[int]:
        """Ids of added tokens that are special, end a turn, or probably begin one although they are not declared special.

        The latter are written `<|user|>` or `<｜User｜>`, or the chat template names them, unless they come in pairs, as
        `<tool_call>` and `</tool_call>` do: pairs stand within a turn, and texts may contain them.
        """
        names = {id_: token.content for id_, token in self._backend.get_added_tokens_decoder().items()}
        steering = (self.special_ids | self.eos_token_ids) & names.keys()
        named_ids, sources = {*names.values()}, "".join(self._chat_templates.values())
        for id_, name in names.items():
            paired = name.startswith("<") and {f"</{name[1:]}", f"<{name[2:]}"} & named_ids
            if _BARRED.fullmatch(name) or (name in sources and not paired):
                steering |= {id_}
        return steering

    def _literal_backend(self) -> LiteralBackend:
        steering = self._steering_ids
        # a second backend, since switching `encode_special_tokens` on a shared one would affect other threads
        with self._lock:
            if self._literal is None:
                self._literal = LiteralBackend.of(self._backend, steering)
            return self._literal

    def added_token_id(self, name: str) -> int | None:
        """Return the id of a token that was added to the vocabulary; None if there is none of this name."""
        added = self._backend.get_added_tokens_decoder()
        return next((id_ for id_, token in added.items() if token.content == name), None)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Decode ids. Bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary are ignored."""
        value = plain(ids)
        listed: list[Any] = list(value) if isinstance(value, Iterable) else [None]
        if not all(type(id_) is int for id_ in listed):
            raise RequestError("token ids are whole numbers", got=shown(ids), fix="give a list of them")
        detokenizer = IncrementalDetokenizer(self, skip_special_tokens)
        return "".join([*map(detokenizer.add, listed), detokenizer.flush()])

    def token_text(self, token_id: int) -> str:
        """Return one token as readable text: special tokens by name, half characters as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; none for an id outside the vocabulary."""
        if token_id not in self._bytes:
            token = self._backend.id_to_token(token_id)
            self._bytes[token_id] = b"" if token is None else self._encoding.to_bytes(token)
        return self._bytes[token_id]

    @property
    def leading_spaces(self) -> int:
        """Spaces at the beginning of a decoded text that come from the vocabulary, not the text (SentencePiece: 1)."""
        return self._encoding.leading_spaces

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Write a conversation as the model was trained to see it. Encode the text with `add_special_tokens=False`.

        Args:
            messages, tools: OpenAI-style; a template without tools ignores them.
            add_generation_prompt: whether the text ends where the assistant's answer begins.
            chat_template: a Jinja source instead of the model's.
            variables: further variables of the template, such as `enable_thinking`.

        Raises:
            ModelError: the model has no chat template.
            RequestError: the template refuses the messages, or is none.
        """
        source = self.chat_template(bool(tools)) if chat_template is None else chat_template
        from jinja2 import TemplateSyntaxError

        from jinfercept.chat.tokenizer.chat_templates import render

        own_variables = {
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return render(source, messages, own_variables | self._special_tokens | variables)
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

    def takes_effort(self, effort: str, tools: bool, chat_template: str | None = None) -> bool:
        """Whether a chat template, by default the model's, reads `reasoning_effort` and takes this one of `EFFORTS`.

        Some templates refuse efforts that they do not name. `tools` selects the model's template for conversations with tools.
        """
        if (takes := self._efforts.get((effort, tools, chat_template))) is None:
            takes, probe = False, [{"role": "user", "content": "-"}]
            with suppress(ModelError, RequestError):
                source = chat_template or self.chat_template(tools)
                if "reasoning_effort" in source:
                    takes = bool(self.apply_chat_template(probe, chat_template=source, reasoning_effort=effort))
            self._efforts[effort, tools, chat_template] = takes
        return takes
