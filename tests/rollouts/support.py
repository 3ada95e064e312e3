"""Checks of a sample against the model that made it."""

import numpy as np

from jinfercept import LLM, Rollout, SamplingParams


def check_sample(llm: LLM, sample: Rollout) -> None:
    """Its log probabilities are those of one prefill of its tokens; its masks, versions and calls agree with each other."""
    assert sample.origin is not None
    adapter = sample.origin.request.adapter
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    [output] = llm.generate([sample.token_ids], params, lora=adapter and adapter.name)
    scores = output.prompt_logprobs
    assert scores is not None
    generated = np.flatnonzero(sample.loss_mask)
    expected = [scores[place][int(sample.token_ids[place])].logprob for place in generated]  # pyright: ignore
    assert np.allclose(sample.logprobs[generated], expected, atol=2e-4)
    others = sample.loss_mask == 0
    assert others[: sample.num_prompt].all()
    assert (sample.weight_versions[others] == -1).all()
    assert (sample.weight_versions[generated] >= 0).all()
    assert not sample.logprobs[others].any()
    for call in sample.calls:
        assert not sample.loss_mask[slice(*call.span)].any()
