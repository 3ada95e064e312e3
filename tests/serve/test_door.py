"""New conversations at the door of a server: refused with a time to come again, or shown with their place."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from jinfercept.sched.door import RETRY_S, Overload
from tests.support.gate import Gate, closed_gate
from tests.support.live_server import Running, until
from tests.support.pretend import late_at_once
from tests.support.scripted_model import Scripted

LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 90, "ignore_eos": True, "stream": True}
KNOWN: dict[str, Any] = {"prompt": "k" * 600, "max_tokens": 2}


@contextmanager
def crowded(served: Running, scripted: Scripted, overload: Overload) -> Iterator[Gate]:
    """More answers than run at a time, of which one waits longer than it should, until the gate is open."""
    scripted.llm.restart(overload=overload)
    scripted.follow()
    served.http.post("/v1/completions", json=KNOWN)
    with (
        pytest.MonkeyPatch.context() as patch,
        closed_gate(scripted.llm) as gate,
        served.http.stream("POST", "/v1/completions", json=LONG | {"n": 9}) as answer,
    ):
        late_at_once(patch)
        pieces = answer.iter_raw()
        assert next(pieces)
        yield gate
        gate.open()
    served.wait_idle()
    scripted.llm.restart(overload="queue")


def test_a_new_conversation_is_refused_with_a_time_to_come_again(served: Running, scripted: Scripted) -> None:
    with crowded(served, scripted, "refuse"):
        for stream in (False, True):
            refused = served.http.post("/v1/completions", json={"prompt": "c" * 600, "stream": stream})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        batch = served.http.post("/v1/completions", json=KNOWN | {"prompt": [KNOWN["prompt"], "c" * 600]})
        assert (batch.status_code, served.http.get("/live").json()["counts"]["at_door"]) == (429, 0)
        messages = [{"role": "user", "content": "c" * 600}]
        body = {"model": "scripted", "max_tokens": 5, "messages": messages}
        assert served.http.post("/v1/messages", json=body).json()["error"]["type"] == "rate_limit_error"
        assert 'refused_requests_total{code="overloaded"' in served.http.get("/metrics").text


def test_a_conversation_that_waits_too_long_is_refused_likewise(
    served: Running, scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("sched.door", "serve.protocols.errors"):
        monkeypatch.setattr(f"jinfercept.{module}.MOST_DOOR_S", 0.0)
    with crowded(served, scripted, "queue") as gate:
        gate.open()
        refused = served.http.post("/v1/completions", json={"prompt": "c" * 600})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert int(refused.headers["retry-after"]) == RETRY_S
        stream = served.http.post("/v1/completions", json={"prompt": "c" * 600, "stream": True})
        assert (stream.status_code, '"code": "overloaded"' in stream.text.replace('":"', '": "')) == (200, True)


def test_a_new_conversation_that_waits_has_a_place_in_the_header_the_log_live_and_metrics(
    served: Running, scripted: Scripted, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="jinfercept.serve")
    with crowded(served, scripted, "queue") as gate, ExitStack() as stack:
        body = {"prompt": "c" * 600, "max_tokens": 2, "stream": True}
        answers = [stack.enter_context(served.http.stream("POST", "/v1/completions", json=body)) for _ in range(2)]
        assert [(answer.status_code, answer.headers["x-place-at-door"]) for answer in answers] == [
            (200, "1"),
            (200, "2"),
        ]
        until(lambda: served.http.get("/live").json()["counts"]["at_door"] == 2)
        live = served.http.get("/live").json()
        assert (live["counts"]["at_door"], live["counts"]["waiting"]) == (2, 1)
        assert [row["place"] for row in live["at_door"]] == [1, 2]
        assert 'jinfercept:requests{model_name="scripted",state="at_door"} 2.0' in served.http.get("/metrics").text
        gate.open()
        assert [answer.read()[-14:] for answer in answers] == [b"data: [DONE]\n\n"] * 2
        assert 'jinfercept:door_seconds_count{model_name="scripted"} 2.0' in served.http.get("/metrics").text
    until(lambda: "place_at_door=2 " in caplog.text and "door_s=" in caplog.text)
