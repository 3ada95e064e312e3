"""Tunix samples with jinfercept: its rollout protocol, and its GRPO learner on a tiny model.

In an environment that has both (`google-tunix` 0.1.7 wants jax 0.12):

    python examples/tunix_rollout.py check       # log probabilities of tiny models beside Tunix's own
    python examples/tunix_rollout.py learn       # a few steps of Tunix's GRPO learner

`JinferceptRollout` is what `ClusterConfig(rollout_engine=…)` takes, bare or in a `functools.partial` with `tools` and options
of `LLM`. It serves Tunix's Llama 3, Qwen2 and Qwen3, without experts.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import jax
import numpy as np

from jinfercept import LLM, Rollouts, SamplingParams, Tool
from jinfercept.models.config import ModelConfig, RopeConfig
from jinfercept.models.model import Model, tied
from jinfercept.models.protocol import Params

base: Any = import_module("tunix.rl.rollout.base_rollout")

LAYER_NAMES = {
    "attn_norm": "input_layernorm.w",
    "q": "attn.q_proj.w",
    "k": "attn.k_proj.w",
    "v": "attn.v_proj.w",
    "o": "attn.o_proj.w",
    "ffn_norm": "post_attention_layernorm.w",
    "gate": "mlp.gate_proj.kernel",
    "up": "mlp.up_proj.kernel",
    "down": "mlp.down_proj.kernel",
}
"""By name of a weight here that in a layer of Tunix's models. Shapes are the same."""
FAMILY_NAMES = {
    "Llama3": {},
    "Qwen2": {f"{name}_bias": f"attn.{name}_bias" for name in ("q", "k", "v")},
    "Qwen3": {f"{name}_norm": f"attn.{name}_norm.w" for name in ("q", "k")},
}
"""The weights that a family has besides, by the name of its class. Tunix's biases are flat."""
ROPE_THETA = {"Llama3": 1e6, "Qwen3": 1e6}
"""What Tunix 0.1.7 rotates with whatever `rope_theta` of its config says; Qwen2 follows its config."""


def config_of(actor: Any, eos_id: int, max_position: int) -> ModelConfig:
    """The dimensions of one of Tunix's models. Raises `ValueError` for one that this module does not map."""
    theirs, family = actor.config, type(actor).__name__
    if family not in FAMILY_NAMES or getattr(theirs, "num_experts", None):
        raise ValueError(f"{family} is not mapped here; {', '.join(FAMILY_NAMES)} without experts are")
    is_tied = theirs.weight_tying if family == "Llama3" else theirs.use_tied_embedding
    return ModelConfig(
        family="llama",
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.embed_dim,
        num_layers=theirs.num_layers,
        num_heads=theirs.num_heads,
        num_kv_heads=theirs.num_kv_heads,
        head_dim=theirs.head_dim,
        ffn_size=theirs.hidden_dim,
        norm_eps=theirs.norm_eps,
        rope=RopeConfig(theta=ROPE_THETA.get(family, float(theirs.rope_theta)), rotary_dim=theirs.head_dim),
        tie_embeddings=is_tied,
        max_position=max_position,
        eos_token_ids=(eos_id,),
        activation="silu",
        qkv_bias=family == "Qwen2",
        qk_norm=family == "Qwen3",
    )


