"""A person and an MCP server as tools of the server, in chats of ordinary clients."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.live_server import until
from tests.support.scripted_model import Scripted
from tests.support.tool_server import QUESTION, ask, called, returned, says, shop

MCP_SHOP = Path(__file__).parents[2] / "support" / "mcp_shop.py"
BOSS = """
[[tool]]
kind = "person"
name = "boss"
description = "Asks the boss."
"""
SHOP = f"""
[[tool]]
kind = "mcp"
name = "shop"
command = "{sys.executable}"
args = ["{MCP_SHOP}"]
prefix = "shop_"
include = ["price", "die"]
"""


def test_a_call_is_seen_by_those_of_its_key_and_by_operators(scripted: Scripted, tmp_path: Path) -> None:
    keys = {"api_key": ("one", "two"), "operator_key": ("chief",)}
    with shop(scripted, tmp_path, toml=BOSS, **keys) as server, ThreadPoolExecutor(1) as pool:

        def seen(key: str) -> list[dict[str, Any]]:
            return server.http.get("/inbox", headers={"authorization": f"Bearer {key}"}).json()["data"]

        def waiting_for(key: str) -> int:
            return server.http.get("/live", headers={"authorization": f"Bearer {key}"}).json()["inbox"]

        def answered(key: str, call_id: str) -> int:
            headers = {"authorization": f"Bearer {key}"}
            return server.http.post(f"/inbox/{call_id}/answer", json={"text": key}, headers=headers).status_code

        for key in ("one", "chief"):
            turn = called("", ("boss", None))
            turn["tool_calls"][0]["function"]["arguments"] = {"question": key}
            says(scripted, server, f"{key} says so.", [*QUESTION, turn, returned(key)])
            waiting = pool.submit(lambda: ask(server, QUESTION))
            until(lambda: bool(seen("one")))
            [call] = seen("chief")
            assert (seen("two"), [visible["id"] for visible in seen("one")]) == ([], [call["id"]])
            assert [waiting_for(reader) for reader in ("one", "two", "chief")] == [1, 0, 1]
            assert [answered("two", call["id"]), answered(key, call["id"])] == [404, 200]
            assert waiting.result().choices[0].message.content == f"{key} says so."


@pytest.mark.slow
def test_an_mcp_server_that_dies_is_read_of_and_makes_nobody_unready(scripted: Scripted, tmp_path: Path) -> None:
    with shop(scripted, tmp_path, toml=SHOP) as server:
        for call, text in (
            (("shop_price", "lamp"), "1 lamp: 23, says nobody"),
            (("shop_die", None), "error: CallFailed: the MCP server shop was lost during the call, it is tried again"),
        ):
            says(scripted, server, "Well.", [*QUESTION, called("", call), returned(text)])
            assert ask(server, QUESTION).choices[0].message.content == "Well."
        assert server.http.get("/ready").status_code == 200
        assert "shop_price" in server.service.tools.tools
