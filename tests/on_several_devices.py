"""Tensor parallelism on a CPU that is eight devices; `test_several_devices.py` runs this file.

Whatever is decided about contexts, the tokens are those of one device.
"""

import re
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from benchmarks.weights_cost import live_bytes, watched
from jinfercept.engine.streaming import serve
from jinfercept.errors import ConfigError
from jinfercept.llm import LLM
from jinfercept.models.config import ModelConfig
from jinfercept.models.in_memory import Replacement, blocks_of, initial_params, shapes_of
from jinfercept.models.joined_weights import separate
from jinfercept.models.load import load, read_config
from jinfercept.models.mesh import ModelMesh
from jinfercept.models.model import Model, joins
from jinfercept.models.protocol import Params, states_of
from jinfercept.models.sharding import partition_specs
from jinfercept.request import FollowUp
from jinfercept.runner.steps import kinds_of, layers_key
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.backend import CompileCounter
from jinfercept.structured_outputs import StructuredOutputsParams
from tests.support.dense_model import logits
from tests.support.draft_checkpoint import DRAFTS, with_assistant, with_draft_layer
from tests.support.peft_adapters import ALL, GPTJ, write_adapter
from tests.support.sample_tokenizers import VOCAB, byte_level
from tests.support.state_moves import check_random_moves
from tests.support.tiny_gguf import write as write_gguf
from tests.support.tiny_model import GOLDEN, TOOL, Workload, set_joined, streams, tiny_setup

SIZES: dict[str, Any] = {"page_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8, "max_model_len": 100}
SIZES |= {"kv_tokens": 112, "swap_space": 0.001, "check_pages": True}  # little more than the longest sequence
SIZES |= {"dtype": "float32", "profile": "paper-gptj-6b-a100", "lazy": True}
EXPERTS = ("mixtral", "qwen3_moe", "qwen3_moe_mixed", "glm4_moe", "nemotron_h_latent")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = {"prompt_token_ids": list(range(20))}


@dataclass
class Served:
    """What was generated: the tokens of every request, log probabilities of those that have some, and what follows `PROMPT`."""

    tokens: list[list[int]]
    logprobs: list[float]
    greedy: list[int]


def tiny_config(name: str) -> ModelConfig:
    """A family's tiny model with eight query heads, and a vocabulary that no number of devices divides."""
    config = read_config(GOLDEN / name)
    num_kv_heads = 8 if config.num_kv_heads == config.num_heads else config.num_kv_heads
    sizes: dict[str, Any] = {"num_heads": 8, "num_kv_heads": num_kv_heads, "vocab_size": VOCAB + 1}
    return replace(config, **sizes, eos_token_ids=(), max_position=256)


def tiny_llm(name: str, **flags: Any) -> LLM:
    return LLM(tiny_config(name), load_format="dummy", tokenizer=byte_level(), **SIZES | flags)


def serve_everything(llm: LLM, policy: str, depth: int) -> Served:
    """Calls, drawn tokens, log probabilities, structured outputs and a retained context."""
    llm.restart(policy=policy, pipeline_depth=depth)
    work = Workload(number=8, seed=3)
    constraints = (
        StructuredOutputsParams(regex=r"[abc]{3,9}(, [0-9]+)?"),
        StructuredOutputsParams(choice=["yes", "no, never"]),
    )
    prompts = [*work.prompts, *("the same beginning" for _ in range(4))]
    params = [
        *(replace(params, logprobs=2) for params in work.params),
        *(SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=constraint) for constraint in constraints),
        SamplingParams(temperature=1.0, seed=5, max_tokens=20, ignore_eos=True, top_p=0.9, repetition_penalty=1.2),
        SamplingParams(temperature=0.7, seed=6, max_tokens=20, ignore_eos=True, prompt_logprobs=1),
    ]
    requests = llm.make_requests(prompts, params, [TOOL], [*work.detectors, *(None for _ in range(4))])
    kept = replace(requests[-1], follow_up=FollowUp())
    outputs = serve(llm.engine.thread, [*requests[:-1], kept])
    again = [*outputs[-1].prompt_token_ids, *outputs[-1].outputs[0].token_ids, 7, 8]
    [after] = llm.make_requests({"prompt_token_ids": again}, GREEDY, [], None)
    outputs += serve(llm.engine.thread, [replace(after, follows=kept.id)])
    done = [output.outputs[0] for output in outputs]
    logprobs = [
        best.logprob for completion in done for token in completion.logprobs or () if token for best in token.values()
    ]
    assert len(logprobs) > 50
    greedy = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
    return Served([completion.token_ids for completion in done], logprobs, greedy)


