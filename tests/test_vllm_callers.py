"""What users of vLLM and transformers type works, or ends in an error that names what to type here."""

import logging
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jinfercept import (
    LLM,
    Call,
    ConfigError,
    Intercepted,
    JinferceptError,
    ModelError,
    RequestError,
    SamplingParams,
    ScriptedDetector,
    Tool,
)
from jinfercept.config import ALIASES, OPTIONS
from jinfercept.start.loading import as_tokenizer
from jinfercept.vllm_names import NAMES, own_options
from tests.support.engine_state import engine_state
from tests.support.sample_tokenizers import byte_level
from tests.support.scripted_model import Make
from tests.support.tiny_model import GOLDEN

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{{ '<s>a: ' if add_generation_prompt }}"
)
SHORT = SamplingParams(max_tokens=4, temperature=0)
QUESTION = [{"role": "user", "content": "hi"}]


def own(**options: Any) -> dict[str, Any]:
    return own_options(options, OPTIONS, ALIASES)[0]


# -- the constructor ---------------------------------------------------------------------------------------------------


def test_every_flag_of_vllm_that_serve_takes_is_an_argument_of_an_llm() -> None:
    for flag, (_, *values) in NAMES["unneeded"].items():
        name = flag.removeprefix("--").replace("-", "_")
        for value in (None, *(("anything", {}, 3) if values == ["*"] else values or (True, False))):
            assert own(**{name: value}) == {}
    assert own(pipeline_parallel_size=1, cpu_offload_gb=0, data_parallel_size=np.int64(1)) == {}
    assert own(block_size=32, enable_chunked_prefill=True) == {"page_size": 32, "chunked_prefill": True}
    assert own(seed=None, quantization=None, max_model_len=None, block_size=None, dtype=None) == {}


@pytest.mark.parametrize(
    ("dtype", "ours"),
    [
        *(("half", "bfloat16"), ("float16", "bfloat16"), (jnp.bfloat16, "bfloat16"), ("float", "float32")),
        *((np.float32, "float32"), (np.dtype("float32"), "float32"), (jnp.float32, "float32"), ("auto", "auto")),
    ],
)
def test_a_dtype_has_any_of_its_names(dtype: Any, ours: str) -> None:
    assert own(dtype=dtype) == {"dtype": ours}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pipeline_parallel_size": 2},
            "every device has all layers; got pipeline_parallel_size=2; fix: leave it out, or give 1",
        ),
        ({"task": "embed"}, "give auto or generate"),
        ({"trust_remote_code": "yes"}, "give False or True"),
        (
            {"num_gpu_blocks_override": 9},
            "this option has another name in jinfercept; got num_gpu_blocks_override; fix: kv_tokens, in tokens",
        ),
        ({"revision": "main"}, "owner/name@revision"),
        ({"block_size": 16, "page_size": 32}, "by two names"),
        ({"dtype": "int3"}, "dtype is one of"),
        ({"dtype": 3}, "dtype is one of"),
        ({"kv_tokens": np.float32(2.5)}, "kv_tokens has the wrong type; got 2.5"),
        ({"enable_eplb": True}, "no such option"),
        ({"tokenizer": "no/such/directory/here"}, "no such tokenizer; got no/such/directory/here"),
        ({"tokenizer": GOLDEN / "llama_gqa"}, "the directory has no tokenizer"),
        ({"tokenizer": 3}, "this is not a tokenizer; got 3"),
    ],
)
def test_an_option_that_asks_for_something_else_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ModelError), match=re.escape(message)):
        LLM(GOLDEN / "llama_gqa", **options)


