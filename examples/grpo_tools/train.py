"""`train`: an adapter of a small model learns to call tools, while the engine samples one version ahead.

While the trainer takes a step on the samples of batch k, the engine makes those of batch k + 1 with the weights before that
step. Their log probabilities and versions come with them, so that the ratio of the loss is that of the right weights.
"""

import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from tyro import conf

from examples.grpo_tools.learning import experience, stepper
from examples.grpo_tools.questions import MAX_TOKENS, STOPS, Question, questions, reward, tools
from examples.tool_adapter.adapter import adapted, first_adapter, save
from examples.tool_adapter.learning import RULE, Learner
from examples.tool_adapter.network import frozen
from jinfercept import LLM, SamplingParams
from jinfercept.cli.options import Maybe
from jinfercept.models.embedded import NAME
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load
from jinfercept.rollouts.samples import Rollouts

SIZES: dict[str, Any] = {"quantization": "none", "kv_tokens": 8192, "max_model_len": 512}
NUM_EXAMINED = 32
_WARM_STEPS = 4


@dataclass
class Run:
    """What a run goes on from.

    Attributes:
        learner: after the last step.
        rewards: mean of each batch.
        examined: mean reward of held-out questions, greedily, by number of steps.
        batch: samples for the next step, made with the weights before the last one; None before the first.
        version: of the weights after the last step, in the numbers of the process that made the batch.
    """

    learner: Learner
    rewards: list[float] = field(default_factory=list)
    examined: dict[int, float] = field(default_factory=dict)
    batch: Rollouts | None = None
    version: int = 0


@dataclass(frozen=True)
class Train:
    """The command."""

    directory: conf.Positional[Path]
    """to write the adapter, the plot and the state to; a run that was stopped goes on from there"""
    model: str = NAME
    """that gets the adapter"""
    steps: int = 40
    """batches to learn from"""
    stop_after: Maybe[int] = None
    """steps after which this run stops; another goes on"""
    save_every: int = 10
    """steps after which the state is written: a run that is killed loses those since then"""
    prompts: int = 4
    """of a batch"""
    n: int = 8
    """samples of each prompt"""
    learning_rate: float = 1e-3
    """after the first few steps"""
    rank: int = 8
    """of the adapter"""
    slow_s: float = 0.1
    """seconds that a look-up takes"""
    in_flight: bool = False
    """the next weights come as soon as they are there, in the midst of samples, so that versions depend on the clock"""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """of the products of the trainer and of the engine"""
    seed: int = 0
    """of the adapter, the questions and the samples"""

    def run(self) -> int:
        """Learn, show the rewards, write the adapter and the plot; returns 0."""
        self.directory.mkdir(parents=True, exist_ok=True)
        loaded = load(self.model, dtype="float32", quantization="none")
        config, params, scale = loaded.model.config, separate(loaded.params), 2.0
        run, began_s = self._begun(config), time.monotonic()
        weights = frozen(params, self.dtype)
        step = stepper(config, scale, self.prompts * self.n * MAX_TOKENS)
        merge = jax.jit(lambda adapter: adapted(params, adapter, scale).layers)
        last = min(self.steps, self.stop_after or self.steps)
        with (
            LLM(self.model, dtype=self.dtype, max_num_seqs=NUM_EXAMINED, **SIZES) as llm,
            ThreadPoolExecutor(1) as sampler,
        ):
            done = len(run.rewards)
            if done:
                llm.update_weights(params._replace(layers=merge(run.learner.adapter)))
            else:
                self._examine(llm, run, 0, began_s)
            batch = run.batch or self._sample(llm, done)
            for number in range(done, last):
                ahead = sampler.submit(self._sample, llm, number + 1)
                rewards = self._rewards(number, batch)
                rate = self.learning_rate * min(1.0, (number + 1) / _WARM_STEPS)
                run.learner, report = step(run.learner, weights, experience(batch, rewards), np.float32(rate))
                layers = jax.block_until_ready(merge(run.learner.adapter))
                lag = run.version - int(batch.weight_versions.max())
                if not self.in_flight:
                    ahead.result()
                run.version = llm.update_weights(params._replace(layers=layers), mode="keep")
                run.batch = batch = ahead.result()
                run.rewards.append(float(rewards.mean()))
                print(
                    f"{number + 1:4} of {self.steps}  reward {rewards.mean():.3f}  loss {report.loss:+.4f}  drift "
                    f"{report.drift:.4f}  clipped {report.clipped:.3f}  {lag} behind  {time.monotonic() - began_s:.0f} s",
                    flush=True,
                )
                if (number + 1) % self.save_every == 0:
                    self._save(run, scale)
            self._examine(llm, run, last, began_s)
        self._save(run, scale)
        _plot(run, self.directory / "rewards.png")
        return 0

    def _questions(self, number: int) -> list[Question]:
        return questions(self.seed * 1_000_003 + number, self.prompts)

    def _sample(self, llm: LLM, number: int) -> Rollouts:
        """The samples of a batch."""
        params = SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS, stop=STOPS, seed=self.seed * 1_000_003 + number)
        prompts = [question.prompt for question in self._questions(number)]
        return llm.rollout(prompts, params, n=self.n, tools=tools(self.slow_s))

    def _rewards(self, number: int, batch: Rollouts) -> Any:
        batch_questions = self._questions(number)
        return np.array([reward(batch_questions[sample.prompt], sample) for sample in batch], np.float32)

    def _examine(self, llm: LLM, run: Run, steps: int, began_s: float) -> None:
        """Answer held-out questions greedily."""
        batch_questions = questions(self.seed, NUM_EXAMINED, examination=True)
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop=STOPS)
        samples = llm.rollout([question.prompt for question in batch_questions], params, tools=tools(self.slow_s))
        run.examined[steps] = float(np.mean([reward(batch_questions[sample.prompt], sample) for sample in samples]))
        print(f"{steps:4} steps  held out {run.examined[steps]:.3f}  {time.monotonic() - began_s:.0f} s", flush=True)

    def _begun(self, config: Any) -> Run:
        """What a run before this one has left, or a new one."""
        file = self.directory / "state.pickle"
        if file.exists():
            run: Run = pickle.loads(file.read_bytes())
            run.learner = jax.tree.map(jnp.asarray, run.learner)
            return run
        first = first_adapter(config, self.rank, self.seed)
        return Run(Learner(first, RULE.init(first)))

    def _save(self, run: Run, scale: float) -> None:
        """The adapter as PEFT does, and all that another run goes on from, which is there as a whole or as it was before."""
        save(self.directory, run.learner.adapter, scale, self.model)
        stored = replace(run, learner=jax.tree.map(np.asarray, run.learner))
        unfinished = self.directory / "state.pickle.new"
        unfinished.write_bytes(pickle.dumps(stored))
        unfinished.replace(self.directory / "state.pickle")


def _plot(run: Run, file: Path) -> None:
    """The rewards of all batches, and of the held-out questions."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(run.rewards) + 1), run.rewards, label="mean of a batch")
    axes.plot(list(run.examined), list(run.examined.values()), "o", label="held out, greedy")
    axes.set(xlabel="step", ylabel="reward", ylim=(0, 1.02))
    axes.legend(loc="lower right")
    figure.savefig(file, dpi=120)
