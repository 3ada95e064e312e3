"""A program: a server with a database, on a model that answers one question and goes on for ever otherwise. To be killed.

Argument: the URL of the database.
"""

import sys
import threading

from tests.support.chat_templates import QWEN
from tests.support.gate import closed_gate
from tests.support.live_server import END, running
from tests.support.responses import says
from tests.support.scripted_model import scripted_llm


def main(url: str) -> None:
    with scripted_llm() as make:
        scripted = make(QWEN)
        says(scripted, "It costs 23." + END)
        with closed_gate(scripted.llm), running(scripted.llm, state_url=url) as server:
            print(server.url, flush=True)
            threading.Event().wait()


if __name__ == "__main__":
    main(sys.argv[1])
