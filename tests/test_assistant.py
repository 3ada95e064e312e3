"""Drafts of an assistant of Gemma 4: those of transformers, the same tokens as without drafts, and refusals."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jinfercept.errors import ConfigError, ModelError
from jinfercept.llm import LLM
from jinfercept.models.gemma4 import fitted
from jinfercept.models.load import load, read_config
from jinfercept.runner.draft_layer import Assistant
from jinfercept.runner.runner import ModelRunner
from jinfercept.runner.shape import RunnerShape
from jinfercept.sched.plan import GREEDY, Chunk, DraftPlan, NewPages, StepPlan, WindowEntries
from jinfercept.start.start import set_up
from tests.support.draft_checkpoint import with_assistant
from tests.support.tiny_model import GOLDEN, Workload, streams, tiny_llm

NUM_DRAFTS, SIZE = 3, 4


@pytest.mark.parametrize("name", [pytest.param("gemma4", marks=pytest.mark.slow), "gemma4_e2b"])
def test_an_assistant_drafts_what_that_of_transformers_does(name: str) -> None:
    """Behind every token of two sequences side by side, of which one begins in two chunks."""
    served, draft = load(GOLDEN / name, dtype="float32"), load(GOLDEN / f"{name}_assistant", dtype="float32")
    assistant = Assistant(replace(draft.model, config=fitted(draft.model.config, served.model.config)), draft.params)
    shape = RunnerShape(
        num_pages=40, page_size=SIZE, max_num_seqs=2, max_model_len=64, buckets=(8,), layers_per_step=2,
        num_drafts=NUM_DRAFTS, is_assisted=True, num_window_pages=40,
    )  # fmt: skip
    runner = ModelRunner(served.model, served.params, shape, assistant=assistant)
    runner.reset()
    tokens, golden = np.load(GOLDEN / f"{name}.npz"), np.load(GOLDEN / f"{name}_assistant.npz")
    lengths = [len(tokens[f"tokens_{slot}"]) for slot in range(2)]

    def chunk(slot: int, start: int, end: int) -> Chunk:
        pages = range(start // SIZE + (start % SIZE > 0), -(-end // SIZE))
        slots = tuple(1 + 20 * slot + page for page in pages)
        new = NewPages(pages.start, slots, window=WindowEntries(pages.start, slots)) if slots else ()
        sample = None if (slot, end) == (0, 5) else GREEDY
        return Chunk(slot, start, tuple(tokens[f"tokens_{slot}"][start:end].tolist()), new, sample)

    for number in range(max(lengths)):
        whole = [chunk(0, 0, 5)] if number == 4 else [chunk(0, number, number + 1)] if number > 4 else []
        single = [chunk(1, number, number + 1)] if number < lengths[1] else []
        chunks = (*single, *whole)
        plan = StepPlan(number, 8, chunks, draft=DraftPlan(drafts=True, following={}))
        drafts = iter(runner.collect(runner.submit(plan)).drafts)
        for slot, start, entries, _, sample, *_ in chunks:
            if sample is not None:
                assert next(drafts) == tuple(golden[f"drafts_{slot}"][start + len(entries) - 1].tolist())
    runner.close()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Of a model and an assistant that often agree, on a machine on which larger steps take hardly longer."""
    served, assistant = with_assistant(tmp_path_factory.mktemp("agree"))
    sizes: dict[str, Any] = {"dtype": "float32", "page_size": SIZE, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    sizes |= {"kv_tokens": 160, "max_model_len": 120, "swap_space": 0.001, "lazy": True}
    sizes |= {"profile": "roofline-llama-13b-a100", "speculative_config": drafts_of(assistant)}
    with LLM(set_up(served, check_pages=True, **sizes)) as llm:
        yield llm


def drafts_of(assistant: object) -> dict[str, Any]:
    return {"method": "mtp", "model": str(assistant), "num_speculative_tokens": NUM_DRAFTS}


def test_every_policy_gives_the_tokens_of_a_run_without_drafts(llm: LLM) -> None:
    """Greedy requests with calls, and drawn ones with a seed, beside each other."""
    work, drafts = Workload(number=10, seed=7), llm.engine.setup.config.scheduling.speculative_config
    for number, params in enumerate(work.params):
        warm = {"temperature": 0.7, "seed": number, "top_p": 0.9} if number % 3 == 1 else {}
        work.params[number] = replace(params, max_tokens=12 + number, **warm)
    llm.restart(policy="preserve", pipeline_depth=0, speculative_config=None)
    expected = work.run(llm)
    assert not llm.counters.drafted
    for number, policy in enumerate(("copy_ahead", "discard")):
        llm.restart(policy=policy, pipeline_depth=1 - number, max_chunk_tokens=7, speculative_config=drafts)
        assert streams(work.run(llm, delay_s=0.001)) == streams(expected)
        assert llm.counters.interceptions > 0
        assert 10 < llm.counters.accepted.total() <= llm.counters.drafted


@pytest.mark.parametrize(
    ("served", "changes", "words"),
    [
        (
            "llama_gqa",
            {"model": GOLDEN / "gemma4_assistant"},
            "drafts for a gemma4 of 32 dimensions and 128 tokens; got a llama of 32",
        ),
        (
            "gemma4",
            {"model": GOLDEN / "llama_gqa"},
            "an assistant that drafts for a model of Gemma 4; got llama",
        ),
        ("gemma4", {"model": GOLDEN / "gemma4_assistant", "method": "draft_model"}, "drafts by the method mtp"),
    ],
)
def test_what_an_assistant_does_not_draft_for_is_refused(served: str, changes: dict[str, Any], words: str) -> None:
    config = {key: str(value) for key, value in changes.items()}
    with pytest.raises(ConfigError, match=words):
        tiny_llm(served, speculative_config=drafts_of("") | config, kv_tokens=160)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 64}, "drafts for a gemma4 of 32 dimensions .*; got a gemma4 of 64 dimensions"),
        ({"vocab_size": 256}, "and 128 tokens; got .* and 256 tokens"),
        (
            {"num_kv_heads": 8, "num_heads": 8},
            "other heads in layers with a window of None; got 8 KV heads of 16 dimensions",
        ),
        ({"kinds": ()}, "layers with a window of 20; got none"),
    ],
)
def test_an_assistant_of_other_sizes_is_refused(changes: dict[str, Any], words: str) -> None:
    served, assistant = (read_config(GOLDEN / name) for name in ("gemma4", "gemma4_assistant"))
    with pytest.raises(ConfigError, match=words):
        fitted(assistant, replace(served, **changes))


def test_an_assistant_serves_nothing_alone() -> None:
    with pytest.raises(ModelError, match="drafts for a Gemma 4, and serves nothing alone"):
        tiny_llm("gemma4_assistant", kv_tokens=160)
