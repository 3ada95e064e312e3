"""Drafts of a layer of the model itself: its numbers, the same tokens as without drafts, and the same distribution."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jinfercept.errors import ConfigError, ModelError
from jinfercept.llm import LLM
from jinfercept.models.load import load
from jinfercept.models.quantized import is_quantized
from jinfercept.outputs import RequestOutput
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sampling_params import SamplingParams
from jinfercept.sched.plan import FROM_DEVICE, GREEDY, Chunk, DraftPlan, NewPages, StepPlan
from jinfercept.start.start import set_up
from tests.support.dense_model import hidden
from tests.support.draft_checkpoint import DRAFTS, with_draft_layer
from tests.support.peft_adapters import shapes_of, write_adapter
from tests.support.quantised_checkpoints import KINDS, quantised_layer, write_safetensors
from tests.support.tiny_gguf import write as write_gguf
from tests.support.tiny_model import GOLDEN, Workload, streams

pytestmark = pytest.mark.usefixtures("every_step_takes_a_second")

SIZE, BUCKET = 4, 8
SIZES: dict[str, Any] = {"dtype": "float32", "page_size": SIZE, "max_num_seqs": 4, "max_num_batched_tokens": 8}
POOL: dict[str, Any] = {"kv_tokens": 160, "max_model_len": 120, "num_states": 8, "swap_space": 0.001, "lazy": True}


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_draft_layer("qwen3_5", tmp_path_factory.mktemp("random") / "model")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Of a model and a layer that often agree, on a machine on which larger steps take hardly longer."""
    folder = with_draft_layer("qwen3_next", tmp_path_factory.mktemp("agrees") / "model", agrees=True)
    flags = SIZES | POOL | {"profile": "roofline-llama-13b-a100", "speculative_config": DRAFTS}
    with LLM(set_up(folder, check_pages=True, **flags)) as llm:
        yield llm


class PlainLayer:
    """The layer as it is published, of all tokens of one sequence, in float64."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        tensors = load_file(folder / "model.safetensors")
        self.tensors = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * (1 + self.tensors[name])

    def product(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.tensors[f"mtp.{name}.weight"].T

    def rotated(self, x: np.ndarray) -> np.ndarray:
        rope, dims = self.config["rope_parameters"], x.shape[-1]
        turning = int(dims * rope["partial_rotary_factor"])
        angles = np.arange(len(x))[:, None] * rope["rope_theta"] ** -(np.arange(0, turning, 2) / turning)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., : turning // 2], x[..., turning // 2 : turning]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., turning:]], axis=-1)

    def outputs(self, following: list[int], normed: np.ndarray) -> np.ndarray:
        """Behind the layer's own norm.

        Args:
            following: the token behind every token.
            normed: hidden states behind the final norm.
        """
        heads, kv_heads, dims = (self.config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        embedded = self.tensors["model.embed_tokens.weight"][following]
        sides = (
            self.norm(embedded, "mtp.pre_fc_norm_embedding.weight"),
            self.norm(normed, "mtp.pre_fc_norm_hidden.weight"),
        )
        x = self.product(np.concatenate(sides, axis=-1), "fc")
        y = self.norm(x, "mtp.layers.0.input_layernorm.weight")
        q, gates = np.split(self.product(y, "layers.0.self_attn.q_proj").reshape(-1, heads, 2 * dims), 2, axis=-1)
        k, v = (self.product(y, f"layers.0.self_attn.{name}_proj").reshape(-1, kv_heads, dims) for name in "kv")
        q, k = (
            self.rotated(self.norm(of, f"mtp.layers.0.self_attn.{name}_norm.weight"))
            for name, of in (("q", q), ("k", k))
        )
        k, v = (np.repeat(of, heads // kv_heads, axis=1) for of in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / dims**0.5
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = np.einsum("hts,shd->thd", shares / shares.sum(axis=-1, keepdims=True), v) / (1 + np.exp(-gates))
        x = x + self.product(attended.reshape(len(x), -1), "layers.0.self_attn.o_proj")
        y = self.norm(x, "mtp.layers.0.post_attention_layernorm.weight")
        gate, up = (self.product(y, f"layers.0.mlp.{name}_proj") for name in ("gate", "up"))
        return self.norm(x + self.product(gate / (1 + np.exp(-gate)) * up, "layers.0.mlp.down_proj"), "mtp.norm.weight")

    def drafts(self, tokens: list[int], states: np.ndarray, number: int) -> tuple[int, ...]:
        """The likeliest tokens behind some, of all but the last of which the model's last hidden states are known."""
        normed, following = self.norm(states, "model.norm.weight"), [*tokens[1:]]
        for _ in range(number):
            last = self.outputs(following, normed)[-1]
            following.append(int(np.argmax(self.tensors["model.embed_tokens.weight"] @ last)))
            normed = np.concatenate([normed, last[None]])
        return tuple(following[-number:])