def params_of(config: ModelConfig, state: Any) -> Params:
    """The weights of a state of one of Tunix's models, uncopied (a head of its own is transposed)."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    flat = {_dotted(path): leaf for path, leaf in leaves}
    family = "Qwen2" if config.qkv_bias else "Qwen3" if config.qk_norm else "Llama3"
    names = LAYER_NAMES | FAMILY_NAMES[family]

    def shaped(leaf: Any, name: str) -> Any:
        return leaf.reshape(-1, config.head_dim) if name.endswith("_bias") else leaf

    layers = tuple(
        {name: shaped(flat[f"layers.{index}.{theirs}"], name) for name, theirs in names.items()}
        for index in range(config.num_layers)
    )
    head = {"norm": flat["final_norm.w"]}
    if not config.tie_embeddings:
        head["unembed"] = flat["lm_head.w"].T
    return tied(config, Params({"embedding": flat["embedder.input_embedding"]}, layers, head))


def _dotted(path: Sequence[Any]) -> str:
    names = (str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", "")))) for key in path)
    return ".".join(name for name in names if name not in ("value", "raw_value"))


class JinferceptRollout(base.BaseRollout):
    """An engine as Tunix's rollout worker.

    Attributes:
        llm: the engine.
        rollouts: what the last `generate` sampled, with masks, calls and versions, for which Tunix's protocol has no place.
    """

    def __init__(
        self,
        *,
        rollout_actor: Any,
        tokenizer: Any,
        rollout_config: Any,
        mesh: Any = None,
        tools: Sequence[Tool] = (),
        **options: Any,
    ) -> None:
        """As `RLCluster` calls it; `options` are those of `LLM`."""
        self._tokenizer, self._actor, self._tools, self.mesh = tokenizer, rollout_actor, list(tools), mesh
        length = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        length = options.setdefault("max_model_len", length * 2 if tools else length)
        options.setdefault("kv_tokens", max(8192, 2 * length))
        self._config = config_of(rollout_actor, tokenizer.eos_id(), length)
        params = params_of(self._config, _state(rollout_actor))
        self.llm = LLM(Model(self._config), params=params, **options)
        self.rollouts: Rollouts | None = None

    def generate(self, prompts: list[str], rollout_config: Any, **kwargs: Any) -> Any:
        """Samples of prompts: equal ones behind each other are a group, which shares its prompt's pages."""
        ids = [self._encoded(prompt) for prompt in prompts]
        width, longest = rollout_config.max_prompt_length, max(map(len, ids))
        if longest > width:
            raise ValueError(f"a prompt has {longest} tokens: max_prompt_length={width}")
        seed = None if rollout_config.seed is None else int(np.asarray(rollout_config.seed).ravel()[-1])
        params = SamplingParams(
            temperature=rollout_config.temperature,
            top_p=1.0 if rollout_config.top_p is None else rollout_config.top_p,
            top_k=max(rollout_config.top_k or 0, 0),
            max_tokens=rollout_config.max_tokens_to_generate,
            stop_token_ids=tuple(rollout_config.eos_tokens or ()),
        )
        given = [{"prompt_token_ids": tokens} for tokens in ids]
        each = [params if seed is None else replace(params, seed=seed + place) for place in range(len(ids))]
        rollouts = self.rollouts = self.llm.rollout(given, each, tools=self._tools or None)
        tokens = [sample.token_ids[sample.num_prompt :] for sample in rollouts]
        left_padded = np.full((len(ids), width), self.pad_id(), np.int32)
        for row, prompt in zip(left_padded, ids, strict=True):
            row[width - len(prompt) :] = prompt
        return base.RolloutOutput(
            text=[self._tokenizer.decode(own.tolist()) for own in tokens],
            logits=None,
            tokens=tokens,
            left_padded_prompt_tokens=left_padded,
            logprobs=[sample.processed_logprobs[sample.num_prompt :] for sample in rollouts],
        )

    def completion_mask(self, length: int) -> np.ndarray:
        """`[samples, length]` of the last `generate`: 1 where the model wrote the token, 0 for results of tools and padding."""
        assert self.rollouts is not None
        mask = np.zeros((len(self.rollouts), length), np.int8)
        for row, sample in zip(mask, self.rollouts, strict=True):
            own = sample.loss_mask[sample.num_prompt :][:length]
            row[: len(own)] = own
        return mask

    def get_per_token_logps(self, prompt_tokens: Any, completion_tokens: Any, **kwargs: Any) -> jax.Array:
        """`[B, C]`: log probabilities of completions by the model's own logits; 0 for padding behind them."""
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        made = np.zeros(completions.shape, np.float32)
        lengths = [int(np.max(np.flatnonzero(row != self.pad_id()), initial=-1)) + 1 for row in completions]
        rows = [
            [*prompt[prompt != self.pad_id()].tolist(), *row[:length].tolist()]
            for prompt, row, length in zip(prompts, completions, lengths, strict=True)
        ]
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        outputs = self.llm.generate([{"prompt_token_ids": row} for row in rows], params)
        for place, (row, length, output) in enumerate(zip(rows, lengths, outputs, strict=True)):
            named = output.prompt_logprobs or []
            for at in range(length):
                behind = len(row) - length + at
                made[place, at] = named[behind][row[behind]].logprob  # pyright: ignore[reportOptionalSubscript]
        return jax.numpy.asarray(made)

    def update_params(self, params: Any, filter_types: Any = None) -> None:
        """Weights of the trainer; where these are an adapter's alone, merge them first."""
        self.llm.update_weights(params_of(self._config, params))

    def pad_id(self) -> int:
        """The token that fills up arrays."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """The token that ends a text."""
        return self._tokenizer.eos_id()

    def model(self) -> Any:
        """The trainer's model: the engine has no module."""
        return self._actor

    def _encoded(self, prompt: str) -> list[int]:
        return self._tokenizer.dedup_bos_ids(list(self._tokenizer.encode(str(prompt))))


def _state(module: Any) -> Any:
    nnx: Any = import_module("flax.nnx")
    return nnx.state(module, nnx.Param)


# -- the commands ------------------------------------------------------------------------------------------------------


