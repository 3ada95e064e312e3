"""Options: one source for the keyword arguments, the flags and their checks."""

import inspect
import json
import math
from dataclasses import FrozenInstanceError, asdict, dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

from jinfercept.cli.options import engine_flags, group_flags, parse
from jinfercept.config import (
    GROUPS,
    EngineConfig,
    EngineOptions,
    LLMOptions,
    RestartOptions,
    SpeculativeConfig,
    without_none,
)
from jinfercept.errors import ConfigError
from jinfercept.llm import LLM
from jinfercept.serve.options import ServerOptions

OPTIONS = {field.name: field for group in GROUPS.values() for field in fields(group)}
HINTS = {name: hint for group in GROUPS.values() for name, hint in get_type_hints(group).items()}


@dataclass(frozen=True)
class Engine:
    """A command that has the engine's flags alone."""

    given: Annotated[EngineOptions, engine_flags()]


def parsed(*arguments: str) -> EngineOptions:
    """What the command line makes of its arguments."""
    return parse(Engine, "engine", "", arguments).given


def mistake(**flags: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(flags)
    error = caught.value
    assert str(error) == f"{error.what}; got {error.got}; fix: {error.fix}"
    assert error.fix
    return error


DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3}'


def test_drafts_are_set_as_in_vllm() -> None:
    def speculation(given: str | dict[str, Any] | None) -> SpeculativeConfig:
        return EngineConfig.from_options({"speculative_config": given}).scheduling.speculation

    assert speculation(None).num_speculative_tokens == 0
    assert speculation(DRAFTS) == speculation(json.loads(DRAFTS)) == SpeculativeConfig("ngram", 3, 2, 4)
    by_model = SpeculativeConfig("draft_model", 3, model="small")
    assert speculation({"num_speculative_tokens": 3, "model": "small"}) == by_model
    assert speculation(by_model._asdict()) == by_model
    assert speculation({"num_speculative_tokens": 3, "prompt_lookup_max": 1}) == SpeculativeConfig("ngram", 3, 1, 1)
    assert speculation({"num_speculative_tokens": 3, "prompt_lookup_min": 6}) == SpeculativeConfig("ngram", 3, 6, 6)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("{", "no JSON"),
        ("[3]", "is an object"),
        ({"num_speculative_tokens": 2, "method": "ngram", "model": "small"}, "leave out model"),
        ({"num_speculative_tokens": 2, "method": "draft_model"}, "lacks the draft model"),
        ({"num_speculative_tokens": 2, "method": "draft_model", "model": 3}, "lacks the draft model"),
        ({"num_speculative_tokens": 2, "draft_tensor_parallel_size": 1}, "has the keys"),
        ({"num_speculative_tokens": 2, "method": "eagle"}, "ngram, draft_model or mtp"),
        ({"method": "draft_model", "model": "small"}, "from 1 on"),
        ({}, "from 1 on"),
        ({"num_speculative_tokens": "2"}, "from 1 on"),
        ({"num_speculative_tokens": 2, "prompt_lookup_max": "2"}, "from 1 on"),
        ({"num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "lower it"),
        (3, "wrong type"),
    ],
)
def test_drafts_that_cannot_be_are_errors(given: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EngineConfig.from_options({"speculative_config": given})


def test_keyword_arguments_have_the_names_and_the_types_of_the_options() -> None:
    assert get_type_hints(EngineOptions) == HINTS
    assert sum(len(fields(group)) for group in GROUPS.values()) == len(HINTS)
    keywords = {*get_type_hints(LLMOptions), *inspect.signature(LLM).parameters}
    assert {*HINTS} <= keywords
    assert {*get_type_hints(RestartOptions)} < {*HINTS}


def test_every_option_has_a_help_text_and_a_default_of_its_type() -> None:
    for name, field in OPTIONS.items():
        assert field.metadata["help"]
        kind = without_none(HINTS[name])
        choices = get_args(kind) if get_origin(kind) is Literal else ()
        assert not choices or field.default in (*choices, None)


SPECIAL_VALUES = {
    "max_num_batched_tokens": 64,
    "max_model_len": 64,
    "kv_tokens": 64,
    "devices": "3",
    "speculative_config": DRAFTS,
    "loras": ("sql=adapters/sql",),
}
NEEDED: dict[str, dict[str, Any]] = {name: {"max_loras": 1} for name in ("tool_lora", "max_lora_rank")}
NEEDED["tool_call_bias"] = {"max_loras": 1, "tool_lora": "word"}
"""Options without which others make no sense."""


def a_value(name: str) -> Any:
    """A value of an option that is not its default, where there are several."""
    kind = without_none(HINTS[name])
    samples = {int: 1, float: 0.5, bool: not OPTIONS[name].default, str: "word"}
    return SPECIAL_VALUES.get(name, samples[kind] if kind in samples else get_args(kind)[0])


def test_every_flag_arrives_in_its_group_with_its_type() -> None:
    values, arguments = {name: a_value(name) for name in OPTIONS}, list[str]()
    for name, value in values.items():
        flag = name.replace("_", "-")
        text = value[0] if isinstance(value, tuple) else str(value)
        arguments += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", text]
    assert parsed(*arguments) == values
    for name, value in values.items():
        groups = asdict(EngineConfig.from_options({name: value, **NEEDED.get(name, {})})).values()
        assert [group[name] for group in groups if name in group] == [value]


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["--block-size", "32"], {"page_size": 32}),
        (["-tp", "2"], {"tensor_parallel_size": 2}),
        (["-tp=2"], {"tensor_parallel_size": 2}),
        (["--enable-chunked-prefill"], {"chunked_prefill": True}),
        (["--no-enable-chunked-prefill"], {"chunked_prefill": False}),
        (["--no-chunked-prefill"], {"chunked_prefill": False}),
        (["--swap-space=0"], {"swap_space": 0.0}),
    ],
)
def test_flags_have_the_names_that_vllm_gives_them(arguments: list[str], options: dict[str, Any]) -> None:
    assert parsed(*arguments) == options


