"""A person and an MCP server as tools of the server, behind a chat of an ordinary client."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from scripted_model import Scripted
from served import until
from shopkeeper import QUESTION, ask, called, returned, says, shop

MCP_SHOP = Path(__file__).parents[1] / "endpoints" / "mcp_shop.py"
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


def test_a_person_answers_over_http(scripted: Scripted, tmp_path: Path) -> None:
    with shop(scripted, tmp_path, toml=BOSS) as server, ThreadPoolExecutor(1) as pool:
        turn = called("", ("boss", None))
        turn["tool_calls"][0]["function"]["arguments"] = {"question": "Sell?"}
        says(scripted, server, "Sold.", [*QUESTION, turn, returned("yes")])
        waiting = pool.submit(lambda: ask(server, QUESTION))
        until(lambda: bool(server.http.get("/inbox").json()["data"]))
        [call] = server.http.get("/inbox").json()["data"]
        assert (call["tool"], call["arguments"]) == ("boss", {"question": "Sell?"})
        assert server.http.get("/live").json()["inbox"] == 1
        assert server.http.post(f"/inbox/{call['id']}/answer", json={"text": "yes"}).status_code == 200
        done = waiting.result()
        assert done.choices[0].message.content == "Sold."
        assert call["request_id"] == done.id


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
