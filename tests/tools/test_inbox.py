"""Calls that wait for a person."""

import math
import threading
from pathlib import Path

from jinfercept.errors import RequestError
from tests.support.tool_runner import tool_runner, until

PERSON = '[[tool]]\nkind = "person"\nname = "boss"\ndescription = "asks the boss"\n'


def test_a_number_that_json_does_not_have_reaches_no_inbox(tmp_path: Path) -> None:
    number = """parameters = {type = "object", properties = {n = {type = "number"}}}\n"""
    with tool_runner(tmp_path, PERSON + number) as runner:
        assert "Infinity is no finite number" in runner.ask("boss", n=math.inf).text


def test_a_call_that_nobody_answers_says_so(tmp_path: Path) -> None:
    with tool_runner(tmp_path, PERSON + "timeout_s = 0.1") as runner:
        result = runner.ask("boss", question="May I?")
        assert (result.status, result.text) == ("timeout", "error: TimeoutError: no person answered within 0.1 s")
        assert runner.loaded.inbox.pending() == []


def test_a_call_of_an_aborted_request_waits_no_more(tmp_path: Path) -> None:
    with tool_runner(tmp_path, PERSON) as runner:
        runner.call("r", "boss", question="May I?")
        until(lambda: bool(runner.loaded.inbox.pending()))
        runner.dispatcher.cancel("r")
        until(lambda: not runner.loaded.inbox.pending())


def test_one_at_a_time_is_put_to_a_person_who_says_so(tmp_path: Path) -> None:
    with tool_runner(tmp_path, PERSON + "max_concurrency = 1") as runner:
        inbox = runner.loaded.inbox
        for name in ("a", "b"):
            runner.call(name, "boss", question=name)
            until(lambda: bool(inbox.pending()))
        for name in ("a", "b"):
            until(lambda name=name: [call.request_id for call in inbox.pending()] == [name])
            inbox.answer(inbox.pending()[0].id, name.upper())
            assert runner.result(name).text == name.upper()


def test_of_many_threads_that_answer_each_call_one_succeeds(tmp_path: Path) -> None:
    with tool_runner(tmp_path, PERSON) as runner:
        inbox = runner.loaded.inbox
        names = [f"r{number}" for number in range(40)]
        for name in names:
            runner.call(name, "boss", question=name)
        until(lambda: len(inbox.pending()) == len(names))
        waiting, wins = inbox.pending(), []

        def answer() -> None:
            for pending in waiting:
                try:
                    inbox.answer(pending.id, pending.request_id)
                except RequestError:
                    continue
                wins.append(pending.id)

        threads = [threading.Thread(target=answer) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(wins) == sorted(pending.id for pending in waiting)
        assert all(runner.result(name).text == name for name in names)


def test_closed_tools_answer_nobody(tmp_path: Path) -> None:
    with tool_runner(tmp_path, PERSON) as runner:
        runner.call("r", "boss", question="May I?")
        until(lambda: bool(runner.loaded.inbox.pending()))
        runner.loaded.close()
        assert runner.result("r").status == "error"
        assert runner.loaded.inbox.pending() == []
        assert "these tools are closed" in runner.ask("boss", question="Still there?").text