@cache
def reference(name: str) -> Served:
    """Of one device, the second."""
    with tiny_llm(name, devices="1") as llm:
        weights = jax.tree.leaves(llm.params.layers[0])
        assert all(weight.devices() == {jax.devices()[1]} for weight in weights)
        assert not any(
            collectives(llm, *key)
            for key in (("embed", 1), layers_key("layers", 1, (0, 1), kinds_of(llm.model)), ("head", 1, 1))
        )
        return serve_everything(llm, "preserve", 0)


def collectives(llm: LLM, *key: object) -> list[str]:
    """What devices exchange in an executable."""
    return exchanges(llm.engine.setup.runner.executables[key])


def exchanges(executable: Any) -> list[str]:
    return re.findall(r"= (?:\S+|\(.+\)) (all-\w+|reduce-scatter|collective-\w+)\(", executable.as_text())


def check(name: str, num_devices: int, policies: tuple[str, ...]) -> None:
    expected, moved_tokens = reference(name), 0
    with tiny_llm(name, tensor_parallel_size=num_devices, lazy=False) as llm, closing(CompileCounter()) as compilations:
        for index, policy in enumerate(policies):
            served = serve_everything(llm, policy, index % 2)
            assert served.tokens == expected.tokens
            atol = 5e-4 if name == "qwen3_next" else 1e-4  # it norms what a convolution has almost cancelled
            np.testing.assert_allclose(served.logprobs, expected.logprobs, atol=atol)
            moved_tokens += llm.counters.recomputed + llm.counters.copied_out
        assert moved_tokens > 0, "the pool was never short"
        assert compilations.count == 0
        assert collectives(llm, "embed", 1) == ["all-reduce"]
        exchanged = collectives(llm, *layers_key("layers", 1, (0, 1), kinds_of(llm.model)))
        assert exchanged == ["all-reduce"] * {"gptj": 1, "nemotron_h_latent": 1, "olmo2": 3}.get(name, 2)
        assert collectives(llm, "head", 1, 1) == ["all-gather"]
        for key in (("sample", 4, "filtered"), ("shape", 4), ("logprobs", 4), ("gather", 4), ("scatter", 4)):
            assert collectives(llm, *key) == []
        if states_of(llm.model):
            for way in ("gather", "scatter"):
                assert collectives(llm, "states", (way, 1)) == []


