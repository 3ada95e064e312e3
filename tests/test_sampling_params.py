"""Sampling parameters have vLLM's names, defaults and ranges; a wrong one is refused by name before anything starts."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest

from jinfercept.calls import Tool
from jinfercept.engine.parallel_sampling import forks
from jinfercept.errors import ConfigError, JinferceptError, ModelError, RequestError
from jinfercept.request import Request
from jinfercept.sampling_params import SamplingParams, check_vocabulary
from jinfercept.sched.plan import draw_options
from tests.support.engine_state import engine_state
from tests.support.fake_engine import POLICIES, make_engine, run_all
from tests.support.tiny_model import tiny_llm


def mistake(make: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as caught:
        make()
    error = caught.value
    assert str(error) == f"{error.what}; got {error.got}; fix: {error.fix}"
    assert error.what
    assert error.fix
    return error


def test_sampling_parameters_have_the_defaults_of_vllm_and_take_lists() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4])
    assert (params.stop, params.stop_token_ids) == (("end",), (3, 4))
    assert (params.temperature, params.max_tokens, params.seed, params.ignore_eos) == (1.0, 16, None, False)
    assert SamplingParams(stop=["a", "b"]) == SamplingParams(stop=("a", "b"))
    assert SamplingParams(temperature=0).temperature == 0


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"function": "calculator"}, "a tool must have a function"),
        ({"start": "<<"}, "both start and stop"),
        ({"stop": "="}, "both start and stop"),
        ({"start": "", "stop": "="}, "both start and stop"),
        ({"start": "<<", "stop": ""}, "both start and stop"),
        ({"result": "no place"}, "has no {}"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": math.nan}, "timeout_s"),
        ({"max_result_tokens": 0}, "room for its result"),
    ],
)
def test_a_tool_that_cannot_work_is_refused(values: dict[str, Any], word: str) -> None:
    assert word in mistake(lambda: Tool(**{"function": len, **values})).what


def test_a_tool_is_named_after_its_function() -> None:
    def calculator(arguments: str) -> str:
        return arguments

    class Shop:
        def __call__(self, arguments: str) -> str:
            return arguments

    assert Tool(calculator).name == "calculator"
    assert Tool(Shop()).name == "Shop"
    assert Tool(functools.partial(calculator)).name == "partial"
    assert Tool(calculator, name="calc").name == "calc"


def test_every_mistake_is_a_value_error_with_three_parts() -> None:
    for kind in (ConfigError, ModelError, RequestError):
        error = kind("the page is empty", got=0, fix="give at least 1")
        assert isinstance(error, JinferceptError)
        assert isinstance(error, ValueError)
        assert (error.what, error.got, error.fix) == ("the page is empty", 0, "give at least 1")
        assert str(error) == "the page is empty; got 0; fix: give at least 1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("max_tokens", 0),
        ("max_tokens", 2.5),
        ("seed", 1.5),
        ("stop", ["a", ""]),
        ("stop", ""),
        ("stop_token_ids", ["</s>"]),
        ("top_k", -2),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e300),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -3),
        ("logit_bias", {"cat": 1}),
        ("logit_bias", {3: 101}),
        ("logit_bias", {3: math.nan}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", 7),
        ("bad_words", "word"),
        ("bad_words", [" "]),
        ("bad_words_token_ids", [7]),
        ("bad_words_token_ids", [[1] * 9]),
        ("bad_words_token_ids", [[1, 2]] * 257),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 1.5),
        ("n", 0),
        ("n", 1025),
        ("ignore_eos", "no"),
        ("structured_outputs", {"regex": "a"}),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match="fix: ") as caught:
        SamplingParams(**{name: value})
    assert name in caught.value.what or name == "bad_words_token_ids"


def test_without_max_tokens_a_request_goes_on_until_its_sequence_is_full() -> None:
    engine = make_engine(POLICIES["copy_ahead"](), num_pages=10, max_model_len=30)
    outputs = run_all(engine, [Request("a", (1, 2, 3), SamplingParams(max_tokens=None, min_tokens=20))])
    [completion] = outputs["a"].outputs
    assert (completion.num_generated, completion.finish_reason) == (27, "length")


def test_lists_texts_of_numbers_and_none_are_taken() -> None:
    params = SamplingParams(
        logit_bias={"7": 1, 8: -2.5},  # pyright: ignore[reportArgumentType] # as JSON has it
        allowed_token_ids=[1, 2],
        bad_words=None,
        bad_words_token_ids=[[1, 2], [3]],
        top_k=-1,
    )
    assert params.logit_bias == {7: 1.0, 8: -2.5}
    assert params.allowed_token_ids == (1, 2)
    assert (params.bad_words, params.bad_words_token_ids) == ((), ((1, 2), (3,)))


def test_tokens_outside_the_vocabulary_and_parameters_that_leave_none_are_refused() -> None:
    for params, match in (
        (SamplingParams(logit_bias={100: 1.0}), "from 0 to 99"),
        (SamplingParams(allowed_token_ids=[-1]), "from 0 to 99"),
        (SamplingParams(bad_words_token_ids=[[1, 100]]), "from 0 to 99"),
        (SamplingParams(stop_token_ids=[100]), "from 0 to 99"),
        (
            SamplingParams(allowed_token_ids=[1, 2], bad_words_token_ids=[[1], [2]]),
            "bad words forbid all that is allowed",
        ),
        (SamplingParams(bad_words_token_ids=[[token] for token in range(100)]), "bad words forbid all that is allowed"),
    ):
        with pytest.raises(RequestError, match=match):
            check_vocabulary(params, 100)
    check_vocabulary(SamplingParams(logit_bias={99: 1.0}, bad_words_token_ids=[[1], [2, 3]]), 100)


def test_a_request_that_asks_for_nothing_costs_the_device_nothing() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=0.0, top_k=5, top_p=0.5), SamplingParams(stop="a")):
        assert draw_options(params, frozenset({1})) is None
    filtered = draw_options(SamplingParams(top_p=0.5), frozenset({1}))
    assert filtered is not None
    assert not filtered.remembered
    ending = draw_options(SamplingParams(min_tokens=2), frozenset({3, 1}))
    assert ending is not None
    assert (ending.remembered, ending.end_token_ids) == (True, (1, 3))


def test_forks_have_places_and_names_of_their_own_and_follow_the_first() -> None:
    request = Request("a", (1, 2), SamplingParams(n=3, seed=5, prompt_logprobs=1))
    first, second, third = forks(request)
    assert [fork.id for fork in (first, second, third)] == ["a", "a/1", "a/2"]
    assert [(fork.params.seed, fork.index) for fork in (first, second, third)] == [(5, 0), (5, 1), (5, 2)]
    assert [fork.leader for fork in (first, second, third)] == [None, "a", "a"]
    assert [fork.params.prompt_logprobs for fork in (first, second, third)] == [1, None, None]
    assert {fork.params.n for fork in (first, second, third)} == {1}
    assert forks(first) == [first]


def test_bad_parameters_are_refused_where_the_vocabulary_is_known() -> None:
    with tiny_llm(kv_tokens=512) as llm:
        prompt = {"prompt_token_ids": [1, 2, 3]}
        with pytest.raises(RequestError, match="from 0 to 127"):
            llm.generate(prompt, SamplingParams(allowed_token_ids=[128]))
        with pytest.raises(RequestError, match="bad words need a tokenizer"):
            llm.generate(prompt, SamplingParams(bad_words=["x"]))
        with pytest.raises(RequestError, match="one output"):
            llm.engine.thread.submit([Request("a", (1, 2), SamplingParams(n=2))], print)
        assert not engine_state(llm).has_work
