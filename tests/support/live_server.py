"""A server in a thread of the tests, on a model that writes what a script says, and clients for it."""

import asyncio
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Unpack

import httpx2
import uvicorn.server
from openai import OpenAI

from jinfercept.chat.options import ChatOptions
from jinfercept.engine.state import EngineState
from jinfercept.llm import LLM
from jinfercept.serve.app import create_app
from jinfercept.serve.options import ServerOptions
from jinfercept.serve.serve import DrainingServer, listen
from jinfercept.serve.server_tools import ServerTools
from jinfercept.serve.service import Service
from tests.support.engine_state import engine_state
from tests.support.scripted_model import Scripted
from tests.support.tool_runner import until as until

MODEL = "scripted"
END = "<|im_end|>"


async def _sleep_briefly(delay_s: float) -> None:
    await asyncio.sleep(min(delay_s, 0.005))


# uvicorn looks ten times a second whether it has to end, and whether its connections have; hundreds of servers end here.
uvicorn.server.asyncio = SimpleNamespace(**vars(asyncio) | {"sleep": _sleep_briefly})  # pyright: ignore


@dataclass(frozen=True)
class Running:
    """A server that runs.

    Attributes:
        url: without a path.
        client: of OpenAI's, without a key.
        http: for what OpenAI's cannot do.
    """

    url: str
    llm: LLM
    server: DrainingServer
    service: Service
    client: OpenAI
    http: httpx2.Client

    def chat(self, **fields: Any) -> httpx2.Response:
        """A raw request."""
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0} | fields
        return self.http.post("/v1/chat/completions", json=body)

    def wait_idle(self) -> None:
        """Until nothing is in the engine but contexts that are retained for follow-ups: no page is in use, and none is lost."""
        engine = self.llm.engine
        until(lambda: not engine.thread.busy and not self.state.has_work and self.state.quiescent)
        engine.check_pages()
        assert self.state.pages.used == 0
        assert self.state.num_unfinished == 0

    @property
    def state(self) -> EngineState:
        """The engine between two steps."""
        return engine_state(self.llm)


@contextmanager
def running(
    llm: LLM, tools: ServerTools | None = None, *, send_buffer: int | None = None, **options: Any
) -> Iterator[Running]:
    """Serve a model, and tools, at a port that is free; `send_buffer`: bytes that the kernel takes of what is not read yet."""
    patient = {"port": 0, "served_model_name": (MODEL,), "drain_timeout": 2.0}
    settings = ServerOptions(**(patient | options))
    service = Service(llm, "tiny", settings, tools, settings.open_state(60.0))
    listener, url = listen(settings)
    if send_buffer is not None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # connections have their listener's
    server = DrainingServer(create_app(service), service, listener)
    thread = threading.Thread(target=server.serve_until_signal)
    thread.start()
    until(lambda: server.started)
    key = (*settings.api_key, *settings.operator_key, "none")[0]
    try:
        with (
            OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client,
            httpx2.Client(base_url=url, timeout=60) as http,
        ):
            yield Running(url, llm, server, service, client, http)
    finally:
        if not service.draining:
            server.handle_exit(signal.SIGTERM, None)
        thread.join()


def prompt_of(scripted: Scripted, messages: Any, tools: Any = (), **options: Unpack[ChatOptions]) -> str:
    """A conversation as the template writes it."""
    [request] = scripted.llm.make_chats([messages], None, tools, options)
    assert request.prompt is not None
    return request.prompt
