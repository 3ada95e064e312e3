"""`render`: writes a conversation with a model's chat template.

Templates are Jinja sources that come with a model, so they are programs of strangers. They run in Jinja's sandbox on plain
copies of JSON, with the functions and restrictions of `transformers.utils.chat_template_utils`, whose import takes seconds.
Two things differ: lists may grow and shrink, and the result of `map` is written as a list.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, cast

from jinja2 import Template, TemplateError, ext, nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Fields under which a message has its reasoning: templates read the first, those of gpt-oss the second."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset({"first", "index", "index0", "last", "length", "nextitem", "previtem"})
_LIST_CHANGES = frozenset({"append", "extend", "insert", "pop"})


def render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """Write a conversation with a template, which knows `messages` and the `variables`.

    Raises:
        TypeError: messages or variables contain a value that is not JSON.
        jinja2.TemplateError: the source is no template, or the template refuses the messages.
        Exception: any other failure of the template.
    """
    values = _copied(dict(variables)) | {"messages": [_with_reasoning(_copied(message)) for message in messages]}
    return _compiled(source).render(values)


class _GenerationBlocks(ext.Extension):
    """`{% generation %}` marks the assistant's text for training; its body is written unchanged."""

    tags = {"generation"}  # noqa: RUF012 # as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """Stands in for `dict` in templates, without the attributes of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Names that begin with an underscore lead into the interpreter, so a namespace has none."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # an attribute may be called `self`
        self, attributes = args[0], dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attributes that begin with an underscore, such as {name!r}")


class _Environment(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        # as the sandbox, without the exception that it raises and catches for every key of a dict
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            fields = cast(dict[str, Any], obj)
            return fields[attribute] if attribute in fields else self.undefined(obj=obj, name=attribute)
        if type(obj) is LoopContext and attribute in _LOOP_ATTRIBUTES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # some templates change lists, which are copies
        return (type(obj) is list and attr in _LIST_CHANGES) or super().is_safe_attribute(obj, attr, value)


@lru_cache(maxsize=32)
def _compiled(source: str) -> Template:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, ext.loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "dict": _Dict(),
        "namespace": _Namespace,
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment.from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # JSON as models saw it in training; Jinja's own filter escapes for HTML
    pair = None if separators is None else tuple(separators)
    return _encoder(ensure_ascii, indent, pair, sort_keys).encode(value)


@lru_cache(maxsize=32)
def _encoder(
    ensure_ascii: bool, indent: int | str | None, separators: tuple[str, str] | None, sort_keys: bool
) -> json.JSONEncoder:
    return json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_as_list
    )


def _as_list(value: Any) -> list[Any]:
    if isinstance(value, Iterator):
        return list(cast(Iterator[Any], value))
    raise TypeError(f"not JSON: {type(value).__name__}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _with_reasoning(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise TypeError(f"a message is an object, not {message!r}")
    fields = cast(dict[str, Any], message)
    reasoning = next((fields[name] for name in _REASONING if fields.get(name) is not None), None)
    return fields if reasoning is None else {"thinking": reasoning} | fields | {"reasoning_content": reasoning}


def _copied(value: Any) -> Any:
    kind = type(value)
    if kind is str and (value.isascii() or _SURROGATE.search(value) is None):
        return value
    # the sandbox knows the methods of plain lists, dicts, texts and numbers
    if kind is dict and {*map(type, value)} <= {str}:
        return {_copied(key): _copied(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return [_copied(item) for item in value]
    if kind is bool or kind is int or value is None:
        return value
    return json.loads(json.dumps(value, default=_as_dict))


def _as_dict(value: Any) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(cast(Mapping[Any, Any], value))
    raise TypeError(f"a chat template reads JSON, not {type(value).__name__}")
