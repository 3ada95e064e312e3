"""The offline API as a user meets it, on the embedded model."""

import asyncio
import json
from array import array
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept import LLM, ConfigError, ModelError, RequestError, SamplingParams, ScriptedDetector, Tool
from jinfercept.calls import Call
from jinfercept.events import Event, Finished, Intercepted, Resumed, Token
from jinfercept.models.load import load
from tests.support.engine_state import engine_state
from tests.support.pretend import failing_steps
from tests.support.tiny_model import GOLDEN, tiny_llm

SHOTS = """\
Q: How much do 6 pencils cost?
A: One pencil costs <<price pencil=3>>3 dollars. So 6 pencils cost 6*3 = <<6*3=18>>18 dollars.

Q: Mia buys 4 notebooks. What does she pay?
A: One notebook costs <<price notebook=5>>5 dollars. So 4 notebooks cost 4*5 = <<4*5=20>>20 dollars.

Q: How much do 12 lamps cost?
A:"""


def price(item: str) -> str:
    return "7"


async def calculator(expression: str) -> str:
    await asyncio.sleep(0.01)
    left, right = expression.split("*")
    return str(int(left) * int(right))


TOOLS = (
    Tool(calculator, start="<<", stop="=", result="{}>>"),
    Tool(price, start="<<price ", stop="=", result="{}>>"),
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=48, stop="\n\n")


def test_the_model_calls_its_tools_and_reads_what_they_return(smollm2: LLM) -> None:
    [output] = smollm2.generate(SHOTS, GREEDY, tools=TOOLS)
    completion = output.outputs[0]
    assert "<<price lamp=7>>" in completion.text
    assert "<<12*7=84>>84" in completion.text
    assert [pause.calls[0].name for pause in completion.interceptions] == ["price", "calculator"]
    assert completion.finish_reason == "stop"
    for pause in completion.interceptions:
        start, end = pause.calls[0].span
        assert smollm2.tokenizer is not None
        assert smollm2.tokenizer.decode(completion.token_ids[start:end]).lstrip().startswith("<<")
        first, last = pause.span
        assert first == end
        assert smollm2.tokenizer.decode(completion.token_ids[first:last]).endswith(">>")
        assert pause.context is not None
        assert sum(pause.context) > 0
    returned = sum(pause.span[1] - pause.span[0] for pause in completion.interceptions)
    assert completion.num_generated == len(completion.token_ids) - returned


def weather(city: str) -> dict[str, str]:
    """Get the weather of a city."""
    return {"sky": f"rain in {city}"}


def test_a_chat_with_tools_calls_them_by_the_adapter_that_comes_along(smollm2: LLM) -> None:
    question = [{"role": "user", "content": "Do I need an umbrella in Oslo?"}]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    [output] = smollm2.chat(question, params, tools=[weather])
    called, result, answer = output.outputs[0].messages
    assert json.loads(called["tool_calls"][0]["function"]["arguments"]) == {"city": "Oslo"}
    assert json.loads(result["content"]) == weather("Oslo")
    assert "rain" in answer["content"]
    [without] = smollm2.chat(question, params, tools=[weather], lora="")
    assert [message.get("tool_calls") for message in without.outputs[0].messages] == [None]


def test_events_tell_the_story_in_order_and_their_texts_add_up(smollm2: LLM) -> None:
    events: list[Event] = []
    [output] = smollm2.generate(SHOTS, GREEDY, tools=TOOLS, on_event=events.append)
    kinds = [type(event) for event in events if not isinstance(event, Token)]
    assert kinds == [Intercepted, Resumed, Intercepted, Resumed, Finished]
    texts = [event.text for event in events if isinstance(event, Token | Resumed | Finished)]
    assert "".join(texts) == output.outputs[0].text