def test_an_llm_takes_the_arguments_of_vllm_and_a_tokenizer_by_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    byte_level().save(tmp_path)
    caplog.set_level(logging.INFO, "jinfercept")
    options: dict[str, Any] = {"trust_remote_code": True, "enforce_eager": True, "quantization": None, "dtype": "float"}
    options |= {
        "block_size": 4,
        "kv_tokens": np.int64(64),
        "max_num_seqs": 2,
        "max_num_batched_tokens": 8,
        "seed": None,
    }
    profile = "paper-gptj-6b-a100"
    with LLM(GOLDEN / "llama_gqa", tokenizer=str(tmp_path), profile=profile, lazy=True, **options) as llm:
        assert llm.tokenizer is not None
        assert llm.tokenizer.encode("abc") == byte_level().encode("abc")
        assert repr(llm) == (
            f"LLM('{GOLDEN}/llama_gqa', dtype='float32', kv_tokens=64, max_model_len=64, policy='copy_ahead')"
        )
        with pytest.raises(RequestError, match="an LLM cannot be copied"):
            pickle.dumps(llm)
    assert repr(llm).endswith("closed)")
    noted = [record.getMessage() for record in caplog.records]
    assert "trust_remote_code is not needed: code from a model's repository is never run" in noted
    assert "dtype='float' is dtype='float32' here" in noted


# -- prompts and parameters --------------------------------------------------------------------------------------------


def test_token_ids_are_prompts_in_every_form_that_users_have_them(make_scripted: Make) -> None:
    llm, ids = make_scripted(None).llm, [1, 2, 3]
    for prompt in (ids, tuple(ids), np.array(ids), jnp.array(ids), [np.int64(1), 2, np.int32(3)], range(1, 4)):
        [output] = llm.generate(prompt, SHORT)
        assert output.prompt_token_ids == ids
    for prompts in ([ids, [7]], [np.array(ids), (7,)], ({"prompt_token_ids": np.array(ids)}, [7]), iter([ids, [7]])):
        assert [output.prompt_token_ids for output in llm.generate(prompts, SHORT)] == [ids, [7]]
    assert [output.prompt_token_ids for output in llm.generate(np.array([ids, ids]), SHORT)] == [ids, ids]
    assert all(type(token) is int for token in llm.generate(np.array(ids), SHORT)[0].prompt_token_ids)
    [text] = llm.generate(prompts={"prompt": "abc"}, sampling_params=SHORT, use_tqdm=False, lora_request=None)
    assert text.prompt == "abc"
    with llm.stream(np.array(ids), SHORT) as events:
        assert list(events)
    assert llm.generate([], SHORT) == llm.generate(np.array([]), SHORT) == []


def test_numbers_of_other_libraries_are_stored_as_pythons() -> None:
    given: dict[str, Any] = {
        "temperature": (np.float32(0.5), 0.5),
        "top_p": (jnp.float32(0.5), 0.5),
        "max_tokens": (np.int64(4), 4),
        "seed": (jnp.int32(3), 3),
        "ignore_eos": (np.bool_(True), True),
        "stop_token_ids": (np.array([1, 2]), [1, 2]),
        "allowed_token_ids": ([np.int64(3)], [3]),
        "bad_words_token_ids": (np.array([[1, 2]]), [[1, 2]]),
        "logit_bias": ({np.int64(3): np.float32(1)}, {3: 1.0}),
    }
    params, same = (SamplingParams(**{name: values[i] for name, values in given.items()}) for i in (0, 1))
    assert repr(params) == repr(same)


