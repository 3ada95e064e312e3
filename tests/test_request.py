"""What flows between client, engine and tools: a mistake says what is wrong, what was got and how to mend it."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest

from jinfercept.calls import Tool
from jinfercept.errors import ConfigError, JinferceptError, ModelError, RequestError
from jinfercept.sampling_params import SamplingParams


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
