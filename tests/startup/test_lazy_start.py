"""A lazy start: executables are compiled by the steps that need them, with the tokens of a start that compiles all."""

from pathlib import Path

from jinfercept import LLM, SamplingParams
from jinfercept.sched.profile import PROFILES
from tests.support.tiny_model import GOLDEN

FLAGS = {"dtype": "float32", "kv_tokens": 256, "max_num_seqs": 2, "max_num_batched_tokens": 32, "page_size": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": list(range(4, 40))}]


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS)]


def test_a_lazy_start_compiles_what_steps_need_and_writes_the_same_tokens() -> None:
    profile = PROFILES["paper-gptj-6b-a100"]
    with LLM(GOLDEN / "llama_gqa", profile=profile, **FLAGS) as llm:
        expected, times = tokens(llm), llm.start_times
    assert times.num_pending == 0
    with LLM(GOLDEN / "llama_gqa", profile=profile, lazy=True, **FLAGS) as llm:
        executables = llm.engine.setup.machine.runner.executables
        assert executables.num_pending == llm.start_times.num_pending > 10
        assert f"{executables.num_pending} left for the steps that need them" in str(llm.start_times)
        llm.engine.warm_up_behind()
        assert tokens(llm) == expected
    with LLM(GOLDEN / "llama_gqa", profile=profile, lazy=True, **FLAGS) as llm:
        assert tokens(llm) == expected
        assert 0 < llm.engine.setup.machine.runner.executables.num_pending < llm.start_times.num_pending
        llm.restart()
        assert tokens(llm) == expected


def test_a_profile_is_measured_with_everything_compiled_and_remembered_for_lazy_starts(cache: Path) -> None:
    with LLM(GOLDEN / "llama_gqa", lazy=True, **FLAGS) as llm:
        assert (llm.start_times.num_pending, llm.start_times.profile) == (0, "measured")
        profile = llm.profile
    with LLM(GOLDEN / "llama_gqa", lazy=True, **FLAGS) as llm:
        assert (llm.start_times.num_pending > 10, llm.start_times.profile) == (True, "remembered")
        assert llm.profile == profile