def test_sampling_parameters_are_given_by_name() -> None:
    for error in (RequestError, TypeError):
        with pytest.raises(error, match="by name"):
            SamplingParams(1)  # pyright: ignore[reportCallIssue]
    for name, fix in NAMES["renamed_sampling"].items():
        given: dict[str, Any] = {name: 1}
        with pytest.raises(TypeError, match=re.escape(f"got {name}; fix: {fix}")):
            SamplingParams(**given)
    with pytest.raises(RequestError, match="did you mean 'temperature'"):
        SamplingParams(temprature=1)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("generate", {"prompt_token_ids": [[1]]}, "fix: prompts"),
        ("generate", {"max_new_tokens": 3}, "fix: in SamplingParams: max_tokens"),
        ("generate", {"temperature": 0}, "fix: SamplingParams(temperature=…)"),
        ("generate", {"lora_request": object()}, "an adapter is named by lora="),
        ("generate", {"tool": []}, "got tool (did you mean 'tools'?)"),
        (
            "generate",
            {"sampling_params": {"temperature": 0}},
            "sampling_params are SamplingParams; got {'temperature': 0}",
        ),
        ("generate", {"sampling_params": 3}, "sampling_params are SamplingParams; got 3"),
        ("chat", {"continue_final_message": True}, "a message of its own"),
        ("chat", {"max_new_tokens": 3}, "fix: in SamplingParams: max_tokens"),
        ("chat", {"enable_thinking": False}, "chat_template_kwargs"),
        ("stream", {"tool_choise": "none"}, "did you mean 'tool_choice'"),
        ("stream", {"tool_choice": "none"}, "chat options need messages"),
    ],
)
def test_an_argument_that_there_is_not_is_refused_with_the_one_that_does_it(
    make_scripted: Make, method: str, arguments: dict[str, Any], message: str
) -> None:
    llm = make_scripted(TEMPLATE).llm
    with pytest.raises(RequestError, match=re.escape(message)):
        getattr(llm, method)(QUESTION if method == "chat" else "hi", **arguments)
    assert not engine_state(llm).has_work


# -- methods -----------------------------------------------------------------------------------------------------------


def test_a_chat_takes_the_arguments_of_vllm(make_scripted: Make) -> None:
    llm = make_scripted(TEMPLATE).llm
    [output] = llm.chat(messages=QUESTION, sampling_params=SHORT, tools=None, use_tqdm=True, lora_request=None,
                        chat_template=None, chat_template_content_format="auto", add_generation_prompt=True,
                        continue_final_message=False, chat_template_kwargs=None, mm_processor_kwargs=None)  # fmt: skip
    assert output.prompt == "<s>user: hi</s><s>a: "


def test_the_tokenizer_is_one_of_transformers(make_scripted: Make) -> None:
    scripted = make_scripted(TEMPLATE)
    tokenizer = scripted.llm.get_tokenizer()
    ids = scripted.tokenizer.encode("abc</s>")
    assert tokenizer.encode("abc</s>") == tokenizer(["abc</s>"])["input_ids"][0] == ids
    assert (tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=True)) == ("abc</s>", "abc")
    assert (tokenizer.eos_token, tokenizer.vocab_size) == ("</s>", 256)
    assert len(tokenizer) == scripted.tokenizer.vocab_size
    text: Any = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    assert text == scripted.tokenizer.apply_chat_template(QUESTION) == "<s>user: hi</s><s>a: "
    assert as_tokenizer(tokenizer).encode(text) == as_tokenizer(tokenizer.backend_tokenizer).encode(text)
    assert as_tokenizer(tokenizer).encode(text) == scripted.tokenizer.encode(text)
    scripted.llm.tokenizer = None
    with pytest.raises(ModelError, match=r"no tokenizer; got scripted; fix: LLM\(…, tokenizer=…\)"):
        scripted.llm.get_tokenizer()


def test_the_prefix_cache_is_dropped_for_those_who_have_finished(make_scripted: Make) -> None:
    llm, prompt = make_scripted(None).llm, list(range(100))
    llm.generate(prompt, SHORT)
    assert llm.generate(prompt, SHORT)[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, SHORT)[0].num_cached_tokens == 0
    answer = threading.Event()
    tool, detector = Tool(lambda text: str(answer.wait()), name="slow"), ScriptedDetector({2: [Call("slow", "")]})
    with llm.stream([5] * 100, SHORT, tools=[tool], detector=detector) as events:
        next(event for event in events if isinstance(event, Intercepted))
        assert not llm.reset_prefix_cache()
        assert llm.generate(prompt, SHORT)[0].num_cached_tokens == 0
        answer.set()
        assert list(events)
    llm.engine.check_pages()


