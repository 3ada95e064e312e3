"""Limits that keys share: stored responses, responses in the background. A key at its limit takes nothing from another."""

import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from jinfercept.tenants.quota import ExpiringEntries, Quota
from tests.support.live_server import END, MODEL, Running, running, until
from tests.support.responses import QUESTION, answer, says
from tests.support.scripted_model import Scripted


@pytest.fixture
def shared(scripted: Scripted) -> Iterator[Running]:
    """A server for two keys, with room for six responses and two places in the background for each key."""
    keys = ("hostile", "polite")
    limits: Any = {"max_stored_responses": 6, "max_background_responses": 2}
    with running(scripted.llm, api_key=keys, **limits) as server:
        yield server


@pytest.fixture
def polite(shared: Running) -> Iterator[OpenAI]:
    """A client of the second key."""
    with OpenAI(base_url=f"{shared.url}/v1", api_key="polite", max_retries=2, timeout=60) as client:
        yield client


def test_one_key_does_not_push_out_what_another_has_stored(shared: Running, polite: OpenAI, scripted: Scripted) -> None:
    says(scripted, "23." + END)
    mine = polite.responses.create(model=MODEL, input=QUESTION, temperature=0)
    names = [answer(shared).id for _ in range(34)]
    until(lambda: [name for name in names if _is_stored(shared.client, name)] == names[-5:])
    assert polite.responses.retrieve(mine.id) == mine


@pytest.mark.usefixtures("gate")
def test_a_key_has_so_many_responses_in_the_background(shared: Running, polite: OpenAI, scripted: Scripted) -> None:
    scripted.follow()
    endless = {"max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}
    names = [answer(shared, background=True, **endless).id for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="have 2 responses in the background") as refused:
        answer(shared, background=True)
    assert refused.value.response.headers["Retry-After"] == "1"
    polite.responses.create(model=MODEL, input=QUESTION, background=True, max_output_tokens=1)
    for name in names:
        shared.client.responses.cancel(name)
    read = shared.client.responses.retrieve  # a busy machine commits their ends behind the answers
    until(lambda: {read(name).status for name in names} == {"cancelled"})
    names.append(answer(shared, background=True, max_output_tokens=1).id)
    until(lambda: shared.client.responses.retrieve(names[-1]).status == "incomplete")


def test_events_for_which_there_is_no_room_are_not_kept(
    served: Running, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(scripted, "It costs 23. " * 30 + END)
    kept = ExpiringEntries[Any](Quota(9, 2_000), 60.0, time.monotonic)
    monkeypatch.setattr(served.service.state, "events", kept)
    whole = answer(served, background=True, stream=True)
    name = next(iter(whole)).response.id
    with pytest.raises(openai.APIError, match="no room to keep events"):
        list(whole)
    until(lambda: served.client.responses.retrieve(name).status == "completed")
    with pytest.raises(openai.BadRequestError, match="events of this response are not kept here"):
        served.client.responses.retrieve(name, stream=True)
    assert len(kept) == 0


def _is_stored(client: OpenAI, name: str) -> bool:
    try:
        return client.responses.retrieve(name).id == name
    except openai.NotFoundError:
        return False
