"""Dialogues fit their tools and are written as the server writes them; an adapter learns, goes on and is merged."""

import json
from itertools import islice, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from jaxtyping import Array
from safetensors.numpy import load_file

from examples.tool_adapter.adapter import adapted, first_adapter, read, save
from examples.tool_adapter.bfcl import Case, is_right
from examples.tool_adapter.dialogues import HELD_OUT, LESSONS, Dialogue, lessons
from examples.tool_adapter.learning import RULE, Learner, learning_rates, most_learnt, stepper
from examples.tool_adapter.network import Batch, frozen, loss
from examples.tool_adapter.packing import batch, document, tokens
from examples.tool_adapter.train import Train
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load
from jinfercept.models.model import Model
from jinfercept.models.protocol import Params
from jinfercept.pallas.layouts.scoring import PLAIN, Scoring
from tests.support.sample_tokenizers import smollm2
from tests.support.tiny_model import GOLDEN

SAMPLE = [dialogue for lesson in islice(lessons(LESSONS), 60) for dialogue in lesson]


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


def test_dialogues_of_every_kind_come_and_those_held_out_are_about_other_tools() -> None:
    assert {len(calls(dialogue)) for dialogue in SAMPLE} >= {0, 1, 2}
    assert any(message["role"] == "tool" for dialogue in SAMPLE for message in dialogue.messages)
    learnt = {json.dumps(lesson[0].tools) for lesson in lessons(LESSONS)}
    assert learnt.isdisjoint(json.dumps(lesson[0].tools) for lesson in lessons(HELD_OUT))


def test_only_what_the_agent_writes_is_learnt() -> None:
    tokenizer = smollm2()
    dialogue = next(dialogue for dialogue in SAMPLE if len(calls(dialogue)) == 2)
    made = tokens(tokenizer, (), dialogue)
    learnt = tokenizer.decode([token for token, is_written in zip(made.ids, made.written, strict=True) if is_written])
    assert [json.loads(part.split("</tool_call>")[0]) for part in learnt.split("<tool_call>")[1:]] == [
        {"name": name, "arguments": json.loads(arguments)} for name, arguments in calls(dialogue)
    ]
    assert "user" not in learnt


def test_dialogues_of_a_row_share_their_beginning_and_are_computed_as_if_alone() -> None:
    """The loss of a packed row is that of its dialogues one by one, computed by the model that is served."""
    loaded = load(GOLDEN / "llama_gqa", dtype="float32")
    config, params = loaded.model.config, separate(loaded.params)
    adapter = jax.tree.map(
        lambda leaf: leaf + 0.02 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), first_adapter(config, 2, 1)
    )
    rows = _rows(config.vocab_size)
    value = jax.jit(lambda adapter: loss(config, frozen(params, "float32"), adapter, 2.0, rows, 512))(adapter)
    merged, model = adapted(params, adapter, 2.0), Model(config, joined=False)
    alone = sum(_alone(model, merged, rows, row) for row in range(2))
    np.testing.assert_allclose(value, alone, rtol=1e-4)


def _rows(vocab_size: int) -> Batch:
    """Two rows of two documents."""
    lesson = [document(smollm2(), (), made[:3]) for made in islice(lessons(LESSONS), 4)]
    short = [
        made._replace(beginning=made.beginning[:30], branches=[part._replace(ids=part.ids[:30], written=part.written[:30])
        for part in made.branches]) for made in lesson
    ]  # fmt: skip
    rows = batch([short[:2], short[2:]], 256)
    return rows._replace(ids=rows.ids % vocab_size, learnt=rows.learnt | (rows.branches > 0) & _inner(rows))


def _inner(rows: Batch) -> Any:
    """Where the next token is of the same dialogue."""
    return (rows.branches == np.roll(rows.branches, -1, 1)) & (rows.documents == np.roll(rows.documents, -1, 1))


