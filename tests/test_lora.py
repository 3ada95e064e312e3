"""Adapters: tokens are those of merged weights, whatever a step mixes and whatever becomes of contexts."""

import runpy
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jinfercept.calls import Call, Tool
from jinfercept.chat.detector import ScriptedDetector
from jinfercept.engine.adapter_table import AdapterTable
from jinfercept.engine.streaming import serve
from jinfercept.errors import ConfigError, ModelError, RequestError
from jinfercept.events import Token
from jinfercept.llm import LLM
from jinfercept.models.load import load
from jinfercept.outputs import RequestOutput
from jinfercept.request import FollowUp
from jinfercept.sampling_params import SamplingParams
from jinfercept.start.backend import CompileCounter
from tests.support.fake_engine import sampled_policies
from tests.support.peft_adapters import ALL, ATTENTION, GPTJ, PHI, matrices, merged, shapes_of, write_adapter
from tests.support.sample_tokenizers import byte_level
from tests.support.tiny_model import GOLDEN, TOOL, Workload, set_joined, streams, tiny_llm

pytestmark = pytest.mark.usefixtures("every_step_takes_a_second")

NAME, FILE = "llama_gqa", "adapter_model.safetensors"
EXAMPLE = Path(__file__).parent.parent / "examples" / "own_model.py"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [
    {"prompt_token_ids": np.random.default_rng(seed).integers(0, 100, 5 + 4 * seed).tolist()} for seed in range(3)
]
SMALL = {"kv_tokens": 112, "max_model_len": 100, "swap_space": 0.001}
LORAS = (None, "a", "b", "c")
FAMILIES: dict[str, Sequence[str]] = {
    "phi3": PHI,
    "gptj": GPTJ,
    "gemma2": ALL,
    "qwen2": ALL,
    "olmo2": ALL,
    "granite": ALL,
    "gemma3": ALL,
    "gemma4": ALL,
    "gemma4_e2b": ALL,
    "smollm3": ATTENTION,
    "mixtral": ATTENTION,
    "gpt_oss": ATTENTION,
    "qwen3_moe_mixed": ATTENTION,
    "qwen3_next": (*ATTENTION, "out_proj", "shared_expert.up_proj", "shared_expert.down_proj"),
    "nemotron_h": ("q_proj", "v_proj", "o_proj", "out_proj", "mixer.up_proj", "shared_experts.down_proj"),
}
QUICK = ("phi3",)


def adapters(folder: Path, name: str = NAME, targets: Sequence[str] = ALL, names: str = "abc") -> dict[str, Path]:
    """Adapters of different ranks."""
    return {
        letter: write_adapter(
            folder / f"{name}-{letter}", shapes_of(GOLDEN / name), targets, rank=2 + place, seed=place
        )
        for place, letter in enumerate(names)
    }


def mixed(llm: LLM, loras: Sequence[str | None] = LORAS) -> list[list[int]]:
    """All prompts by every adapter, in the same steps."""
    names = [name for name in loras for _ in PROMPTS]
    return streams(llm.generate(PROMPTS * len(loras), GREEDY, lora=names))


