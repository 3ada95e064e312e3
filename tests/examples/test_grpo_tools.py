"""A step of GRPO fits the arrays of rollouts; rewards and calls are read alike by the engine and by loops."""

import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.grpo_tools.functions import split_call
from examples.grpo_tools.learning import experience, stepper
from examples.grpo_tools.questions import questions, reward_of
from examples.grpo_tools.train import Run
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


def train(folder: Path, *, killed_after: int | None = None) -> Run:
    """What a run in a process of its own has written; it gets SIGKILL when so many steps are done, if it has to."""
    options = ["--steps", "4", "--save-every", "2", "--prompts", "2", "--n", "2", "--dtype", "float32"]
    command = [sys.executable, "-m", "examples.grpo_tools", "train", str(folder), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.split()[:2] == [str(killed_after), "of"]:
                process.kill()
    assert process.returncode == (0 if killed_after is None else -9)
    return pickle.loads((folder / "state.pickle").read_bytes())


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_trainer_that_is_killed_goes_on_to_the_same_rewards(tmp_path: Path) -> None:
    killed = train(tmp_path / "killed", killed_after=3)
    assert len(killed.rewards) == 2
    (tmp_path / "killed" / "state.pickle.new").write_bytes(b"half")  # as of one that was killed while it wrote
    check_same(train(tmp_path / "killed"), train(tmp_path / "whole"))


def check_same(resumed: Run, whole: Run) -> None:
    """Both have learnt the same from the same samples."""
    assert any(whole.rewards)
    assert resumed.rewards == pytest.approx(whole.rewards)
    assert resumed.batch is not None
    assert whole.batch is not None
    assert resumed.batch.token_ids.tolist() == whole.batch.token_ids.tolist()
    jax.tree.map(
        lambda resumed_leaf, leaf: np.testing.assert_allclose(resumed_leaf, leaf, atol=1e-5),
        resumed.learner,
        whole.learner,
    )