@pytest.mark.parametrize(
    ("ids", "read"),
    [
        (np.array([504, 216]), None),
        ([np.int64(504), 216], None),
        (jnp.array([504, 216]), None),
        (array("i", [504, 216]), None),
        (range(504, 506), None),
        (np.array([504.0]), "error: token ids are whole numbers in one dimension; got array([504.])"),
        (np.array([[504, 216]]), "error: token ids are whole numbers in one dimension; got array([[504, 216]])"),
        (jnp.array([True]), "error: token ids are whole numbers in one dimension; got Array([ True]"),
        ([504, -1], "error: token ids are from 0 to 49151; got -1"),
        (np.array([49152]), "error: token ids are from 0 to 49151; got 49152"),
        (np.float32(0.5), "0.5"),
    ],
    ids=str,
)
def test_a_tool_returns_token_ids_as_any_whole_numbers_and_the_model_reads_why_others_are_none(
    smollm2: LLM, ids: object, read: str | None
) -> None:
    tool = Tool(lambda item: ids, name="ids", start="<<price ", stop="=")
    [output] = smollm2.generate(SHOTS, SamplingParams(temperature=0.0, max_tokens=16), tools=[tool])
    interception = output.outputs[0].interceptions[0]
    assert interception.results[0].status == ("error" if read and read.startswith("error") else "ok")
    first, end = interception.span
    if read is None:
        assert tuple(output.outputs[0].token_ids[first:end]) == tuple(map(int, ids))  # pyright: ignore
    else:
        assert f"<<price lamp={read}" in output.outputs[0].text


@pytest.mark.parametrize("skip_special_tokens", [True, False])
@pytest.mark.parametrize("include", [False, True])
def test_the_text_of_a_stop_token_is_left_out_unless_it_is_wanted(
    smollm2: LLM, include: bool, skip_special_tokens: bool
) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer is not None
    [whole] = smollm2.generate("Once upon a time", SamplingParams(temperature=0.0, max_tokens=6))
    word = whole.outputs[0].token_ids[5]
    assert word not in tokenizer.special_ids
    special = min(tokenizer.eos_token_ids & tokenizer.special_ids)
    forced = SamplingParams(temperature=0.0, max_tokens=9, allowed_token_ids=[special])
    for params, ends in (
        (SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=[word]), word),
        (forced, special),
    ):
        params = replace(params, include_stop_str_in_output=include, skip_special_tokens=skip_special_tokens)
        [output] = smollm2.generate("Once upon a time", params)
        events = list(smollm2.stream("Once upon a time", params))
        completion = output.outputs[0]
        assert (completion.finish_reason, completion.token_ids[-1]) == ("stop", ends)
        shown = completion.token_ids if include else completion.token_ids[:-1]
        assert completion.text == tokenizer.decode(shown, skip_special_tokens=skip_special_tokens)
        assert "".join(event.text for event in events if isinstance(event, Token | Finished)) == completion.text


def test_a_callback_that_raises_leaves_nothing_behind(smollm2: LLM) -> None:
    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        smollm2.generate(["One", "Two", "Three"], GREEDY, on_event=interrupt)
    state = engine_state(smollm2)
    assert not state.has_work
    assert state.pages.used == 0
    assert len(smollm2.generate("Again", SamplingParams(max_tokens=2))) == 1


def test_an_interrupt_anywhere_in_a_step_leaves_no_wrong_tokens_behind(smollm2: LLM) -> None:
    prompts = [f"Chapter {i}. " * 12 for i in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=6)
    expected = [output.outputs[0].token_ids for output in smollm2.generate(prompts, params)]
    for step in (1, 4):
        smollm2.restart()
        with failing_steps(step, KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            smollm2.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in smollm2.generate(prompts, params)] == expected


class Odd(BaseException):
    """An exception that cannot be printed."""

    def __str__(self) -> str:
        raise SystemExit("not even this")


@pytest.mark.parametrize(
    "error",
    [RuntimeError("no"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(), Odd()],
    ids=repr,
)
def test_a_detector_that_raises_ends_its_own_request_only(smollm2: LLM, error: BaseException) -> None:
    class Raises:
        def __init__(self, at_once: bool) -> None:
            self.at_once = at_once

        def watch(self) -> "Raises":
            if self.at_once:
                raise error
            return self

        def feed(self, index: int, token_id: int, text: str) -> tuple[Call, ...]:
            raise error

    detectors = [None, Raises(True), Raises(False), None]
    outputs = smollm2.generate(["One", "Two", "Three", "Four"], SamplingParams(max_tokens=3), detector=detectors)
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "error", "error", "length"]
    assert str(outputs[1].outputs[0].stop_reason).startswith(type(error).__name__)


