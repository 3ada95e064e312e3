"""A step of GRPO fits the arrays of rollouts; rewards and calls are read alike by the engine and by loops."""

import jax.numpy as jnp
import numpy as np

from examples.grpo_tools.functions import split_call
from examples.grpo_tools.learning import advantages, experience, stepper
from examples.grpo_tools.questions import questions, reward_of
from examples.tool_adapter.adapter import first_adapter
from examples.tool_adapter.learning import RULE, Learner
from examples.tool_adapter.network import frozen
from jinfercept import SamplingParams
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load
from tests.support.tiny_model import GOLDEN, tiny_llm

CALLED = SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)


def test_a_step_follows_the_rewards_of_rollouts_and_starts_at_the_engines_probabilities() -> None:
    loaded = load(GOLDEN / "llama_gqa", dtype="float32")
    config, params = loaded.model.config, separate(loaded.params)
    with tiny_llm() as llm:
        rollouts = llm.rollout([[1, 2, 3], [4, 5, 6, 7]], CALLED, n=4)
    rewards = np.array([float(sample.token_ids[-1] % 3) for sample in rollouts], np.float32)
    batch = experience(rollouts, rewards, multiple=8)
    assert batch.rows.ids.shape == (8, 16)
    assert batch.rows.learnt.sum() == rollouts.num_generated == 48
    first = first_adapter(config, 2, 0)
    step, weights = stepper(config, 2.0, 64), frozen(params, "float32")
    learner, report = step(Learner(first, RULE.init(first)), weights, batch, jnp.float32(1e-2))
    assert report.drift < 1e-4
    assert report.clipped == 0
    _, after = step(learner, weights, batch, jnp.float32(1e-2))
    assert after.loss < report.loss
    assert after.drift > 1e-4


def test_advantages_are_relative_to_the_group() -> None:
    values = advantages(np.array([0, 1, 1, 1, 5, 5], np.float32), np.array([0, 0, 0, 0, 1, 1]))
    assert values[0] < 0 < values[1] == values[2]
    assert not values[4:].any()


def test_rewards_and_calls_of_a_text() -> None:
    product, price = questions(0, 2)
    assert product.tool == "calculator"
    right = f" <<{product.arguments}={product.answer}>> {product.answer}"
    assert split_call(right.partition("=")[0] + "=") == ("calculator", product.arguments)
    assert split_call(right + " 3=") is None
    assert reward_of(product, right, [("calculator", product.arguments)]) == 1.0
    assert reward_of(product, right + "1", [("calculator", product.arguments)]) == 0.6
    assert reward_of(product, right, [("calculator", "1*1")]) == 0.2
    assert reward_of(price, right, [("calculator", price.arguments)]) == 0.0
    assert {question.prompt for question in questions(0, 40)}.isdisjoint(
        question.prompt for question in questions(0, 40, examination=True)
    )
