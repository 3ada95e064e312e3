"""Messages of the items of a response: the work that long conversations make."""

import sys

from jinfercept.protocols.openai.response_chat import messages_of
from jinfercept.protocols.openai.response_items import new_item


def test_the_texts_behind_a_call_are_joined_once_however_many_there_are() -> None:
    call = new_item("function_call", call_id="1", name="price", arguments="{}")
    part = {"type": "output_text", "text": "a"}
    texts = [new_item("message", role="assistant", content=[part]) for _ in range(200)]
    changes: list[str] = []
    sys.setprofile(lambda frame, event, _: changes.append(event) if frame.f_code.co_name == "__setattr__" else None)
    try:
        [turn] = messages_of([call, *texts], None)
    finally:
        sys.setprofile(None)
    assert (turn.content, len(turn.tool_calls or ())) == ("a" * 200, 1)
    assert len(changes) <= 10