@pytest.mark.parametrize(
    ("name", "num_devices", "policies"),
    [
        ("llama_gqa", 4, ("copy_ahead", "discard")),  # two KV heads on four devices
        pytest.param("gemma3", 2, ("copy_ahead", "discard"), marks=pytest.mark.slow),
        pytest.param("gemma4", 2, ("copy_ahead", "discard"), marks=pytest.mark.slow),
        pytest.param("gemma4", 4, ("min_waste", "swap"), marks=pytest.mark.slow),
        pytest.param("gemma4_moe", 2, ("min_waste", "discard"), marks=pytest.mark.slow),
        pytest.param("gemma4_moe", 4, ("copy_ahead", "swap"), marks=pytest.mark.slow),
        pytest.param("gemma4_e4b", 2, ("min_waste", "swap"), marks=pytest.mark.slow),
        pytest.param("gemma4_e2b", 4, ("copy_ahead", "discard"), marks=pytest.mark.slow),
        pytest.param("mixtral", 4, ("min_waste", "discard"), marks=pytest.mark.slow),
        pytest.param("qwen3_next", 2, ("copy_ahead", "discard"), marks=pytest.mark.slow),
        pytest.param("qwen3_next", 4, ("min_waste", "preserve"), marks=pytest.mark.slow),
        pytest.param("nemotron_h", 2, ("copy_ahead", "discard"), marks=pytest.mark.slow),
        pytest.param("nemotron_h", 4, ("min_waste", "swap"), marks=pytest.mark.slow),
        pytest.param("nemotron_h_latent", 4, ("copy_ahead", "discard"), marks=pytest.mark.slow),
        pytest.param("qwen3", 2, ("min_waste", "lru_host"), marks=pytest.mark.slow),
        pytest.param("olmo2", 4, ("min_waste", "swap"), marks=pytest.mark.slow),
        pytest.param("gptj", 8, ("improved_discard", "preserve"), marks=pytest.mark.slow),
    ],
)
def test_several_devices_write_what_one_writes(name: str, num_devices: int, policies: tuple[str, ...]) -> None:
    check(name, num_devices, policies)


def test_joined_weights_are_cut_as_those_that_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = reference("llama_gqa").greedy  # joined here or not, of one device
    for joined in {True, False} - {joins()}:  # the others write what one device writes, see above
        set_joined(monkeypatch, joined)
        with tiny_llm("llama_gqa", tensor_parallel_size=4) as llm:
            assert ("qkv" in llm.params.layers[0]) == joined
            assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_mxfp4", *EXPERTS])
def test_experts_are_cut_among_devices(name: str) -> None:
    def served(num_devices: int) -> tuple[list[int], int]:
        with tiny_llm(name, tensor_parallel_size=num_devices) as llm:
            return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids, llm.memory_plan.weight_bytes

    (alone, whole_bytes), (tokens, part_bytes) = served(1), served(4)  # six experts, so halves of experts
    assert tokens == alone
    assert part_bytes < 0.4 * whole_bytes
    mesh = ModelMesh(tuple(jax.devices()[:4]))
    read = load(GOLDEN / name, dtype="float32", mesh=mesh, quantization="none")
    fitted = initial_params(read.model, load(GOLDEN / name, dtype="float32", quantization="none").params, mesh)
    jax.tree.map(np.testing.assert_array_equal, read.params, fitted)


def test_quantised_weights_are_cut_by_blocks_and_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "m.gguf", kind="Q4_1", vocab_size=128)

    def served(num_devices: int) -> tuple[list[int], int]:
        flags = SIZES | {"max_num_seqs": 1, "max_num_batched_tokens": 4, "quantization": "gguf"}
        with LLM(tmp_path / "m.gguf", tokenizer=byte_level(), tensor_parallel_size=num_devices, **flags) as llm:
            assert ("qkv" in llm.params.layers[0]) == (num_devices > 1)
            return llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids, llm.memory_plan.weight_bytes

    set_joined(monkeypatch, False)
    alone, whole_bytes = served(1)
    set_joined(monkeypatch, True)
    tokens, part_bytes = served(4)  # k and v twice: two KV heads on four devices
    assert tokens == alone
    assert part_bytes < 0.3 * whole_bytes


def on_mesh(params: Params, mesh: Mesh) -> Params:
    """Weights cut along the last axis of a user's mesh."""
    axis = mesh.axis_names[-1]

    def place(leaf: Any, spec: PartitionSpec) -> jax.Array:
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*(axis if part else None for part in spec))))

    return jax.tree.map(place, params, partition_specs(params))


def pointers(params: Params) -> list[int]:
    leaves = jax.tree.leaves(params)
    return sorted(shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards)