def test_a_flag_that_repeats_replaces_the_default() -> None:
    @dataclass(frozen=True)
    class Server:
        given: Annotated[dict[str, Any], group_flags("server", ServerOptions)]

    assert parse(Server, "server", "", []).given == {}
    methods = ["--allowed-methods", "GET", "--allowed-methods", "PUT"]
    assert parse(Server, "server", "", methods).given == {"allowed_methods": ("GET", "PUT")}


def test_an_unknown_option_is_named_with_those_that_there_are() -> None:
    error = mistake(kv_token=64, polcy="swap", page_size=16)
    assert error.got == "kv_token (did you mean 'kv_tokens'?), polcy (did you mean 'policy'?)"
    assert all(name in error.fix for name in OPTIONS)


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("page_size", 0, 1),
        ("kv_tokens", 15, 16),
        ("swap_space", -1, 0),
        ("swap_space", math.nan, 0),
        ("max_model_len", 1, 2),
        ("max_num_seqs", 0, 1),
        ("max_chunk_tokens", 0, 1),
        ("layers_per_step", -3, 1),
        ("tensor_parallel_size", 0, 1),
    ],
)
def test_a_value_that_is_too_small_is_refused_with_the_least_that_works(name: str, value: float, least: int) -> None:
    error = mistake(**{name: value})
    assert error.what == f"{name} is too small"
    assert error.got is value
    assert error.fix == f"at least {least}"
    EngineConfig.from_options({name: least})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", "16"),
        ("page_size", 1.5),
        ("page_size", True),
        ("page_size", None),
        ("seed", None),
        ("policy", 3),
        ("enable_prefix_caching", 1),
        ("swap_space", "4"),
        ("kv_tokens", 2.5),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(name: str, value: object) -> None:
    error = mistake(**{name: value})
    assert name in error.what
    assert error.got == repr(value)


def test_sections_are_frozen() -> None:
    config = EngineConfig.from_options({})
    with pytest.raises(FrozenInstanceError):
        config.cache.page_size = 8  # pyright: ignore


def test_a_step_that_cannot_hold_a_token_of_everybody_is_refused_by_both_names() -> None:
    error = mistake(max_num_batched_tokens=31, max_num_seqs=32)
    assert error.got == "max_num_batched_tokens=31, max_num_seqs=32"


@pytest.mark.parametrize(
    ("given", "page_size", "max_num_seqs", "max_num_batched_tokens"),
    [
        ({"kv_tokens": 256}, 16, 16, 512),
        ({"kv_tokens": 31}, 16, 1, 512),
        ({"kv_tokens": 100, "page_size": 64}, 64, 1, 512),
        ({"max_num_batched_tokens": 16}, 16, 16, 16),
        ({"max_num_seqs": 1000}, 16, 1000, 1000),
        ({"num_states": 8}, 16, 8, 512),
        ({"chunked_prefill": False, "max_model_len": 2000}, 16, 32, 2000),
    ],
)
def test_defaults_work_beside_what_is_given(
    given: dict[str, Any], page_size: int, max_num_seqs: int, max_num_batched_tokens: int
) -> None:
    config = EngineConfig.from_options(given)
    assert config.cache.page_size == page_size
    assert config.scheduling.max_num_seqs == max_num_seqs
    assert config.scheduling.max_num_batched_tokens == max_num_batched_tokens