def test_the_layer_drafts_what_the_published_formula_says(random: Path) -> None:
    """A prompt in two chunks, then tokens one by one, then drafts of which some are accepted; the pages have room for all."""
    number, plain, loaded = 2, PlainLayer(random), load(random, dtype="float32", draft_layer=True)
    shape = RunnerShape(
        num_pages=40, page_size=32, max_num_seqs=2, max_model_len=64, buckets=(BUCKET,), layers_per_step=2,
        num_states=3, num_drafts=number,
    )  # fmt: skip
    runner = ModelRunner(loaded.model, loaded.params, shape)
    runner.reset()
    base = load(random, dtype="float32")
    tokens = np.random.default_rng(0).integers(0, 128, 11).tolist()

    def run(start: int, new: list[int], drafts: int = 0, **fields: Any) -> tuple[int, ...]:
        """The drafts; draws behind the last of the tokens, which are known from then on."""
        pages = NewPages(0, [3], 2) if start == 0 else ()
        chunk = Chunk(1, start, tuple(new), pages, fields.get("sample", GREEDY), num_drafts=drafts)
        plan = StepPlan(0, BUCKET, (chunk,), draft=DraftPlan(True, fields.get("following", {})))
        result = runner.collect(runner.submit(plan))
        read = tokens[start:] if new == [FROM_DEVICE] else new
        before = [*tokens[:start], *read][: start + len(new) - drafts]
        for token, draft in zip(
            result.tokens, (*new[len(new) - drafts :], None), strict=drafts > 0 or bool(result.tokens)
        ):
            before.append(token)
            if token != draft:
                break
        if result.tokens:
            tokens[:] = before
        return result.drafts[0] if result.drafts else ()

    def expected() -> tuple[int, ...]:
        states = np.asarray(hidden(base.model, base.params, np.array(tokens[:-1])), np.float64)
        return plain.drafts(tokens, states, number)

    assert run(0, tokens[:5], sample=None, following={1: tokens[5]}) == ()
    assert run(5, tokens[5:]) == expected()
    for _ in range(3):
        assert run(len(tokens) - 1, [FROM_DEVICE] if len(tokens) % 2 else tokens[-1:]) == expected()
    before, right = len(tokens), _greedy(base, tokens)
    assert run(before - 1, [tokens[-1], right, (_greedy(base, [*tokens, right]) + 1) % 128], drafts=2) == expected()
    assert len(tokens) == before + 2
    assert run(before, [*tokens[before:], 5, 6], drafts=2) == expected()
    runner.close()


def _greedy(base: Any, tokens: list[int]) -> int:
    x = hidden(base.model, base.params, np.array(tokens))
    return int(jnp.argmax(jax.jit(base.model.head)(base.params.head, x[-1:])[0]))


def workload() -> Workload:
    """Greedy requests with calls, and drawn ones with a seed; some with log probabilities, and one with a penalty."""
    work = Workload(number=10, seed=7)
    for number, params in enumerate(work.params):
        warm = {"temperature": 0.7, "seed": number, "top_p": 0.9} if number % 3 == 1 else {}
        more = {"logprobs": 2} if number % 3 == 2 else {"repetition_penalty": 1.3} if number == 3 else {}
        work.params[number] = replace(params, max_tokens=12 + number, **warm, **more)
    return work


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    """Of every generated token that has some, and of the likeliest ones in its place."""
    places = [place for output in outputs for place in output.outputs[0].logprobs or () if place is not None]
    return [entry.logprob for place in places for entry in place.values()]


def test_every_policy_gives_the_tokens_of_a_run_without_drafts(llm: LLM) -> None:
    work = workload()
    llm.restart(policy="preserve", pipeline_depth=0, speculative_config=None)
    expected = work.run(llm)
    assert not llm.counters.drafted
    for number, policy in enumerate(("copy_ahead", "discard")):
        llm.restart(policy=policy, pipeline_depth=1 - number, max_chunk_tokens=7, speculative_config=DRAFTS)
        outputs = work.run(llm, delay_s=0.001)
        assert streams(outputs) == streams(expected)
        assert logprobs(outputs) == pytest.approx(logprobs(expected), abs=5e-4)
        assert llm.counters.interceptions > 0
        assert 10 < llm.counters.accepted.total() < llm.counters.drafted


