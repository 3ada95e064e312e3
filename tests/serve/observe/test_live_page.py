"""The page at `/` in a real browser: its content, light and dark, with keys, and with hostile names."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from jinfercept.engine.meter.engine_stats import EngineStats
from jinfercept.tools.inbox import Inbox
from tests.support.live_server import END, Running, prompt_of, running, until
from tests.support.scripted_model import Scripted
from tests.support.waiting_calls import ask

playwright = pytest.importorskip("playwright.sync_api", reason="the browser's driver is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]

HOSTILE = "<img src=x onerror=hit()>"
CALL = '<tool_call>\n{"name": "price", "arguments": {"item": "</td><script>hit()</script>"}}\n</tool_call>'
TOOL: Any = {"type": "function", "function": {"name": "price", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def page() -> Iterator[Any]:
    """A tab; `page.messages` has its console messages and errors, `page.urls` its requests."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1200, "height": 900})
        tab.messages = []
        tab.urls = set()
        tab.on("console", lambda message: tab.messages.append(message.text))
        tab.on("pageerror", lambda error: tab.messages.append(str(error)))
        tab.on("request", lambda request: tab.urls.add(request.url.split("?")[0]))
        yield tab
        browser.close()


def busy(server: Running, scripted: Scripted) -> None:
    """A call that its client runs, and an answer to read."""
    messages: list[Any] = [{"role": "user", "content": "What is it?"}]
    scripted.follow(prompt_of(scripted, messages, [TOOL]) + CALL + END)
    session = {"session_id": "session-of-a-lamp"}
    assert server.chat(messages=messages, tools=[TOOL], max_tokens=200, jinfercept=session).status_code == 200
    assert server.chat(max_tokens=40, ignore_eos=True).status_code == 200


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_shows_who_is_paused_where_the_pages_are_and_what_was_decided(
    page: Any, served: Running, scripted: Scripted, scheme: str
) -> None:
    busy(served, scripted)
    page.emulate_media(color_scheme=scheme)
    page.goto(served.url)
    page.wait_for_selector("#all:not([hidden])")
    assert page.text_content("#state") == "live"
    assert "policy copy_ahead" in page.text_content("#what")
    paused = page.text_content("#paused")
    assert "price" in paused
    assert "<reader>" in paused
    until(lambda: "write-through" in page.text_content("#decisions"))
    assert "retained" in page.text_content("#tiles")
    assert not page.is_visible("#disk")
    assert page.messages == []
    assert page.urls == {f"{served.url}/", f"{served.url}/live"}
    corner = "p.getContext('2d').getImageData(p.width - 2, p.height - 2, 1, 1).data[3]"
    until(lambda: page.evaluate(f"() => {{ const p = document.getElementById('pool'); return {corner} }}") == 255)


def test_with_keys_the_page_asks_for_one_and_keeps_it_in_its_tab(page: Any, scripted: Scripted) -> None:
    with running(scripted.llm, api_key=("one",)) as server:
        page.goto(server.url)
        page.wait_for_selector("#login:not([hidden])")
        assert not page.is_visible("#all")
        page.fill("#key", "wrong")
        page.click("#login button")
        page.wait_for_function("() => document.getElementById('state').textContent === 'the key is wrong'")
        page.fill("#key", "one")
        page.press("#key", "Enter")
        page.wait_for_selector("#all:not([hidden])")
        assert not page.is_visible("#login")
        page.reload()
        page.wait_for_selector("#all:not([hidden])")
        assert page.evaluate("() => localStorage.length + document.cookie.length") == 0


def test_whatever_a_model_or_a_client_writes_is_text(page: Any, scripted: Scripted) -> None:
    with running(scripted.llm, show_texts=True) as server:
        server.service.inbox = inbox = Inbox()
        busy(server, scripted)

        def spoil(stats: EngineStats) -> None:
            next(iter(stats.interceptions.open.values())).tool = HOSTILE
            next(iter(stats.decisions)).why = HOSTILE

        server.llm.engine.ask(spoil).result(60)
        answer = ask(inbox, what=HOSTILE)
        page.goto(server.url)
        page.wait_for_selector(".call")
        assert HOSTILE in page.text_content("#inbox")
        assert HOSTILE in page.text_content("#decisions")
        assert "<script>hit()</script>" in page.text_content("#paused")
        assert page.evaluate("() => document.querySelectorAll('img, td script').length") == 0
        assert page.messages == []
        page.fill(".call textarea", "no & <no>")
        page.wait_for_timeout(1500)
        assert page.input_value(".call textarea") == "no & <no>", "it is made anew while somebody writes"
        page.click(".call button")
        assert answer.result(60) == "no & <no>"
        page.wait_for_selector("#inbox", state="hidden")