def learn(steps: int) -> int:
    """Tunix's GRPO learner on a random Llama of 2 layers that is paid for writing the letter e."""
    cluster_module: Any = import_module("tunix.rl.rl_cluster")
    grpo: Any = import_module("tunix.rl.grpo.grpo_learner")
    optax: Any = import_module("optax")
    tokenizer = _tokenizer()
    actor = _tiny("Llama3", tokenizer.size)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    role = cluster_module.Role
    rewards = list[float]()

    def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        values = [text.count("e") / max(len(text), 1) for text in completions]
        rewards.append(float(np.mean(values)))
        return values

    config = cluster_module.ClusterConfig(
        role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
        rollout_engine=JinferceptRollout,
        offload_to_cpu=False,
        training_config=cluster_module.RLTrainingConfig(
            actor_optimizer=optax.adam(1e-2), eval_every_n_steps=10**6, max_steps=steps
        ),
        rollout_config=base.RolloutConfig(max_tokens_to_generate=16, max_prompt_length=16, temperature=1.0),
    )
    cluster = cluster_module.RLCluster(actor=actor, reference=None, tokenizer=tokenizer, cluster_config=config)
    learner = grpo.GRPOLearner(
        rl_cluster=cluster, reward_fns=reward, algo_config=grpo.GRPOConfig(num_generations=8, beta=0.0)
    )
    batches = [{"prompts": np.array(["the letter", "a word", "some text", "one more"])} for _ in range(steps)]
    began_s = time.perf_counter()
    learner.train(batches)
    shown = " ".join(f"{value:.3f}" for value in rewards)
    print(f"{steps} steps in {time.perf_counter() - began_s:.1f} s, mean rewards {shown}")
    return 0


def check() -> int:
    """Sample with tiny models of every family; returns 1 if log probabilities differ from those of Tunix's own forward pass."""
    tokenizer, failed = _tokenizer(), False
    settings = base.RolloutConfig(max_tokens_to_generate=8, max_prompt_length=8, temperature=1.0)
    for family in FAMILY_NAMES:
        actor = _tiny(family, tokenizer.size)
        worker = JinferceptRollout(rollout_actor=actor, tokenizer=tokenizer, rollout_config=settings, dtype="float32")
        with worker.llm:
            greatest = _difference(worker, actor, settings)
            changed = jax.tree.map(lambda leaf: 1.5 * leaf, _state(actor))
            import_module("flax.nnx").update(actor, changed)
            worker.update_params(changed)
            greatest = max(greatest, _difference(worker, actor, settings))
        print(f"{family}: log probabilities differ by at most {greatest:.1e}")
        failed |= greatest > 1e-3
    return int(failed)


def _difference(worker: JinferceptRollout, actor: Any, settings: Any) -> float:
    """The greatest difference of a token's log probability, sampled and by Tunix's forward pass."""
    output, greatest = worker.generate(["the letter e", "a word"], settings), 0.0
    assert worker.rollouts is not None
    for sample, reported in zip(worker.rollouts, output.logprobs, strict=True):
        ids = jax.numpy.asarray(sample.token_ids)[None]
        length = ids.shape[1]
        mask = jax.numpy.tril(jax.numpy.ones((1, length, length), bool))
        logits = actor(ids, jax.numpy.arange(length)[None], None, mask)[0]
        named = jax.nn.log_softmax(logits[0].astype("float32"))[np.arange(length - 1), sample.token_ids[1:]]
        own = np.asarray(named)[sample.num_prompt - 1 :]
        greatest = max(greatest, float(np.abs(own - reported).max()))
    return greatest


def _tokenizer() -> Any:
    from jinfercept.chat.tokenizer.load import load_tokenizer
    from jinfercept.models.embedded import NAME
    from jinfercept.models.load import load

    adapter: Any = import_module("tunix.generate.tokenizer_adapter")
    tokenizer = load_tokenizer(load(NAME, dtype="float32").source)
    assert tokenizer is not None
    return adapter.TokenizerAdapter(_Vocabulary(tokenizer))


class _Vocabulary:
    """The five methods of a tokenizer that Tunix asks for."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode, self.decode = tokenizer.encode, tokenizer.decode
        self.size, self._end = tokenizer.vocab_size, min(tokenizer.eos_token_ids)

    def bos_id(self) -> int:
        return self._end

    def eos_id(self) -> int:
        return self._end

    def pad_id(self) -> int:
        return 0


def _tiny(family: str, vocab_size: int) -> Any:
    """One of Tunix's models, of 2 layers with random weights; its own first ones are zeros in the feed-forward layers."""
    module: Any = import_module(f"tunix.models.{family.lower()}.model")
    nnx: Any = import_module("flax.nnx")
    dimensions = module.ModelConfig(
        vocab_size=vocab_size,
        num_layers=2,
        embed_dim=64,
        hidden_dim=128,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=10_000,
        norm_eps=1e-5,
        **({"weight_tying": True} if family == "Llama3" else {}),
    )
    model = getattr(module, family)(dimensions, rngs=nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(1), 10_000))
    state = jax.tree.map(
        lambda leaf: (leaf if leaf.ndim == 1 else 0.0) + 0.05 * jax.random.normal(next(keys), leaf.shape),
        nnx.state(model),
    )
    nnx.update(model, state)
    return model


def main(words: Sequence[str]) -> int:
    """Run a command; returns 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "learn"))
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args(words)
    return check() if given.command == "check" else learn(given.steps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
