"""Made-up dialogues fit their tools and are written as the server writes them; an adapter learns, goes on and is merged."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from safetensors.numpy import load_file

from examples.tool_adapter.adapter import adapted, first_adapter, save
from examples.tool_adapter.dialogues import HELD_OUT, Dialogue, dialogues
from examples.tool_adapter.train import Train, tokens
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load
from tests.support.sample_tokenizers import smollm2
from tests.support.tiny_model import GOLDEN

SAMPLE = list(islice(dialogues(3), 300))


def calls(dialogue: Dialogue) -> list[tuple[str, str]]:
    made = [call["function"] for message in dialogue.messages for call in message.get("tool_calls") or ()]
    return [(function["name"], function["arguments"]) for function in made]


def test_arguments_fit_the_schema_of_a_tool_that_is_declared() -> None:
    num_calls = 0
    for dialogue in SAMPLE:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in dialogue.tools}
        for name, arguments in calls(dialogue):
            jsonschema.validate(json.loads(arguments), schemas[name])
            num_calls += 1
    assert num_calls > 200


def test_dialogues_of_every_kind_come_and_those_held_out_are_about_other_skills() -> None:
    by_calls = [len(calls(dialogue)) for dialogue in SAMPLE]
    assert set(by_calls) >= {0, 1, 2}
    assert any(message["role"] == "tool" for dialogue in SAMPLE for message in dialogue.messages)
    assert next(dialogues(3)) == SAMPLE[0]
    assert len(HELD_OUT) > 8
    examined = {json.dumps(dialogue.tools) for dialogue in islice(dialogues(3, examination=True), 50)}
    assert examined.isdisjoint(json.dumps(dialogue.tools) for dialogue in SAMPLE)


def test_only_what_the_agent_writes_is_learnt() -> None:
    tokenizer = smollm2()
    dialogue = next(dialogue for dialogue in SAMPLE if len(calls(dialogue)) == 2)
    made = tokens(tokenizer, (), dialogue)
    learnt = tokenizer.decode([token for token, is_written in zip(made.ids, made.written, strict=True) if is_written])
    assert [json.loads(part.split("</tool_call>")[0]) for part in learnt.split("<tool_call>")[1:]] == [
        {"name": name, "arguments": json.loads(arguments)} for name, arguments in calls(dialogue)
    ]
    assert "user" not in learnt


def test_a_fresh_adapter_changes_nothing_and_files_are_those_of_peft(tmp_path: Path) -> None:
    params = separate(load(GOLDEN / "llama_gqa", dtype="float32").params)
    adapter = first_adapter(params, 2, seed=1)
    same = adapted(params, adapter, 2.0)
    assert jax.tree.all(jax.tree.map(lambda weight, other: bool((weight == other).all()), params, same))
    changed = jax.tree.map(lambda leaf: leaf + 0.5, adapter)
    save(tmp_path, changed, 2.0, "base")
    config, stored = (
        json.loads((tmp_path / "adapter_config.json").read_text()),
        load_file(tmp_path / "adapter_model.safetensors"),
    )
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    product = stored[f"{prefix}.lora_B.weight"].astype(np.float32) @ stored[f"{prefix}.lora_A.weight"].astype(
        np.float32
    )
    weight = params.layers[1]["q"] + (config["lora_alpha"] / config["r"] * product.T).reshape(
        params.layers[1]["q"].shape
    )
    np.testing.assert_allclose(adapted(params, changed, 2.0).layers[1]["q"], weight, atol=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"rows": 1, "width": 512, "rank": 2}
    assert Train(tmp_path / "a", steps=2, **options).run() == 0
    assert Train(tmp_path / "a", steps=4, merged=tmp_path / "m", **options).run() == 0
    losses = [float(line.split("loss")[1].split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert load(tmp_path / "m").model.config == load("smollm2-135m").model.config
    assert jnp.isfinite(load(tmp_path / "m").params.layers[0]["q"]).all()
