"""What all tools share: a queue, a timeout, arguments that are parsed and checked, and a limit on the size of results.

An endpoint is a function of a call. Its exceptions become results that the model reads.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from jinfercept.calls import Tool
from jinfercept.chat.function_tools import ChatTool
from jinfercept.engine.tool_executor import CURRENT_CALL, AtOnce, CurrentCall, ToolExecutor, ToolRun
from jinfercept.sched.tenants import FairSlots
from jinfercept.tools.tool_tables import Limits, Place
from jinfercept.values import strict_json

BLOCKED_S = 5.0
"""Seconds for which the process of Python tools, or the event loop in it, may be blocked after a cancelled call; then the
process ends, and is started again."""
_GRACE_S = 1.0
"""Seconds after the timeout of an endpoint, with its own message, until the timeout of the dispatcher."""


class CallFailed(Exception):
    """A call that has no result; the message is for the model."""


@dataclass(frozen=True, slots=True)
class CallRequest:
    """A call for an endpoint."""

    arguments: Mapping[str, Any]  # parsed, not checked against a schema
    expires_s: float  # deadline of the call, in seconds of `time.monotonic`
    call: CurrentCall = field(default_factory=CurrentCall)


Endpoint = Callable[[CallRequest], Coroutine[Any, Any, str]]
"""Returns the result of a call. Runs on the loop of jinfercept's own coroutines, which it must not block; cancelled at the
timeout and when the request is aborted."""


@final
class CallQueue:
    """Limits how many calls run at once (None: any number); tenants take turns for the slots."""

    def __init__(self, most: int | None) -> None:
        self._turns = FairSlots(most) if most is not None else None

    async def run[T](self, tenant: str, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a call once it has a slot.

        Cancelling does not wait for the call to end; the call keeps its slot until it has ended.
        """
        if self._turns is not None:
            await self._turns.begin(tenant)

        def end(task: asyncio.Task[T]) -> None:
            if not task.cancelled():
                task.exception()  # retrieved also if the call was cancelled
            if self._turns is not None:
                self._turns.end(tenant)

        task = asyncio.ensure_future(work())
        task.add_done_callback(end)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            raise


def declare(name: str, description: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI's declaration of a function tool."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": dict(parameters)}}


def endpoint_tool(
    declaration: Mapping[str, Any],
    limits: Limits,
    endpoint: Endpoint,
    executor: ToolExecutor,
    queue: CallQueue,
) -> ChatTool:
    """Make a tool that an endpoint answers."""

    async def answer(arguments: str, expires_s: float) -> str:
        request, came_s = CallRequest(_object(arguments), expires_s, call := CURRENT_CALL.get()), time.monotonic()
        begun_s: float | None = None

        async def begin() -> str:
            nonlocal begun_s
            begun_s = time.monotonic()
            return await endpoint(request)

        try:
            async with asyncio.timeout(expires_s - time.monotonic()):
                text = await queue.run(call.tenant, begin)
        except TimeoutError as error:
            if time.monotonic() < expires_s:
                raise
            waited_s = (expires_s if begun_s is None else begun_s) - came_s
            waiting_note = f", of which other calls took {waited_s:.1f}" if 2 * waited_s > limits.timeout_s else ""
            raise TimeoutError(f"{limits.late} {limits.timeout_s:g} s{waiting_note}") from error
        return _cut(text, limits.max_result_bytes)

    def begin_call(arguments: str) -> ToolRun[str]:
        expires_s = time.monotonic() + limits.timeout_s
        return executor.submit(lambda: answer(arguments, expires_s), name)

    name, limit = declaration["function"]["name"], limits.max_result_tokens
    timeout_s = limits.timeout_s + _GRACE_S
    tool = Tool(AtOnce(begin_call), name=name, timeout_s=timeout_s, max_result_tokens=limit, calls=limits.calls)
    return ChatTool(declaration, tool)


def _cut(text: str, max_bytes: int | None) -> str:
    if max_bytes is None or len(data := text.encode(errors="replace")) <= max_bytes:
        return text
    note = f" ... (cut: {len(data)} bytes, {max_bytes} allowed)"
    return data[: max(0, max_bytes - len(note))].decode(errors="ignore") + note


def _object(arguments: str) -> dict[str, Any]:
    try:
        values = strict_json(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise CallFailed(f"the arguments are no JSON: {error}") from error
    if not isinstance(values, dict):
        raise CallFailed("the arguments are no JSON object")
    return values


Check = Callable[[Mapping[str, Any]], None]
"""Raises `CallFailed` for arguments that do not fit the schema; the model reads the message."""

QUESTION = {
    "type": "object",
    "properties": {"question": {"type": "string", "description": "with everything that is needed to answer it"}},
    "required": ["question"],
}
"""Schema of the arguments of a tool that declares none."""

_SHOWN_PROBLEMS = 5


def texts(names: list[str]) -> dict[str, Any]:
    """Make a schema of string arguments, all of them required."""
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}


def check_of(parameters: Mapping[str, Any], place: Place) -> Check:
    """Make a check against a schema: of draft 2020-12, or of the draft that its `$schema` names.

    Raises `ConfigError` if the schema is invalid, or its type is not object.
    """
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    named = isinstance(parameters.get("$schema"), str)
    draft = validator_for(parameters, default=Draft202012Validator) if named else Draft202012Validator
    try:
        draft.check_schema(dict(parameters))
    except SchemaError as error:
        where = ".".join(["parameters", *map(str, error.path)])
        raise place.error(f"{where} is no JSON schema", repr(error.instance)[:80], error.message[:200]) from error
    if parameters.get("type") != "object":
        raise place.error("parameters are an object's schema", repr(parameters.get("type")), 'type = "object"')
    validator = draft(parameters, format_checker=draft.FORMAT_CHECKER)

    def check(arguments: Mapping[str, Any]) -> None:
        wrong = sorted(
            f"{'.'.join(map(str, error.path)) or 'arguments'}: {error.message[:200]}"
            for error in validator.iter_errors(arguments)
        )
        if wrong:
            raise CallFailed(f"the arguments do not fit: {'; '.join(wrong[:_SHOWN_PROBLEMS])}")

    return check