def test_weights_that_lie_on_a_users_mesh_are_served_where_they_are() -> None:
    config = tiny_config("llama_gqa")
    loaded = load(config, load_format="dummy", dtype="float32")
    padded = load(config, load_format="dummy", dtype="float32", mesh=ModelMesh(tuple(jax.devices()[:2])))
    mesh = Mesh(np.array(jax.devices()[2:4]).reshape(1, 2), ("data", "model"))
    params = on_mesh(padded.params, mesh)
    with LLM(Model(config), params=params, mesh=mesh, tokenizer=byte_level(), **SIZES) as llm:
        assert pointers(llm.params) == pointers(params)
        before = llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        assert before == reference("llama_gqa").greedy
        assert str(llm.memory_plan).startswith("memory plan: on each of 2 devices ")
        llm.update_weights(jax.tree.map(lambda leaf: np.zeros(leaf.shape), loaded.params))
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == [0] * 8
        llm.update_weights(loaded.params)
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == before != [0] * 8
    with pytest.raises(ConfigError, match=r"only one axis of mesh may be longer than one; got .'data': 2, 'model': 2"):
        LLM(Model(config), params=params, mesh=jax.make_mesh((2, 2), ("data", "model")), **SIZES)


def test_weights_in_a_checkpoints_shapes_are_fitted_to_the_devices() -> None:
    model, mesh = Model(tiny_config("llama_gqa")), ModelMesh(tuple(jax.devices()[:4]))
    stored = load(model.config, load_format="dummy", dtype="float32").params
    fitted = initial_params(model.on_devices(4), stored, mesh)
    made = load(model.config, load_format="dummy", dtype="float32", mesh=mesh)
    assert (made.model.config.num_kv_heads, made.model.kv_repeats) == (4, 2)
    assert {shard.data.shape for shard in fitted.embed["embedding"].addressable_shards} == {(73, 32)}
    jax.tree.map(np.testing.assert_array_equal, fitted, made.params)


