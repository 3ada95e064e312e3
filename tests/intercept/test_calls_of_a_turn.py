"""Calls of one turn wait for a sync tool, and what outlasts its call ends with its request."""

import threading

from jinfercept.calls import Call, Result, Tool
from jinfercept.intercept.current_call import CURRENT_CALL
from jinfercept.intercept.dispatcher import lasted_s
from tests.support.dispatching import LONG_S, SOON_S, Service, hangs


def test_calls_behind_a_sync_tool_begin_when_it_has_returned() -> None:
    service, log, go = Service(), list[str](), threading.Event()

    def sync(arguments: str) -> str:
        assert go.wait(LONG_S)
        log.append(f"sync {arguments}")
        return "s"

    def other(arguments: str) -> str:
        log.append(f"other {arguments}")
        return "o"

    tools = {"sync": Tool(sync, name="sync", calls="sync"), "other": Tool(other, name="other")}
    calls = tuple(Call(name, str(i)) for i, name in enumerate(("other", "sync", "gone", "other", "sync")))
    service.dispatcher.call("r", calls, tools)
    while log != ["other 0"]:
        service.wake.wait(LONG_S)
        assert service.dispatcher.poll() == []
    go.set()
    results = service.results(1)["r"]
    assert [result.text[:2] for result in results] == ["o", "s", "er", "o", "s"]
    assert log[:2] == ["other 0", "sync 1"]
    assert sorted(log[2:]) == ["other 3", "sync 4"]
    times = tuple(Result("", duration_s=s) for s in (5.0, 2.0, 0.0, 4.0, 1.0))
    assert lasted_s(calls, times, tools) == 6.0


def test_a_sync_tool_that_hangs_holds_its_turn_no_longer_than_its_timeout() -> None:
    service = Service()
    tools = {
        "sync": Tool(hangs, name="sync", calls="sync", timeout_s=SOON_S),
        "other": Tool(str, name="other", calls="sync"),
    }
    service.dispatcher.call("r", (Call("sync", "x"), Call("other", "y")), tools)
    assert [result.status for result in service.results(1)["r"]] == ["timeout", "ok"]


def test_what_outlasts_its_call_is_cancelled_with_its_request() -> None:
    service, cancelled = Service(), list[str]()

    def registers(arguments: str) -> str:
        outlast = CURRENT_CALL.get().outlast
        assert outlast is not None
        outlast(hangs, arguments, lambda: cancelled.append(arguments))
        return "at once"

    service.call("r", registers)
    service.call("s", registers)
    service.results(2)
    service.dispatcher.cancel("r")
    assert cancelled == ["x"]
    service.dispatcher.cancel("r")
    service.dispatcher.close()
    assert cancelled == ["x", "x"]
