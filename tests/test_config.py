"""Options: one source for the keyword arguments, the flags and their checks."""

import argparse
import math
from dataclasses import FrozenInstanceError, asdict, fields
from typing import Any

import pytest

from jinfercept.cli.flags import add_flags
from jinfercept.config import SECTIONS, EngineConfig, flag_fields
from jinfercept.errors import ConfigError
from jinfercept.pallas.attention import IMPLEMENTATIONS

NAMES = [field.name for field, _ in flag_fields()]


def parsed(*arguments: str) -> dict[str, Any]:
    """What the command line makes of its arguments."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser)
    return vars(parser.parse_args(arguments))


def mistake(**flags: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_flags(flags)
    error = caught.value
    assert str(error) == f"{error.what}; got {error.got}; fix: {error.fix}"
    assert error.fix
    return error


def test_every_field_is_a_flag_of_the_same_name_and_no_name_is_used_twice() -> None:
    assert [field.name for section in SECTIONS for field in fields(section)] == NAMES
    assert len(set(NAMES)) == len(NAMES)
    parser = argparse.ArgumentParser()
    add_flags(parser)
    actions = [action for action in parser._actions if action.dest != "help"]
    assert [action.dest for action in actions] == NAMES
    assert [action.option_strings[0] for action in actions] == ["--" + name.replace("_", "-") for name in NAMES]


def test_every_option_has_a_help_text_and_a_default_among_its_choices() -> None:
    for field, _ in flag_fields():
        assert field.metadata["help"]
        assert not field.metadata["choices"] or field.default in field.metadata["choices"]


def test_every_implementation_of_attention_can_be_chosen() -> None:
    [choices] = [field.metadata["choices"] for field, _ in flag_fields() if field.name == "attention"]
    assert {*choices} == {"auto", *IMPLEMENTATIONS}


def test_without_flags_the_defaults_hold_on_both_ways() -> None:
    assert list(asdict(EngineConfig.from_flags({})).values()) == [asdict(section()) for section in SECTIONS]
    assert parsed() == {}


def test_every_flag_arrives_in_its_section_with_its_type() -> None:
    for field, kind in flag_fields():
        name = "--" + field.name.replace("_", "-")
        samples = {int: 1, float: 0.5, bool: not field.default, str: (*field.metadata["choices"], "word")[0]}
        value: Any = {"max_num_batched_tokens": 64, "max_model_len": 64, "kv_tokens": 64}.get(field.name, samples[kind])
        arguments = ([name] if value else ["--no-" + name[2:]]) if kind is bool else [name, str(value)]
        assert parsed(*arguments) == {field.name: value}
        sections = asdict(EngineConfig.from_flags(parsed(*arguments))).values()
        assert [section[field.name] for section in sections if field.name in section] == [value]


def test_an_unknown_option_is_named_with_those_that_there_are() -> None:
    error = mistake(kv_token=64, polcy="swap", page_size=16)
    assert error.got == "kv_token (did you mean 'kv_tokens'?), polcy (did you mean 'policy'?)"
    assert all(name in error.fix for name in NAMES)


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
    ],
)
def test_a_value_that_is_too_small_is_refused_with_the_least_that_works(name: str, value: float, least: int) -> None:
    error = mistake(**{name: value})
    assert error.what == f"{name} is too small"
    assert error.got is value
    assert error.fix == f"at least {least}"
    EngineConfig.from_flags({name: least})


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


def test_a_value_outside_the_choices_is_refused() -> None:
    error = mistake(dtype="float8")
    assert "float32" in error.what
    assert error.got == "'float8'"
    assert "pipeline_depth" in mistake(pipeline_depth=2).what


def test_whole_numbers_are_floats_and_none_is_a_default() -> None:
    assert EngineConfig.from_flags({"swap_space": 2}).cache.swap_space == 2
    assert EngineConfig.from_flags({"kv_tokens": None}).cache.kv_tokens is None


def test_sections_are_frozen() -> None:
    config = EngineConfig.from_flags({})
    with pytest.raises(FrozenInstanceError):
        config.cache.page_size = 8  # pyright: ignore


def test_a_step_that_cannot_hold_a_token_of_everybody_is_refused_by_both_names() -> None:
    error = mistake(max_num_batched_tokens=31, max_num_seqs=32)
    assert error.got == "max_num_batched_tokens=31, max_num_seqs=32"
