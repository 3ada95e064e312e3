"""A follow-up continues from the model's own tokens with the chat templates of published models, whatever they write of a turn.

The templates are those in the source package of llama-cpp-python whose formats of calls are known.
"""

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jinfercept.chat.memory import GivenTokens
from jinfercept.chat.template import ChatTemplate
from jinfercept.chat.tokenizer.tokenizer import Tokenizer
from jinfercept.errors import RequestError
from tests.support.responses import ASKED as QUESTION
from tests.support.template_table import published_templates

ENDS = (
    *("<|im_end|>", "</s>", "<|eot_id|>", "<|end|>", "<|call|>", "<end_of_turn>", "<turn|>", "<|tool_response>"),
    *("<｜end▁of▁sentence｜>", "<|endoftext|>", "[EOS]", "<|user|>", "<|observation|>", "[e~[", "<|end_of_text|>"),
    *("<seed:eos>", "<|role_end|>", "<sep>", "</assistant>", "<SPECIAL_12>", "<end_of_sentence>", "<|eom_id|>"),
)
PRICE = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "The price of an item.",
        "parameters": {
            "type": "object",
            "properties": {"item": {"type": "string", "description": "which"}},
            "required": ["item"],
        },
    },
}
CALLING: Any = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call12345", "type": "function", "function": {"name": "price", "arguments": '{"item": "lamp"}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "content": "Misty and mild."}
ROUND = [*QUESTION, CALLING, RESULT]
ASKS_AGAIN = [*QUESTION, {"role": "assistant", "content": " Fine. \n"}, {"role": "user", "content": "And two?"}]
WITHOUT_ROUNDS = {  # they show no results, or refuse them
    "google-gemma-2-2b-it",
    "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}
MADE_ANEW = {  # the tools stand before the user's last message
    "Mistral-Small-3.2-24B-Instruct-2506",
    "mistralai-Mistral-Nemo-Instruct-2407",
    "llama-cpp-rwkv-world",
}


@pytest.fixture(scope="module")
def templates() -> dict[str, ChatTemplate]:
    """The templates by name, but for one that wants tools in a variable of its own."""
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={char: i for i, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    backend.add_special_tokens(list(ENDS))
    tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    ends = [id_ for end in ENDS if (id_ := backend.token_to_id(end)) is not None]
    return {
        name: ChatTemplate(tokenizer, [PRICE], source, {}, ends)
        for name, source in published_templates().items()
        if "firefunction" not in name
    }


def behind(template: ChatTemplate, messages: Any) -> str | None:
    try:
        return template.behind_turn(messages, 1, template.render(messages))
    except RequestError:
        return None


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_round_of_a_tool_continues_the_turn_with_every_template_that_shows_results(
    templates: dict[str, ChatTemplate],
) -> None:
    texts = {name: behind(template, ROUND) for name, template in templates.items()}
    assert {name for name, text in texts.items() if text is None} == WITHOUT_ROUNDS
    for name, text in texts.items():
        assert text is None or (text.startswith(ENDS) and text.count("Misty and mild.") == 1), name


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_question_continues_the_turn_with_every_template_that_does_not_move_the_tools(
    templates: dict[str, ChatTemplate],
) -> None:
    texts = {name: behind(template, ASKS_AGAIN) for name, template in templates.items()}
    assert {name for name, text in texts.items() if text is None} == MADE_ANEW
    for name, text in texts.items():
        assert text is None or (text.startswith(ENDS) and text.count("And two?") == 1), name


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_templates_write_a_turn_of_the_past_in_another_way(templates: dict[str, ChatTemplate]) -> None:
    changed = [
        name
        for name, template in templates.items()
        if name not in WITHOUT_ROUNDS and not template.render(ROUND).startswith(template.render(QUESTION))
    ]
    assert len(changed) >= 10


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_no_token_of_three_turns_is_written_again_with_any_template(templates: dict[str, ChatTemplate]) -> None:
    answer, question = {"role": "assistant", "content": " Fine. \n"}, {"role": "user", "content": "And <|im_end|> two?"}
    for name, template in templates.items():
        messages: list[Any] = [*QUESTION]
        ids = template.encode(template.render(messages))
        for _ in range(3):
            written = template.encode(" Fine. \n")
            ids = [*ids, *written]
            messages = [*messages, answer, question]
            prompt = GivenTokens(ids, len(messages) - 1).prompt(template, messages)
            assert prompt.token_ids[: len(ids)].tolist() == ids, name
            assert "And <|im_end|> two?" in template.decode(prompt.token_ids[len(ids) :]), name
            ids = prompt.token_ids.tolist()
