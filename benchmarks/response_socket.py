"""What the turns of an agent take over a WebSocket and over HTTP: the same 20 turns of a small model, one way after another.

`whole`: each body over HTTP has the whole conversation; `stored`: it continues the stored response before it; `socket`: the
same over one WebSocket, on which nothing is stored. The ways take turns, and the fastest conversation of each counts.

    python -m benchmarks.response_socket [--calls 20] [--characters 400] [--repeats 3] [--url URL]
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from benchmarks.servers import child_server

MODEL = "smollm2-135m"
ANSWER = {"max_output_tokens": 8, "temperature": 0}
Send = Callable[[list[Any], str | None], Any]
"""Sends the whole conversation, or what is new in it, and the id of the response before; returns the response."""


def completed(events: Iterator[Any]) -> Any:
    """The response at the end of a stream."""
    for event in events:
        if event.type in ("response.completed", "response.incomplete"):
            return event.response
        if event.type in ("error", "response.failed"):
            raise RuntimeError(f"{event}")
    raise RuntimeError("the stream has no end")


@contextmanager
def over_http(client: OpenAI, more: dict[str, Any]) -> Iterator[Send]:
    def send(given: list[Any], previous: str | None) -> Any:
        create: Any = client.responses.create
        with create(model=MODEL, input=given, previous_response_id=previous, stream=True, **ANSWER, **more) as events:
            return completed(iter(events))

    yield send


@contextmanager
def over_socket(client: OpenAI) -> Iterator[Send]:
    with client.responses.connect() as connection:

        def send(given: list[Any], previous: str | None) -> Any:
            body = {"model": MODEL, "input": given, "previous_response_id": previous, "store": False, **ANSWER}
            connection.send({"type": "response.create", **body})  # pyright: ignore[reportArgumentType]
            return completed(iter(connection))

        yield send


def converse(send: Send, whole: bool, calls: int, characters: int, run: str) -> tuple[float, int]:
    """Seconds and bytes of all turns."""
    conversation, previous, num_bytes = list[Any](), None, 0
    began_s = time.monotonic()
    for number in range(calls):
        text = f"{run}: result {number}. " + f"Line {number} of a file. " * (characters // 20)
        new = {"role": "user", "content": text}
        conversation.append(new)
        given = conversation if whole else [new]
        num_bytes += len(json.dumps(given))
        response = send(given, None if whole else previous)
        conversation.append({"role": "assistant", "content": response.output_text})
        previous = response.id
    return time.monotonic() - began_s, num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20, help="turns of a conversation")
    parser.add_argument("--characters", type=int, default=400, help="of what each turn adds, about")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--url", help="of a server that runs; default: one of its own")
    options = parser.parse_args()
    with (
        child_server(MODEL, {"max_model_len": 8192, "kv_tokens": 32768})
        if options.url is None
        else _given(options.url) as url
    ):
        client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600)
        ways = {
            "whole": lambda: over_http(client, {"store": False}),
            "stored": lambda: over_http(client, {}),
            "socket": lambda: over_socket(client),
        }
        best = dict[str, tuple[float, int]]()
        for repeat in range(-1, options.repeats):  # the first one, which is short, compiles
            for name, way in ways.items():
                with way() as send:
                    run = f"{name} {repeat}"
                    calls = options.calls if repeat >= 0 else 2
                    spent = converse(send, name == "whole", calls, options.characters, run)
                if repeat >= 0:
                    best[name] = min(spent, best.get(name, spent))
    table = Table(box=None, pad_edge=False)
    for name in ("way", "ms a turn", "KB sent", "of whole"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for name, (seconds, num_bytes) in best.items():
        ratio = f"{seconds / best['whole'][0]:.2f}"
        table.add_row(name, f"{1000 * seconds / options.calls:.1f}", f"{num_bytes / 1000:,.0f}", ratio)
    Console().print(table)


@contextmanager
def _given(url: str) -> Iterator[str]:
    yield url


if __name__ == "__main__":
    main()
