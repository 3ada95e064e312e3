"""The process of an MCP server, with messages over standard input and output. It always ends within a time limit.

The SDK's own client for such servers waits for fixed times when it ends one, and does not say which process it is.
"""

import os
import re
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, final

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from jinfercept.tools.mcp_transport import MAX_ANSWER_BYTES

_POLL_S = 0.01
_EXIT_S = 2.0
_WATCH_S = 0.2
_PIPE_ERRORS = (anyio.EndOfStream, anyio.ClosedResourceError, anyio.BrokenResourceError, OSError)
_NO_LINE = (anyio.IncompleteRead, anyio.DelimiterNotFound)
"""The output ends within a line, or a line is longer than an answer may be."""


_HALF = re.compile(r"\\(?:(\\|u[dD][89abAB]..\\u[dD][c-fC-F]..)|u[dD][89a-fA-F]..)")
"""What is no half of a surrogate pair, although it looks like one, is in the group."""


@final
class McpProcess:
    """A command that runs an MCP server. `streams` starts it, and may be used again after it has ended."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: str) -> None:
        # variables in addition to those that the SDK passes
        self._command, self._env, self._cwd = command, env, cwd
        self._process: Process | None = None

    @asynccontextmanager
    async def streams(self, lost: Callable[[], object]) -> AsyncGenerator[Any]:
        """Start the process, and end it on exit. Yields an iterator over its messages and a stream for messages to it.

        Args:
            lost: called when the output of the process ends.
        """
        self._process = process = await anyio.open_process(
            self._command,
            env=get_default_environment() | dict(self._env),
            stderr=None,  # this process's, whatever `sys.stderr` is
            cwd=self._cwd,
            start_new_session=True,  # so that its own children end with it
        )
        sent, write = anyio.create_memory_object_stream[SessionMessage](0)
        try:
            async with sent, write, anyio.create_task_group() as tasks:
                tasks.start_soon(_write, process, write)
                tasks.start_soon(_watch, process)
                yield _messages(process, lost), sent
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await self._end(process)

    def kill(self) -> None:
        if self._process is not None:
            _signal(self._process, signal.SIGKILL)

    async def _end(self, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(*_PIPE_ERRORS):
            await process.stdin.aclose()
        # each signal goes to the whole group, so children that are left are killed too
        for number in (signal.SIGTERM, signal.SIGKILL):
            await _has_ended(process, _EXIT_S)
            _signal(process, number)
        await _has_ended(process, _EXIT_S)
        with suppress(*_PIPE_ERRORS):
            await process.stdout.aclose()
        # what asyncio keeps of a process whose pipes another process holds; nothing public has it
        transport = getattr(getattr(process, "_process", None), "_transport", None)
        if transport is not None:
            with suppress(PermissionError):  # it may not be killed
                transport.close()
        self._process = None


async def _messages(process: Process, lost: Callable[[], object]) -> AsyncGenerator[SessionMessage | Exception]:
    assert process.stdout is not None
    lines = BufferedByteReceiveStream(process.stdout)
    with suppress(*_PIPE_ERRORS, *_NO_LINE):
        while True:
            yield _message(await lines.receive_until(b"\n", MAX_ANSWER_BYTES))
    lost()  # before the calls that wait are failed


async def _watch(process: Process) -> None:
    assert process.stdout is not None
    # a child may hold the pipe open after the process has ended
    while process.returncode is None:
        await anyio.sleep(_WATCH_S)
    await anyio.sleep(_WATCH_S)  # for what it has written
    await process.stdout.aclose()


async def _write(process: Process, write: Any) -> None:
    assert process.stdin is not None
    with suppress(*_PIPE_ERRORS):
        async for message in write:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            await process.stdin.send(text.encode() + b"\n")


def _message(line: bytes) -> SessionMessage | Exception:
    # halves of surrogate pairs, as some servers write where they cut a text, are no JSON for pydantic
    text = _HALF.sub(lambda match: match[0] if match[1] else "\ufffd", line.decode(errors="replace"))
    try:
        return SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False))
    except ValueError as error:
        return error


async def _has_ended(process: Process, timeout_s: float) -> bool:
    # `process.wait` also waits for the pipes, which children may hold
    with anyio.move_on_after(timeout_s):
        while process.returncode is None:
            await anyio.sleep(_POLL_S)
    return process.returncode is not None


def _signal(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
