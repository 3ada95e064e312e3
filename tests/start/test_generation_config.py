"""Sampling defaults of a checkpoint's generation_config.json: where a request says nothing, and nowhere else."""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jinfercept import LLM, ConfigError, ModelError, SamplingParams
from jinfercept.cli.main import main
from jinfercept.models.embedded import NAME, TOOL_CALL_BIAS, tool_adapter
from jinfercept.start.loading import FILE, sampling_defaults
from jinfercept.start.served_adapters import with_tool_adapter
from tests.support.tiny_model import GOLDEN, tiny_llm

GIVEN = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.5, "max_new_tokens": 5}
TAKEN = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.5, "max_tokens": 5}
PROMPT = {"prompt_token_ids": [1, 2, 3]}
SIZES: Any = {"dtype": "float32", "kv_tokens": 256, "page_size": 4, "max_num_seqs": 2, "max_num_batched_tokens": 8}
SIZES |= {"profile": "paper-gptj-6b-a100"}


def write(directory: Path, config: object) -> Path:
    (directory / FILE).write_text(json.dumps(config))
    return directory


def checkpoint(directory: Path, config: Mapping[str, Any]) -> Path:
    """A golden model with another generation_config.json."""
    shutil.copytree(GOLDEN / "llama_gqa", directory, dirs_exist_ok=True)
    return write(directory, config)


def test_what_the_file_says_and_a_value_of_null_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path, GIVEN | {"do_sample": True, "eos_token_id": 2, "pad_token_id": 0})
    assert sampling_defaults("auto", tmp_path) == TAKEN
    assert sampling_defaults(str(tmp_path), None) == sampling_defaults(str(tmp_path), tmp_path / "x.gguf") == TAKEN
    assert sampling_defaults("vllm", tmp_path) == {}
    write(tmp_path, {"temperature": None, "top_k": 7})
    assert sampling_defaults("auto", tmp_path) == {"top_k": 7}


def test_where_there_is_no_file_nothing_changes(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    for source in (None, tmp_path, tmp_path / "model.gguf", GOLDEN / "llama_gqa"):
        assert sampling_defaults("auto", source) == {}
    with pytest.raises(ConfigError, match="generation_config must be auto, vllm or a directory"):
        sampling_defaults(str(tmp_path), None)


@pytest.mark.parametrize("config", [[], {"temperature": "hot"}, {"top_p": -1}, {"top_k": 1.5}, {"max_new_tokens": 0}])
def test_a_file_that_cannot_be_used_is_a_mistake_of_the_model(tmp_path: Path, config: object) -> None:
    write(tmp_path, config)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        sampling_defaults("auto", tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json is (not valid|a) JSON"):
        sampling_defaults("auto", tmp_path)


def test_the_library_takes_the_defaults_where_no_parameters_are_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "jinfercept")
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for option in ("auto", "vllm"):
        caplog.clear()
        with LLM(checkpoint(tmp_path, GIVEN), generation_config=option, **SIZES) as llm:
            defaults = SamplingParams(**TAKEN) if option == "auto" else SamplingParams()
            assert llm.get_default_sampling_params() == defaults
            [request] = llm.make_requests([PROMPT], None, (), None)
            assert request.params == defaults
            [output] = llm.generate(PROMPT)
            assert len(output.outputs[0].token_ids) <= (defaults.max_tokens or 0)
            tokens[option] = llm.generate(PROMPT, params)[0].outputs[0].token_ids
        logged = [line for line in caplog.messages if "sampling defaults" in line]
        assert len(logged) == (option == "auto")
        assert all("'top_k': 3" in line for line in logged)
    assert tokens["auto"] == tokens["vllm"], "parameters of a request are its own"


def test_the_command_takes_them_and_its_flags_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    all_params: list[SamplingParams] = []
    monkeypatch.setattr("jinfercept.llm.LLM.stream", lambda llm, prompt, params: all_params.append(params) or iter(()))
    model = str(checkpoint(tmp_path, {"temperature": 0.5, "top_k": 3}))
    sizes = [part for name, value in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    for flags in ([], ["--temperature", "0", "--top-k", "9"], ["--generation-config", "vllm"]):
        assert main(["run", model, "--prompt", "x", *sizes, *flags]) == 0
    assert [(params.temperature, params.top_k, params.max_tokens) for params in all_params] == [
        (0.5, 3, 256),
        (0.0, 9, 256),
        (0.0, 0, 256),
    ]
    shown = capsys.readouterr().err
    assert shown.count("memory plan: weights") == shown.count("start: loaded in") == 3
    assert shown.count("sampling defaults from generation_config.json") == 2
    assert "environment variable" not in shown
    assert not logging.getLogger("jinfercept").handlers


def test_the_embedded_model_has_it_where_no_option_of_adapters_is_given() -> None:
    flags = with_tool_adapter(NAME, {"max_num_seqs": 4, "loras": None})
    adapter = {"loras": {"tools": str(tool_adapter())}, "tool_lora": "tools"}
    assert flags == {"max_num_seqs": 4, **adapter, "tool_call_bias": TOOL_CALL_BIAS}
    assert with_tool_adapter(NAME, {"tool_call_bias": 0.0}) == {**adapter, "tool_call_bias": 0.0}


@pytest.mark.parametrize(
    ("model", "flags"),
    [
        ("another/model", {"max_num_seqs": 4}),
        (NAME, {"loras": {"mine": "here"}}),
        (NAME, {"max_loras": 2}),
        (NAME, {"load_format": "dummy"}),
    ],
)
def test_other_starts_are_as_their_options_say(model: str, flags: dict[str, Any]) -> None:
    assert with_tool_adapter(model, flags) == flags


def test_no_name_is_a_start_without_it() -> None:
    assert with_tool_adapter(NAME, {"tool_lora": "", "max_num_seqs": 4}) == {"max_num_seqs": 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loras": ["a"]}, "a name and a directory"),
        ({"loras": ["a=x", "a=y"]}, "two adapters have one name"),
        ({"loras": 3}, "loras is a list of texts"),
        (
            {"loras": ["a=x", "b=y"], "max_loras": 1},
            "max_loras is less than the number of adapters in loras; got 1 for 2",
        ),
        ({"max_loras": 0}, "max_loras is too small"),
        ({"max_lora_rank": 8}, "max_lora_rank needs adapters"),
        (
            {"tool_call_bias": -1.0},
            "tool_call_bias needs tool_lora; got no tool_lora; fix: give tool_lora too",
        ),
        (
            {"loras": ["a=x"], "tool_lora": "a", "tool_call_bias": -200.0},
            "tool_call_bias is wrong; got -200.0; fix: a number from -100 to 100",
        ),
        ({"loras": ["a=x"], "tool_lora": "b"}, "tool_lora must be a name in loras; got 'b'; fix: one of loras: a"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_loaded(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tiny_llm(**options)