def test_drawn_tokens_have_the_distribution_of_the_model(llm: LLM) -> None:
    """Requests without seeds: how often each pair of last tokens occurs with drafts, and with other seeds without any."""
    prompt, number, counts = {"prompt_token_ids": list(range(3, 20))}, 300, list[Counter[tuple[int, ...]]]()
    for seed, drafts in ((1, None), (2, DRAFTS)):
        llm.restart(policy="copy_ahead", pipeline_depth=0, speculative_config=drafts, seed=seed)
        params = SamplingParams(temperature=1.0, top_k=3, max_tokens=4, ignore_eos=True)
        counts.append(Counter(tuple(stream[-2:]) for stream in streams(llm.generate([prompt] * number, params))))
    assert llm.counters.accepted.total() > number / 8
    pairs = [(without[pair], drafted[pair]) for without, drafted in [counts] for pair in without | drafted]
    often = [pair for pair in pairs if sum(pair) >= 10]
    chi_square = sum((first - second) ** 2 / (first + second) for first, second in often)
    assert chi_square < len(often) + 4 * (2 * len(often)) ** 0.5, "more than four standard deviations above its mean"


def test_a_request_with_an_adapter_beside_one_without_has_the_tokens_of_a_run_without_drafts(tmp_path: Path) -> None:
    folder = with_draft_layer("qwen3_next", tmp_path / "model", agrees=True)
    targets = ("self_attn.q_proj", "self_attn.o_proj")
    adapter = write_adapter(tmp_path / "adapter", shapes_of(GOLDEN / "qwen3_next"), targets, size=0.25)
    flags = SIZES | POOL | {"profile": "roofline-llama-13b-a100", "speculative_config": DRAFTS, "loras": {"a": adapter}}
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [{"prompt_token_ids": [40, 2, 9, 11]}] * 2
    with LLM(set_up(folder, check_pages=True, **flags)) as llm:
        drafted = streams(llm.generate(prompts, params, lora=["a", None]))
        assert llm.counters.accepted.total() > 10
        llm.restart(speculative_config=None)
        expected = streams(llm.generate(prompts, params, lora=["a", None]))
    assert drafted == expected
    assert expected[0] != expected[1]


@pytest.mark.slow
def test_a_layer_that_is_refused_again_and_again_stops_drafting(random: Path) -> None:
    flags = SIZES | POOL | {"profile": "roofline-llama-13b-a100", "speculative_config": DRAFTS}
    with LLM(set_up(random, **flags)) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)
        assert llm.counters.accepted.total() <= 5
        assert llm.counters.drafts < 10


_LINEAR = (*(f"{name}_proj.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")), "mtp.fc.weight")


@pytest.mark.parametrize(("kind", "dense"), [("fp8, blocks", ""), ("awq", ""), ("gptq, symmetric", "mtp.")])
def test_a_quantised_layer_computes_what_its_numbers_say(random: Path, tmp_path: Path, kind: str, dense: str) -> None:
    stored, plain, rng = dict[str, np.ndarray](), dict[str, np.ndarray](), np.random.default_rng(0)
    for name, tensor in load_file(random / "model.safetensors").items():
        if name.endswith(_LINEAR) and not (dense and name.startswith(dense)):
            parts, plain[name] = quantised_layer(rng, tensor.shape[1], tensor.shape[0], KINDS[kind])
            stored |= {name.removesuffix("weight") + part: numbers for part, numbers in parts.items()}
        else:
            stored[name] = plain[name] = tensor.astype(np.float32)
    config = json.loads((random / "config.json").read_text())
    how, outputs = KINDS[kind] | {"modules_to_not_convert": [dense] if dense else []}, list[np.ndarray]()
    for folder, tensors, quantised in (("stored", stored, {"quantization_config": how}), ("plain", plain, {})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text(json.dumps(config | quantised))
        write_safetensors(
            {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()},
            tmp_path / folder / "model.safetensors",
        )
        loaded = load(tmp_path / folder, dtype="float32", draft_layer=True)
        layer, following, x = loaded.params.layers[-1], *jax.random.normal(jax.random.key(1), (2, 3, 32))
        assert is_quantized(layer["draft_fc"]) == (folder == "stored" and not dense)
        outputs.append(np.asarray(loaded.model.draft_inputs(layer, following, x, loaded.params.head["norm"])))
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers of config.json is not supported; got 2"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings of config.json is not supported"),
    ],
)
def test_a_layer_of_another_kind_is_refused(random: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    config = json.loads((random / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model.safetensors").symlink_to(random / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        load(tmp_path, draft_layer=True)


def test_a_gguf_file_of_another_family_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="family has no layer that drafts"):
        load(tmp_path / "m.gguf", draft_layer=True)


def test_a_model_without_such_a_layer_is_refused(llm: LLM) -> None:
    for name, words in (
        ("llama_gqa", "family has no layer that drafts"),
        ("qwen3_5", r"mtp.fc.weight expected \[32, 64\] got nothing"),
    ):
        with pytest.raises(ModelError, match=words):
            set_up(GOLDEN / name, speculative_config=DRAFTS, **SIZES, **POOL)
    with pytest.raises(ConfigError, match="this LLM was compiled for fewer draft tokens"):
        llm.restart(speculative_config=DRAFTS | {"num_speculative_tokens": 4})