def test_a_checkpoint_is_read_in_pieces_to_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from jinfercept.models import load as loading

    set_joined(monkeypatch, False)
    whole = load(GOLDEN / "llama_gqa", dtype="float32").params
    monkeypatch.setattr(loading, "PIECE_BYTES", (1 << 10, 1 << 10))
    for count in (1, 2):
        parts = load(GOLDEN / "llama_gqa", dtype="float32", mesh=ModelMesh(tuple(jax.devices()[:count]))).params
        jax.tree.map(np.testing.assert_array_equal, parts, whole)
    four = load(GOLDEN / "llama_gqa", dtype="float32", mesh=ModelMesh(tuple(jax.devices()[:4]))).params
    for name in ("k", "v"):
        np.testing.assert_array_equal(four.layers[1][name], np.repeat(whole.layers[1][name], 2, axis=1))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            {"tensor_parallel_size": 9},
            "fewer devices; got tensor_parallel_size=9; JAX has 8, of platform cpu; fix: .*=9",
        ),
        ({"devices": "0,8"}, "JAX has no device of this number; got 0, 8; JAX has 8"),
        ({"devices": "0,0"}, "devices must be indices that differ; got '0,0'"),
        (
            {"devices": "0,1", "tensor_parallel_size": 4},
            "tensor_parallel_size differs from the number of devices; got 4 and devices=0,1",
        ),
        ({"tensor_parallel_size": 3}, "query heads do not divide evenly .* got 4 and .*=3; fix: .* of 1, 2, 4"),
        (
            {"tensor_parallel_size": 2, "mesh": Mesh(np.array(jax.devices()), ("x",))},
            "mesh cannot be combined with devices or tensor_parallel_size",
        ),
        ({"mesh": "tp"}, "mesh must be a jax.sharding.Mesh; got 'tp'"),
    ],
)
def test_devices_that_cannot_serve_are_refused_with_what_can(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(GOLDEN / "llama_gqa", **SIZES | flags)


def test_every_device_moves_its_own_part_of_states() -> None:
    run = check_random_moves(ModelMesh(tuple(jax.devices()[:4])), seed=1, num_steps=6)
    assert exchanges(run["gather", 1]) == exchanges(run["scatter", 1]) == []


@pytest.mark.slow
def test_a_layer_of_the_model_drafts_on_several_devices(tmp_path: Path) -> None:
    folder, work = with_draft_layer("qwen3_next", tmp_path / "model", agrees=True), Workload(number=8, seed=7)
    work.params[:] = [replace(params, max_tokens=24) for params in work.params]
    flags: dict[str, Any] = SIZES | {
        "pipeline_depth": 0,
        "profile": "roofline-llama-13b-a100",
        "num_states": 8,
        "speculative_config": DRAFTS,
    }
    tensors, streams_by_devices = load_file(folder / "model.safetensors"), list[list[list[int]]]()
    for num_devices in (1, 2, 4):
        with LLM(folder, tensor_parallel_size=num_devices, **flags) as llm:
            if num_devices == 1:
                llm.restart(speculative_config=None)
                streams_by_devices.append(streams(work.run(llm)))
                llm.restart(speculative_config=DRAFTS)
            streams_by_devices.append(streams(work.run(llm)))
            assert llm.counters.accepted.total() > 10
            llm.update_weights({"mtp.fc.weight": -tensors["mtp.fc.weight"]}, only="mtp.")
            streams_by_devices.append(streams(work.run(llm)))
            assert llm.counters.accepted.total() < 5
            llm.update_weights(tensors)
            streams_by_devices.append(streams(work.run(llm)))
            assert llm.counters.accepted.total() > 10
    assert all(tokens == streams_by_devices[0] for tokens in streams_by_devices)


@pytest.mark.slow
def test_an_assistant_drafts_on_several_devices(tmp_path: Path) -> None:
    (served, assistant), work = with_assistant(tmp_path), Workload(number=8, seed=7)
    work.params[:] = [replace(params, max_tokens=24) for params in work.params]
    drafts, expected = DRAFTS | {"model": str(assistant)}, list[list[int]]()
    flags: dict[str, Any] = SIZES | {"pipeline_depth": 0, "profile": "roofline-llama-13b-a100"}
    for num_devices in (1, 2, 4):
        with LLM(served, tensor_parallel_size=num_devices, speculative_config=drafts, **flags) as llm:
            if num_devices == 1:
                llm.restart(speculative_config=None)
                expected = streams(work.run(llm))
                llm.restart(speculative_config=drafts)
            assert streams(work.run(llm)) == expected
            assert llm.counters.accepted.total() > 10


def test_a_model_of_ones_own_runs_on_two_devices() -> None:
    import runpy

    example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "own_model.py"))
    model, params = example["make"]()
    for prompt, tokens in zip([[1, 2, 3], list(range(40))], example["main"](tensor_parallel_size=2), strict=True):
        stream = np.zeros(64, np.int32)
        stream[: len(prompt) + 16] = prompt + tokens
        rows = logits(model, params, stream)[len(prompt) - 1 : len(prompt) + 15]
        assert rows.argmax(axis=-1).tolist() == tokens

    class Uncut:
        config, embed, layer, head = model.config, model.embed, model.layer, model.head

    with pytest.raises(
        ConfigError, match=r"how several devices cut its weights; got Uncut without partition_specs\(\)"
    ):
        LLM(Uncut(), params=params, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="the KV heads do not divide evenly among the devices; got 2 on 4 devices"):
        LLM(model, params=params, tensor_parallel_size=4)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 4, 8])