def of_merged(folder: Path, written: dict[str, Path], name: str = NAME) -> list[list[int]]:
    """The same by the model, and by models with merged weights."""
    places = [
        GOLDEN / name,
        *(merged(GOLDEN / name, path, folder / f"merged-{path.name}") for path in written.values()),
    ]
    made = list[list[int]]()
    for place in places:
        with tiny_llm(str(place)) as llm:
            made += streams(llm.generate(PROMPTS, GREEDY))
    return made


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def llm(written: dict[str, Path]) -> Iterator[LLM]:
    """A model with three adapters, and room for two more."""
    with tiny_llm(
        loras=written, max_loras=5, max_lora_rank=6, tool_lora="b", tokenizer=byte_level(), kv_tokens=2048
    ) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _as_at_the_start(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "llm" in request.fixturenames:
        llm: LLM = request.getfixturevalue("llm")
        for name in set(llm.loras) - {"a", "b", "c"}:
            llm.unload_lora(name)
        llm.reset_prefix_cache()


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_tokens_are_those_of_merged_weights_in_a_step_of_several_adapters_and_none(
    llm: LLM, written: dict[str, Path], tmp_path: Path
) -> None:
    expected = of_merged(tmp_path, written)
    assert mixed(llm) == expected
    assert len({tuple(tokens) for tokens in expected}) == len(expected)


@pytest.mark.parametrize("joined", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_has_the_tokens_of_merged_weights(
    name: str, joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_joined(monkeypatch, joined)
    written = adapters(tmp_path, name, FAMILIES[name], "ab")
    with tiny_llm(name, loras=written) as llm:
        made = mixed(llm, (None, "a", "b"))
    assert made == of_merged(tmp_path, written, name)


@pytest.mark.parametrize(
    "targets", [("q_proj", "v_proj", "gate_proj"), *(pytest.param((name,), marks=pytest.mark.slow) for name in ALL)]
)
@pytest.mark.parametrize("joined", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_some_modules_of_a_joined_weight_may_have_adapters(
    targets: Sequence[str], joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_joined(monkeypatch, joined)
    written = adapters(tmp_path, NAME, targets, "a")
    with tiny_llm(loras=written) as llm:
        assert mixed(llm, (None, "a")) == of_merged(tmp_path, written)


@pytest.fixture(scope="module")
def small(written: dict[str, Path]) -> Iterator[LLM]:
    with tiny_llm(loras=written, **SMALL) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(small: LLM) -> tuple[list[list[int]], list[list[int]]]:
    """Requests with calls and adapters, one after the other, for each of which the pool is large enough."""
    small.restart(policy="preserve", pipeline_depth=0, enable_prefix_caching=False)
    alone = served(small, together=False), served(small, shift=1, together=False)
    assert not small.counters.copied_out
    small.restart(enable_prefix_caching=True)
    return alone


def served(llm: LLM, shift: int = 0, *, together: bool = True) -> list[list[int]]:
    work = Workload(number=10, seed=7)
    names = [LORAS[(place + shift) % len(LORAS)] for place in range(10)]
    options: dict[str, Any] = {"tools": [Tool(TOOL.function, name="scripted")]}
    if together:
        return streams(llm.generate(work.prompts, work.params, detector=work.detectors, lora=names, **options))
    each = zip(work.prompts, work.params, work.detectors, names, strict=True)
    return [
        streams(llm.generate([prompt], params, detector=detector, lora=name, **options))[0]
        for prompt, params, detector, name in each
    ]


@pytest.mark.parametrize(("number", "policy"), sampled_policies())
def test_every_policy_gives_the_tokens_of_the_uninterrupted_run(
    small: LLM, reference: tuple[list[list[int]], list[list[int]]], number: int, policy: str
) -> None:
    small.restart(policy=policy, pipeline_depth=number % 2, max_chunk_tokens=(None, 3, 7)[number % 3])
    assert served(small) == reference[0]
    assert served(small, shift=1) == reference[1]  # the same prompts by other adapters
    assert small.counters.interceptions > 0


def test_drafts_are_verified_by_the_adapter(small: LLM, written: dict[str, Path], reference: Any) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    with tiny_llm(loras=written, speculative_config=drafts, **SMALL) as llm:
        assert served(llm) == reference[0]
        assert llm.counters.drafted > 0


# -- contexts ----------------------------------------------------------------------------------------------------------


def cached(llm: LLM, lora: str | None) -> int | None:
    [output] = llm.generate([{"prompt_token_ids": list(range(40))}], GREEDY, lora=lora)
    return output.num_cached_tokens


def test_a_prefix_belongs_to_its_adapter(llm: LLM, written: dict[str, Path]) -> None:
    assert [cached(llm, name) for name in (None, "a", "b")] == [0, 0, 0]
    assert [cached(llm, name) for name in (None, "a", "b")] == [36, 36, 36]
    llm.load_lora("same as a", written["a"])
    assert cached(llm, "same as a") == 36, "the numbers count, not the name"


def test_a_prefix_on_disk_belongs_to_its_adapter(written: dict[str, Path], tmp_path: Path) -> None:
    flags: dict[str, Any] = {
        "kv_tokens": 160,
        "swap_space": 0.001,
        "kv_disk": str(tmp_path / "kv"),
        "kv_disk_space": 0.01,
        "max_loras": 2,
        "max_lora_rank": 3,
    }

    def restored(loras: dict[str, Path], *names: str | None) -> list[int | None]:
        """Prompt tokens whose KV a new engine finds."""
        with tiny_llm(loras=loras, **flags) as llm:
            made = [llm.make_requests([list(range(70))], GREEDY, None, None, lora=name)[0] for name in names]
            outputs = [serve(llm.engine.thread, [replace(request, follow_up=FollowUp())])[0] for request in made]
            return [output.num_cached_tokens for output in outputs]

    assert restored({"a": written["a"]}, "a", None) == [0, 0]
    assert restored({"other": written["a"], "a": written["b"]}, "other", "a", None) == [68, 0, 68]


# -- loaded and unloaded -----------------------------------------------------------------------------------------------


def test_adapters_are_loaded_and_unloaded_while_requests_run_and_nothing_is_compiled(
    llm: LLM, written: dict[str, Path], tmp_path: Path
) -> None:
    expected = mixed(llm)
    later = adapters(tmp_path, NAME, ATTENTION, "de")
    alone = [mixed_alone(llm, "d", later["d"]), mixed_alone(llm, "e", later["e"])]
    with closing(CompileCounter()) as compilations:
        for _ in range(2):
            for name, tokens in zip("de", alone, strict=True):
                llm.load_lora(name, later[name])
                assert mixed(llm, (*LORAS, name)) == expected + tokens
            for name in "de":
                llm.unload_lora(name)
    assert compilations.count == 0
    assert llm.loras == {name: str(path) for name, path in written.items()}


def mixed_alone(llm: LLM, name: str, directory: Path) -> list[list[int]]:
    llm.load_lora(name, directory)
    try:
        return mixed(llm, (name,))
    finally:
        llm.unload_lora(name)


def test_a_paused_request_keeps_its_adapter_whatever_is_loaded_in_its_place(
    llm: LLM, written: dict[str, Path], tmp_path: Path
) -> None:
    paused, go_on = threading.Event(), threading.Event()

    def wait(argument: str) -> list[int]:
        paused.set()
        assert go_on.wait(60)
        return [3, 4]

    def run() -> list[RequestOutput]:
        return llm.generate(PROMPTS[:1], GREEDY, tools=[Tool(wait, name="wait")], detector=CALL, lora="d")

    llm.load_lora("d", written["b"])
    go_on.set()
    expected = streams(run())
    go_on.clear()
    paused.clear()
    outputs = list[RequestOutput]()
    thread = threading.Thread(target=lambda: outputs.extend(run()))
    thread.start()
    assert paused.wait(60)
    llm.load_lora("d", written["c"], in_place=True)
    llm.unload_lora("d")
    llm.load_lora("more", written["a"])
    with pytest.raises(ConfigError, match="4 of 5, and 1 whose requests have not ended"):
        llm.load_lora("too many", written["a"])
    go_on.set()
    thread.join(60)
    assert streams(outputs) == expected
    llm.load_lora("d", written["c"])
    assert mixed(llm, ("d",)) == mixed(llm, ("c",))


CALL = ScriptedDetector({4: [Call("wait", "")]})


def test_numbers_of_an_adapter_that_become_infinite_reach_no_row_of_another(
    llm: LLM, written: dict[str, Path], tmp_path: Path
) -> None:
    expected = mixed(llm)
    giant = write_adapter(tmp_path / "giant", shapes_of(GOLDEN / NAME))
    tensors = matrices(giant)
    save_file({name: np.full_like(tensor, 3e38) for name, tensor in tensors.items()}, giant / FILE)
    with pytest.raises(ModelError, match=r"too large for the model's type; got inf in float32"):
        llm.load_lora("d", giant)
    sizes = {"A": 3e38, "B": 1.0}
    save_file({name: np.full_like(tensor, sizes[name[-8]]) for name, tensor in tensors.items()}, giant / FILE)
    llm.load_lora("d", giant)
    assert mixed(llm) == expected
    names = [name for name in LORAS for _ in PROMPTS]
    *others, own = llm.generate([*PROMPTS * len(LORAS), PROMPTS[0]], GREEDY, lora=[*names, "d"])
    assert streams(others) == expected
    failure = "FloatingPointError: the model's logits with the adapter 'd' are NaN or infinite; fix: "
    assert f"{own.outputs[0].stop_reason}".startswith(failure)
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0)
    assert f"{llm.generate(PROMPTS[0], scored, lora='d')[0].outputs[0].stop_reason}".startswith(failure)


def test_two_loads_of_one_name_at_once_are_not_both_done() -> None:
    table = AdapterTable(3)
    with table.new_slot("a") as first:
        with pytest.raises(ConfigError, match="an adapter already has this name; got a"), table.new_slot("a"):
            pass
        with table.new_slot("a", replace=True) as second:
            assert first != second
    with table.new_slot("a") as slot:
        assert slot == first


def test_a_request_that_was_made_for_an_adapter_of_before_is_refused(llm: LLM, written: dict[str, Path]) -> None:
    llm.load_lora("d", written["a"])
    [request] = llm.make_requests(PROMPTS[0], GREEDY, None, None, lora="d")
    llm.load_lora("d", written["b"], in_place=True)
    with pytest.raises(RequestError, match="unloaded or replaced; got d"):
        serve(llm.engine.thread, [request])
    with pytest.raises(ConfigError, match="has this name"):
        llm.load_lora("d", written["c"])


def test_weights_are_replaced_under_their_adapters(written: dict[str, Path], tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "x", shapes_of(GOLDEN / NAME), seed=9)
    replaced = merged(GOLDEN / NAME, other, tmp_path / "base")
    with tiny_llm(str(replaced), loras={"a": written["a"]}) as llm:
        expected = mixed(llm, (None, "a"))
    with tiny_llm(loras={"a": written["a"]}) as llm:
        assert mixed(llm, (None, "a")) != expected
        llm.update_weights(load(replaced, dtype="float32").params)
        assert mixed(llm, (None, "a")) == expected
        llm.restart(policy="discard")
        assert mixed(llm, (None, "a")) == expected


# -- who has which -----------------------------------------------------------------------------------------------------


def test_a_chat_names_its_adapter_and_one_with_tools_may_have_one_by_default(llm: LLM) -> None:
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    question = [{"role": "user", "content": "1 + 1?"}]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}<tool_call>{% endif %}"
    options: Any = {"chat_template": template, "tool_call_parser": "hermes"}

    def adapter(tools: Any, **more: Any) -> str | None:
        [request] = llm.make_chats([question], GREEDY, tools, options | more)
        return None if request.adapter is None else request.adapter.name

    assert [adapter((), lora=name) for name in (None, "a", "")] == [None, "a", None]
    assert [adapter([add], lora=name) for name in (None, "a", "")] == ["b", "a", None]
    events = list(llm.stream(PROMPTS[0]["prompt_token_ids"], GREEDY, lora="a"))
    [same] = llm.generate(PROMPTS[:1], GREEDY, lora="a")
    assert [event.token_id for event in events if isinstance(event, Token)] == same.outputs[0].token_ids


def test_mistakes_say_what_is_there(llm: LLM, written: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no such adapter; got aa.*one of a, b, c"):
        llm.generate(PROMPTS, GREEDY, lora="aa")
    with pytest.raises(RequestError, match="lora has one entry for each prompt"):
        llm.generate(PROMPTS, GREEDY, lora=["a"])
    with pytest.raises(RequestError, match="no such adapter"):
        llm.unload_lora("z")
    with pytest.raises(ModelError, match="room for 6; fix: max_lora_rank=9"):
        llm.load_lora("z", write_adapter(tmp_path / "z", shapes_of(GOLDEN / NAME), rank=9))
    with tiny_llm(loras={"a": adapters(tmp_path, NAME, ("q_proj",), "a")["a"]}) as few:
        with pytest.raises(
            ConfigError, match=r"no room; got down, .*room for 1 of rank 2 for q; fix: start with max_loras"
        ):
            few.load_lora("b", written["a"], in_place=True)
        with pytest.raises(ConfigError, match="every slot for adapters is in use; got 1 of 1"):
            few.load_lora("b", tmp_path / f"{NAME}-a")


def test_a_model_of_ones_own_has_no_adapters(written: dict[str, Path]) -> None:
    model, params = runpy.run_path(str(EXAMPLE))["make"]()
    with pytest.raises(ConfigError, match="a model of your own cannot have adapters"):
        LLM(model, params=params, loras=written)


def test_adapters_are_part_of_the_memory_plan(llm: LLM) -> None:
    with tiny_llm() as plain:
        trees = [each.params for each in (llm, plain)]
        ours, without = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for tree in trees)
        assert ours > without
        assert llm.memory_plan.weight_bytes == plain.memory_plan.weight_bytes + ours - without
