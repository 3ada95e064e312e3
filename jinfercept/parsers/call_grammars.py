"""What a turn may be that has to call, in the format of each family: grammars of what `formats` reads.

A turn is calls and nothing else: tags, names of tools, and arguments that their JSON schemas allow. Its arguments come in the
order in which they are declared. Knows no vocabulary but the tokens of the tags.
"""

import json
import keyword
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, final

from jinfercept.errors import RequestError
from jinfercept.parsers.call_schemas import arguments_schema, named_arguments
from jinfercept.parsers.formats import Format
from jinfercept.parsers.hermes import CLOSING, OPENING
from jinfercept.parsers.lark import Rules, one_of, quoted
from jinfercept.parsers.llama import PYTHON_END, PYTHON_START, PYTHON_TAG
from jinfercept.parsers.mistral import ARGS, CALL_ID, TOOL_CALLS
from jinfercept.parsers.python_grammar import python_value
from jinfercept.parsers.qwen_grammar import qwen_value
from jinfercept.parsers.qwen_xml import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END

_JSON_NAME = re.compile(r'[^<\[\n"\\\x00-\x1F]+')
_MISTRAL_NAME = re.compile(r"[\w.:/-]+")
_PYTHON_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_XML_NAME = re.compile(r"[^<>\s]([^<>\n]*[^<>\s])?")


def calls_grammar(form: Format, token_of: Callable[[str], int | None], template: str, parallel: bool) -> str:
    """A grammar, in llguidance's variant of Lark, of a turn that calls some of `form.tools`.

    Args:
        form: with the tools that may be called, at least one.
        token_of: the token that a tag is; None if it is written as text.
        template: the chat template's source: shows which of its forms a family has.
        parallel: several calls may be made; otherwise it is one.

    Raises:
        RequestError: the format cannot write a tool's name, or an argument so that it is what the schema says.
    """
    assert form.tools
    writing = _Writing(Rules(), form.tools, token_of, template, parallel)
    return writing.rules.text(rf"/\n{{0,2}}/ {_WRITERS[form.name](writing)}")