def test_a_name_that_an_llm_has_not_is_an_error_that_says_which_it_has(make_scripted: Make) -> None:
    llm = make_scripted(None).llm
    for name, fix in NAMES["attributes"].items():
        assert not hasattr(llm, name)
        for error in (AttributeError, RequestError):
            with pytest.raises(error, match=re.escape(f"got {name}; fix: {fix}")):
                getattr(llm, name)
    with pytest.raises(JinferceptError, match="did you mean 'generate'"):
        llm.genrate  # noqa: B018  # pyright: ignore
    assert type(llm).shutdown is type(llm).close


def test_the_page_names_everything_that_has_another_name_here() -> None:
    page = (Path(__file__).parents[1] / "docs" / "migration.md").read_text(encoding="utf-8")
    table = page.split("Other names are refused")[1].split("## Endpoints")[0]
    names = [name for row in re.findall(r"^\| (`.+?`) \|", table, re.M) for name in re.findall(r"`(\w+)`", row)]
    assert set(names) == NAMES["attributes"].keys() | NAMES["renamed_calls"].keys() | NAMES["renamed_sampling"].keys()
    assert len(names) == len(set(names))


# -- what strangers type -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: llm.generate("a", SHORT, detector=ScriptedDetector(None)),  # pyright: ignore
            "a script must map numbers of tokens to lists of calls",
        ),
        # pyright: ignore
        (lambda llm: llm.generate(["a", None], SHORT), "a prompt is a text or a list"),
        (lambda llm: llm.generate([[1], [[2]]], SHORT), "prompt_token_ids are whole numbers"),
        (lambda llm: llm.generate({"input_ids": [1], "attention_mask": [1]}, SHORT), "a prompt has unknown keys"),
        (lambda llm: llm.stream(["a", "b"], SHORT), "prompt_token_ids are whole numbers"),
        (lambda llm: llm.chat(QUESTION, SHORT, tool_call_parser=["hermes"]), "tool_call_parser is a name"),
        (lambda llm: llm.chat(QUESTION, SHORT, max_prompt_chars="9"), "max_prompt_chars is a whole number"),
        (lambda llm: llm.tokenizer.encode(None), "a text is a string; got None"),
        (lambda llm: llm.tokenizer.decode("abc"), "token ids are whole numbers; got 'abc'"),
        (lambda llm: Tool(str, name=3), "a tool's name must be a text other than <reader>; got 3"),  # pyright: ignore
        # pyright: ignore
        (lambda llm: LLM(GOLDEN / "llama_gqa", profile="\ud800"), "no such profile"),
        (lambda llm: LLM(GOLDEN / "llama_gqa", tensor_parallel_size=10**30), "JAX has fewer devices"),
    ],
)
def test_a_mistake_that_is_easily_made_is_named(make_scripted: Make, call: Any, message: str) -> None:
    llm = make_scripted(TEMPLATE).llm
    with pytest.raises(JinferceptError, match=re.escape(message)):
        call(llm)
    assert not engine_state(llm).has_work


def test_what_programs_hand_on_from_one_call_to_the_next_is_taken(make_scripted: Make) -> None:
    llm = make_scripted(TEMPLATE).llm
    message = {
        "role": "assistant",
        "content": "hi",
        "tool_calls": None,
        "reasoning_content": None,
    }  # as OpenAI's client dumps it
    [output] = llm.chat([*QUESTION, message], SHORT)
    assert output.prompt == "<s>user: hi</s><s>assistant: hi</s><s>a: "
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(np.array(output.prompt_token_ids), skip_special_tokens=False) == output.prompt
    [salted] = llm.generate({"prompt": "a", "cache_salt": "\ud800"}, SHORT)
    assert salted.outputs[0].finish_reason == "length"