@pytest.mark.parametrize("name", ["llama_gqa", "phi3", "gptj", "olmo2"])
def test_adapters_are_cut_as_their_weights_are(name: str, num_devices: int, tmp_path: Path) -> None:
    config, targets = tiny_config(name), GPTJ if name == "gptj" else ALL
    head, ffn = config.head_dim, config.ffn_size
    outputs = {
        "q_proj": config.num_heads * head,
        "k_proj": config.num_kv_heads * head,
        "v_proj": config.num_kv_heads * head,
    }
    outputs |= {"gate_proj": ffn, "up_proj": ffn, "fc_in": ffn}
    inputs = {"o_proj": config.num_heads * head, "out_proj": config.num_heads * head, "down_proj": ffn, "fc_out": ffn}
    layers = "transformer.h.{}.{}.{}.weight" if name == "gptj" else "model.layers.{}.{}.{}.weight"
    attention = ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj")
    shapes = {
        layers.format(i, ("attn" if name == "gptj" else "self_attn") if target in attention else "mlp", target): (
            outputs.get(target, config.hidden_size),
            inputs.get(target, config.hidden_size),
        )
        for i in range(config.num_layers)
        for target in targets
    }
    loras = {letter: write_adapter(tmp_path / letter, shapes, targets, seed=seed) for seed, letter in enumerate("ab")}

    def served(num_devices: int) -> list[list[int]]:
        with tiny_llm(name, tensor_parallel_size=num_devices, loras=loras, max_loras=3, seed=5) as llm:
            names = (None, "a", "b")
            made = llm.generate([PROMPT] * 3, GREEDY, lora=names)
            llm.load_lora("c", tmp_path / "b")
            made += llm.generate([PROMPT], GREEDY, lora="c")
            return [output.outputs[0].token_ids for output in made]

    alone = served(1)
    assert served(num_devices) == alone
    assert alone[2] == alone[3]
    assert len({*map(tuple, alone)}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"devices": "1"}, {"devices": "0,1", "tensor_parallel_size": 2}])
def test_new_weights_come_from_another_mesh(options: Any) -> None:
    tensors = load_file(GOLDEN / "llama_gqa" / "model.safetensors")
    sharding = NamedSharding(Mesh(np.array(jax.devices()[2:4]), ("fsdp",)), PartitionSpec("fsdp"))
    with LLM(tiny_setup(**options)) as llm:
        expected = llm.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY)[0].outputs[0].token_ids
        for mode in (None, "keep"):
            llm.update_weights({name: 2 * leaf[::-1] for name, leaf in tensors.items()}, mode=mode)
            given = jax.device_put(tensors, sharding)
            llm.update_weights(given, mode=mode)
            assert not any(leaf.is_deleted() for leaf in given.values())
            llm.reset_prefix_cache()
            assert llm.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY)[0].outputs[0].token_ids == expected


@pytest.mark.slow
def test_new_weights_of_several_devices_take_the_memory_of_a_block() -> None:
    sizes = {"vocab_size": 8192, "hidden_size": 128, "ffn_size": 256, "num_layers": 24, "head_dim": 16}
    config, mesh = replace(tiny_config("llama_gqa"), **sizes), ModelMesh(tuple(jax.devices()[:4]))
    loaded = load(config, load_format="dummy", dtype="float32", mesh=mesh)
    given = jax.tree.map(np.array, separate(loaded.params))
    params = jax.tree.map(jnp.zeros_like, loaded.params)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(given))
    largest = given.embed["embedding"].nbytes
    assert 0.15 * total < largest < 0.25 * total
    fsdp = NamedSharding(Mesh(np.array(jax.devices()[4:8]), ("fsdp",)), PartitionSpec("fsdp"))
    for source in (given, jax.device_put(given, fsdp), jax.tree.map(jnp.copy, loaded.params)):
        places, new = pointers(params), Replacement(loaded.model, source, shapes_of(params))
        old, rest = blocks_of(params), live_bytes()
        del params
        with watched() as peaks:
            params = new.write(old)
        assert max(peaks) - rest <= 1.1 * largest
        assert pointers(params) == places
        assert all(map(jnp.array_equal, *map(jax.tree.leaves, (params, loaded.params))))