@final
@dataclass(frozen=True, slots=True)
class _Writing:
    """What a format's grammar is made of.

    Attributes:
        rules: those that there are.
        tools: see `Format`.
        token_of, template, parallel: see `calls_grammar`.
    """

    rules: Rules
    tools: Mapping[str, Mapping[str, Any]]
    token_of: Callable[[str], int | None]
    template: str
    parallel: bool

    def tag(self, text: str) -> str:
        """The token that a tag is, or its text."""
        token_id = self.token_of(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def tagged(self, opening: str, closing: str, body: str) -> str:
        """The same with or without tags, where there are tokens for them."""
        if self.token_of(opening) is None or (closing and self.token_of(closing) is None):
            return body
        return one_of((body, " ".join((self.tag(opening), body, *([self.tag(closing)] if closing else ())))))

    def several(self, call: str, between: str) -> str:
        """One call or more, if that is allowed."""
        call = self.rules.rule(call)
        return f"{call} ({between} {call})*" if self.parallel else call

    def each(self, write: Callable[[str, Mapping[str, Any]], str], names: re.Pattern[str]) -> str:
        """A call of any tool. Raises `RequestError` for names that the format cannot write."""
        for tool in self.tools:
            _check(names, tool, "tool")
        return self.rules.rule(one_of(self.rules.rule(write(*tool)) for tool in self.tools.items()))

    def objects(self, key: str) -> str:
        """A call as a JSON object."""

        def write(name: str, schema: Mapping[str, Any]) -> str:
            said = json.dumps(name, ensure_ascii=False)
            arguments = self.rules.json(arguments_schema(name, schema))
            return f"{quoted(f'{{"name": {said}, "{key}": ')} {arguments} {quoted('}')}"

        return self.each(write, _JSON_NAME)


def _hermes(writing: _Writing) -> str:
    call = rf'{writing.tag(OPENING)} "\n"? {writing.objects("arguments")} "\n"? {writing.tag(CLOSING)}'
    return writing.several(call, r'"\n"?') + r' "\n"?'


def _llama3_json(writing: _Writing) -> str:
    return writing.tagged(PYTHON_TAG, "", writing.several(writing.objects("parameters"), '"; "'))


def _llama4_json(writing: _Writing) -> str:
    return writing.tagged(PYTHON_START, PYTHON_END, writing.several(writing.objects("parameters"), '"; "'))


def _mistral(writing: _Writing) -> str:
    if ARGS not in writing.template:
        calls = writing.several(writing.objects("arguments"), '", "')
        return f'{writing.tag(TOOL_CALLS)} " "? "[" {calls} "]"'
    call_id = f"({writing.tag(CALL_ID)} /[a-zA-Z0-9]{{9}}/)? " if CALL_ID in writing.template else ""

    def write(name: str, schema: Mapping[str, Any]) -> str:
        arguments = writing.rules.json(arguments_schema(name, schema))
        return f"{quoted(name)} {call_id}{writing.tag(ARGS)} {arguments}"

    return writing.several(f"{writing.tag(TOOL_CALLS)} {writing.each(write, _MISTRAL_NAME)}", "")


def _python_list(writing: _Writing) -> str:
    def write(name: str, schema: Mapping[str, Any]) -> str:
        if any(keyword.iskeyword(part) for part in name.split(".")):
            raise _unwritable(name, "tool")
        members: list[tuple[str, bool]] = []
        for key, value, needed in named_arguments(name, schema):
            _check(_PYTHON_NAME, key, "argument")
            members.append((f"{quoted(f'{key}=')} {python_value(writing.rules, value)}", needed))
        return f"{quoted(f'{name}(')} {writing.rules.listed(members, quoted(', '))} {quoted(')')}"

    return f'"[" {writing.several(writing.each(write, _PYTHON_NAME), quoted(", "))} "]"'


def _pythonic(writing: _Writing) -> str:
    return writing.tagged(PYTHON_TAG, "", _python_list(writing))


def _llama4_pythonic(writing: _Writing) -> str:
    return writing.tagged(PYTHON_START, PYTHON_END, _python_list(writing))


def _qwen3_coder(writing: _Writing) -> str:
    def write(name: str, schema: Mapping[str, Any]) -> str:
        parts = [quoted(f"{FUNCTION}{name}>\n")]
        for key, value, needed in named_arguments(name, schema):
            _check(_XML_NAME, key, "argument")
            said = qwen_value(writing.rules, key, value, closing)
            parts.append(f"({quoted(f'{PARAMETER}{key}>\n')} {said} {rest})" + ("" if needed else "?"))
        return " ".join((*parts, writing.tag(FUNCTION_END)))

    if writing.token_of(PARAMETER_END) is None:
        closing, rest = f"\n{PARAMETER_END}\n", ""
    else:
        closing, rest = "\n", rf'{writing.tag(PARAMETER_END)} "\n"'
    call = rf'{writing.tag(OPENING)} "\n" {writing.each(write, _XML_NAME)} "\n" {writing.tag(CLOSING)}'
    return writing.several(call, r'"\n"?') + r' "\n"?'


_WRITERS: Mapping[str, Callable[[_Writing], str]] = MappingProxyType(
    {
        "hermes": _hermes,
        "qwen3_coder": _qwen3_coder,
        "llama3_json": _llama3_json,
        "llama4_json": _llama4_json,
        "mistral": _mistral,
        "pythonic": _pythonic,
        "llama4_pythonic": _llama4_pythonic,
    }
)


def _check(names: re.Pattern[str], name: str, what: str) -> None:
    if not names.fullmatch(name):
        raise _unwritable(name, what)


def _unwritable(name: str, what: str) -> RequestError:
    return RequestError(
        f"the model's format of calls cannot write the name of this {what}",
        got=repr(name)[:80],
        fix='give it a name of letters, digits and underscores, or leave the call to the model (tool_choice="auto")',
    )