def test_a_refused_restart_changes_nothing(smollm2: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4)
    [before] = smollm2.generate(SHOTS, params)
    with pytest.raises(ConfigError, match="swap_space"):
        smollm2.restart(swap_space=float("inf"))
    [after] = smollm2.generate(SHOTS, params)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_bad_requests_say_what_got_and_fix(smollm2: LLM) -> None:
    for call in (
        lambda: smollm2.generate(""),
        lambda: smollm2.generate({"prompt_token_ids": [1 << 40]}),
        lambda: smollm2.generate({"prompt_token_ids": ["x"]}),
        lambda: smollm2.generate({"prompt_token_ids": [1] * 10_000}),
        lambda: smollm2.generate({}),
        lambda: smollm2.generate(None),  # pyright: ignore[reportArgumentType]
        lambda: smollm2.generate([1, 2.5, 3]),  # pyright: ignore[reportArgumentType]
        lambda: smollm2.generate({"prompt_token_ids": "123"}),
        lambda: smollm2.generate({"prompt_token_ids": [1.5]}),
        lambda: smollm2.generate({"prompt": "a", "cache_slat": "x"}),
        lambda: smollm2.generate("a", [None]),  # pyright: ignore[reportArgumentType]
        lambda: smollm2.generate("a", tools=TOOLS[0]),  # pyright: ignore[reportArgumentType]
        lambda: smollm2.generate("a", detector=5),  # pyright: ignore[reportArgumentType]
        lambda: smollm2.generate(["a", "b"], [SamplingParams()]),
        lambda: smollm2.generate("a", tools=[Tool(price)]),
        lambda: smollm2.generate("a", tools=[TOOLS[0], TOOLS[0]]),
    ):
        with pytest.raises(RequestError, match="fix: "):
            call()
    assert not engine_state(smollm2).has_work


def _aligned(leaf: jax.Array) -> np.ndarray:
    """A copy in NumPy's memory where JAX can read it in place: from a multiple of 64 bytes on."""
    memory = np.empty(leaf.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    copy[...] = leaf
    return copy


def test_parameters_in_memory_and_token_ids_are_enough() -> None:
    loaded = load(GOLDEN / "llama_tied", dtype="float32")
    given = jax.tree.map(_aligned, loaded.params)
    with LLM(
        loaded.model,
        params=given,
        page_size=4,
        kv_tokens=64,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        profile="paper-gptj-6b-a100",
    ) as llm:
        detector = ScriptedDetector({2: [Call("f", "")]})
        params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
        prompt = {"prompt_token_ids": [1, 2, 3]}
        [output] = llm.generate(prompt, params, tools=[Tool(lambda a: [9, 9], name="f")], detector=detector)
        assert output.outputs[0].token_ids[2:4] == [9, 9]
        assert output.outputs[0].text == ""
        for leaf in jax.tree.leaves(given):
            leaf[...] = 0.0  # the weights that serve are no part of the caller's memory
        llm.reset_prefix_cache()
        [again] = llm.generate(prompt, params, tools=[Tool(lambda a: [9, 9], name="f")], detector=detector)
        assert again.outputs[0].token_ids == output.outputs[0].token_ids
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.generate("text")
        with pytest.raises(ConfigError, match="restart cannot change this option"):
            llm.restart(page_size=8)  # pyright: ignore[reportCallIssue] # no option of a restart
    with pytest.raises(RequestError, match="closed"):
        llm.generate(prompt)


def test_closing_frees_the_weights_and_the_pages() -> None:
    before = {id(array) for array in jax.live_arrays()}
    with tiny_llm(kv_tokens=64) as llm:
        llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=2))
    del llm
    assert not [array for array in jax.live_arrays() if id(array) not in before and array.ndim > 1]


def test_impossible_options_are_refused_before_anything_is_loaded() -> None:
    for flags, match in (
        ({"no_such_flag": 1}, "no such option"),
        ({"kv_tokns": 64}, r"got kv_tokns \(did you mean 'kv_tokens'\?\)"),
        ({"policy": "copyahead"}, r"got copyahead \(did you mean 'copy_ahead'\?\)"),
        ({"policy": "clairvoyant"}, "no such policy"),
        ({"kv_tokens": 3}, "kv_tokens"),
        ({"kv_tokens": 1 << 50}, "does not fit"),
        ({"max_model_len": 4096, "kv_tokens": 64}, "max_model_len"),
        ({"pipeline_depth": 2}, "pipeline_depth"),
        ({"dtype": "int3"}, "dtype"),
    ):
        with pytest.raises(ConfigError, match=match):
            tiny_llm(**flags)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ModelError, match="no such model"):
        LLM("no/such/model")