def _alone(model: Model, params: Params, rows: Batch, row: int) -> float:
    """The loss of a row's dialogues, each computed alone."""

    @jax.jit
    def chances(ids: Array) -> Array:
        def attend(
            q: Array, k: Array | None, v: Array | None, kv: None, /, scoring: Scoring = PLAIN
        ) -> tuple[Array, None]:
            assert k is not None
            assert v is not None
            return jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True)[0], kv

        x = model.embed(params.embed, ids, jnp.arange(len(ids)))
        for weights in params.layers:
            x, _ = model.layer(weights, x, jnp.arange(len(ids)), None, attend)
        return jax.nn.log_softmax(model.head(params.head, x))

    total = 0.0
    for number, branch in product(range(1, 3), range(1, 4)):
        followed = (rows.branches[row] == 0) | (rows.branches[row] == branch)
        (own,) = np.nonzero((rows.documents[row] == number) & followed)
        np.testing.assert_array_equal(rows.positions[row][own], range(len(own)))
        ids = rows.ids[row][own]
        table = np.asarray(chances(jnp.pad(ids, (0, 64 - len(ids)))))
        (learnt,) = np.nonzero(rows.learnt[row][own])
        total -= table[learnt, ids[learnt + 1]].sum()
    return total


def test_a_fresh_adapter_changes_nothing_and_files_are_those_of_peft(tmp_path: Path) -> None:
    loaded = load(GOLDEN / "llama_gqa", dtype="float32")
    params, config = separate(loaded.params), loaded.model.config
    adapter = first_adapter(config, 2, seed=1)
    same = adapted(params, adapter, 2.0)
    assert jax.tree.all(jax.tree.map(lambda weight, other: bool((weight == other).all()), params, same))
    changed = jax.tree.map(lambda leaf: leaf + 0.5, adapter)
    save(tmp_path, changed, 2.0, "base")
    stored = load_file(tmp_path / "adapter_model.safetensors")
    described = json.loads((tmp_path / "adapter_config.json").read_text())
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    product = stored[f"{prefix}.lora_B.weight"].astype(np.float32) @ stored[f"{prefix}.lora_A.weight"].astype(
        np.float32
    )
    weight = params.layers[1]["q"] + (described["lora_alpha"] / described["r"] * product.T).reshape(
        params.layers[1]["q"].shape
    )
    np.testing.assert_allclose(adapted(params, changed, 2.0).layers[1]["q"], weight, atol=1e-3)
    again, scale = read(tmp_path)
    assert scale == 2.0
    jax.tree.map(lambda leaf, other: np.testing.assert_allclose(leaf, other, atol=1e-3), again, changed)


def test_steps_lower_the_loss() -> None:
    loaded = load(GOLDEN / "llama_gqa", dtype="float32")
    config, params = loaded.model.config, separate(loaded.params)
    rows = _rows(config.vocab_size)
    step = stepper(config, 2.0, 1, most_learnt(rows, 1))
    first = first_adapter(config, 2, 0)
    learner, losses = Learner(first, RULE.init(first)), []
    for rate in learning_rates(0.01, 6):
        learner, value = step(learner, frozen(params, "float32"), rows, rate)
        losses.append(float(value))
    assert losses[-1] < losses[0]


def test_a_call_is_right_by_the_rules_of_the_leaderboard() -> None:
    properties = {
        "city": {"type": "string"},
        "size": {"type": "float"},
        "tags": {"type": "array", "items": {"type": "string"}},
    }
    function = {
        "name": "f",
        "description": "",
        "parameters": {"type": "dict", "properties": properties, "required": ["city"]},
    }
    answer = {"f": {"city": ["New York"], "size": [5.0, ""], "tags": [["a b"], ""]}}
    case = Case("1", [], [function], answer)
    assert case.tools[0]["function"]["parameters"]["type"] == "object"
    for arguments in ({"city": "new york"}, {"city": "New-York", "size": 5}, {"city": "New York", "tags": ["A b"]}):
        assert is_right(case, [("f", arguments)])
    for arguments in (
        {},
        {"city": "York"},
        {"city": "New York", "size": 6},
        {"city": "New York", "size": "5"},
        {"city": "New York", "other": 1},
        {"city": "New York", "tags": ["b", "a"]},
        None,
    ):
        assert not is_right(case, [("f", arguments)])
    assert not is_right(case, [("g", {"city": "New York"})])
    assert not is_right(case, [("f", {"city": "New York"})] * 2)
    assert not is_right(case, [])
    assert is_right(case._replace(answer=None), [])
    assert not is_right(case._replace(answer=None), [("f", {})])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"rows": 1, "at_once": 1, "width": 512, "rank": 2, "steps": 4}
    assert Train(tmp_path / "a", stop_after=2, **options).run() == 0
    assert Train(tmp_path / "a", merged=tmp_path / "m", **options).run() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["2", "4"]
    assert load(tmp_path / "m").model.config == load("smollm2-135m").model.config
    assert jnp.isfinite(load(tmp_path / "m").params.layers[0]["down"]).all()
