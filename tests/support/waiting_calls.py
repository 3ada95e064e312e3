"""Calls that wait for a person, without a model that makes them."""

import asyncio
import threading
import time
from concurrent.futures import Future
from typing import Any

from jinfercept.engine.tool_executor import CurrentCall
from jinfercept.tools.calls import CallFailed, CallRequest
from jinfercept.tools.inbox import Inbox
from tests.support.live_server import until


def ask(inbox: Inbox, tenant: str = "", **arguments: Any) -> Future[str]:
    """A call that waits, as a tool's thread makes it."""
    answer: Future[str] = Future()

    def wait() -> None:
        request = CallRequest(arguments, time.monotonic() + 60, CurrentCall(request_id="chatcmpl-1", tenant=tenant))
        try:
            answer.set_result(asyncio.run(inbox.ask("approve", request)))
        except CallFailed as error:
            answer.set_exception(error)

    threading.Thread(target=wait).start()
    until(lambda: any(pending.arguments == arguments for pending in inbox.pending()))
    return answer
