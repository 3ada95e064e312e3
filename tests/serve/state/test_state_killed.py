"""A server that is killed loses nothing that a client was promised."""

import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.support.live_server import END, MODEL, running, until
from tests.support.postgres import Postgres
from tests.support.responses import ASKED, QUESTION, says
from tests.support.scripted_model import Scripted


def test_a_killed_server_has_stored_what_it_has_answered(scripted: Scripted, state_path: str) -> None:
    _kill(scripted, state_path)


@pytest.mark.slow
def test_a_killed_server_has_stored_what_it_has_answered_in_postgresql(
    scripted: Scripted, postgres_server: Postgres
) -> None:
    _kill(scripted, postgres_server.url)


def _kill(scripted: Scripted, url: str) -> None:
    command = [sys.executable, "-m", "tests.support.state_server", url]
    answered: list[Any] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().strip()
            with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
                create: Any = client.responses.create
                talk = client.conversations.create()
                alike = {"model": MODEL, "input": QUESTION, "temperature": 0}
                endless = {"max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}
                turn = create(conversation=talk.id, **alike)
                locked = client.conversations.create()

                def ask(streams: bool) -> None:
                    with suppress(openai.APIError):
                        while True:
                            done = create(stream=streams, **alike)
                            if streams:
                                done = list(done)[-1].response
                            assert done.status == "completed"
                            answered.append(done)

                clients = [threading.Thread(target=ask, args=(number % 2 == 0,)) for number in range(4)]
                for thread in clients:
                    thread.start()
                until(lambda: len(answered) >= 12)
                begun = create(**(alike | {"input": "Go on.", "background": True}), **endless)
                create(**(alike | {"input": "Go on.", "background": True, "conversation": locked.id}), **endless)
                assert client.responses.retrieve(begun.id).status in ("queued", "in_progress")
                process.kill()
                for thread in clients:
                    thread.join()
        finally:
            process.kill()
    with running(scripted.llm, state_url=url) as server:
        responses: Any = server.client.responses
        for done in [turn, *answered]:
            assert responses.retrieve(done.id) == done
        items = server.client.conversations.items.list(talk.id, order="asc")
        texts = [item.content[0].text for item in items]  # pyright: ignore
        assert texts == [QUESTION, "It costs 23."]
        seen = responses.retrieve(begun.id)
        assert (seen.status, seen.error.code, seen.output) == ("failed", "server_lost", [])
        longer = [*ASKED, {"role": "assistant", "content": "It costs 23."}, {"role": "user", "content": "Why?"}]
        says(scripted, "Brass." + END, longer)
        second = responses.create(model=MODEL, input="Why?", temperature=0, previous_response_id=answered[0].id)
        assert second.output_text == "Brass."
        server.client.conversations.items.create(locked.id, items=[{"role": "user", "content": "x"}])
