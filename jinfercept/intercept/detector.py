"""Finds calls in a request's generated tokens, by stop strings or by a script."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import final

from jinfercept.calls import Call, Tool
from jinfercept.errors import RequestError, shown
from jinfercept.hooks import Watch

MAX_ARGUMENT_CHARS = 8192
"""Limit of a call's arguments; text beyond it is no call."""


@final
class StopStringDetector:
    """A call opens with a tool's `start` text and is complete at its `stop` text, across token borders.

    Args:
        tools: those with a `start`; the earliest opening in the text wins, the longest if two open at the same place.
    """

    def __init__(self, tools: Sequence[Tool]) -> None:
        listed = list(tools) if isinstance(tools, Iterable) else [tools]
        if not all(isinstance(tool, Tool) for tool in listed):
            raise RequestError(
                "tools must be a list of Tool", got=shown(tools), fix="[Tool(function, start=…, stop=…)]"
            )
        self._marks = [(tool.start, tool.stop, tool.name) for tool in listed if tool.start and tool.stop]

    def watch(self) -> Watch:
        return _StopStringWatch(self._marks)


class _StopStringWatch:
    """Text since the last call that may still matter, and the tokens that it came from."""

    def __init__(self, marks: list[tuple[str, str, str]]) -> None:
        self._marks = marks
        self._keep = max((len(start) for start, _, _ in marks), default=1) - 1
        self._text = ""
        self._origins: list[int] = []  # the token index of every character
        self._open: tuple[str, str, str] | None = None
        self._searched = 0

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        self._text += text
        self._origins += [index] * len(text)
        while True:
            if self._open is None and not self._find_start():
                return ()
            assert self._open is not None
            start, stop, name = self._open
            limit = len(start) + MAX_ARGUMENT_CHARS + len(stop)
            end = self._text.find(stop, max(len(start), self._searched - len(stop) + 1), limit)
            if end >= 0:
                call = Call(name, self._text[len(start) : end], (self._origins[0], index + 1))
                self._text, self._origins, self._open = "", [], None
                return (call,)
            self._searched = len(self._text)
            if len(self._text) < limit:
                return ()
            self._cut(len(start))
            self._open = None

    def _find_start(self) -> bool:
        """Open the call that begins earliest; wait while one that begins no later may still be on its way."""
        text = self._text
        openings = [(at, -len(mark[0]), mark) for mark in self._marks if (at := text.find(mark[0])) >= 0]
        first = max(0, len(text) - self._keep)
        coming = next((at for at in range(first, len(text)) if self._may_begin(text[at:])), len(text))
        if not openings or coming <= min(openings)[0]:
            self._cut(min(coming, min(openings)[0]) if openings else coming)
            return False
        at, _, self._open = min(openings)
        self._cut(at)
        self._searched = 0
        return True

    def _may_begin(self, text: str) -> bool:
        return any(len(text) < len(start) and start.startswith(text) for start, _, _ in self._marks)

    def _cut(self, count: int) -> None:
        self._text, self._origins = self._text[count:], self._origins[count:]


@final
class ScriptedDetector:
    """Calls at fixed places, independent of the tokens: for benchmarks and tests.

    Args:
        script: calls by the number of tokens generated so far; results of tools do not count.
    """

    def __init__(self, script: Mapping[int, Sequence[Call]]) -> None:
        try:
            self.script = {count: tuple(calls) for count, calls in script.items()}
        except (AttributeError, TypeError):
            raise RequestError(
                "a script must map numbers of tokens to lists of calls", got=shown(script), fix="{3: [Call(…)]}"
            ) from None

    def watch(self) -> Watch:
        return _ScriptedWatch(self.script)


class _ScriptedWatch:
    def __init__(self, script: Mapping[int, tuple[Call, ...]]) -> None:
        self._script = script
        self._count = 0

    def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
        self._count += 1
        calls = self._script.get(self._count)
        return tuple([replace(call, span=(index, index + 1)) for call in calls]) if calls else ()
