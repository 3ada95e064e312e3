"""Query tokens of the executables: few sizes for chunks, more where a step may be decodes only."""

from typing import Any

import pytest

from jinfercept.config import EngineConfig
from jinfercept.start.sizing import buckets, staging_pages


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "wanted"),
    [
        (1, 1, (1,)),
        (8, 32, (1, 8, 32)),
        (32, 512, (1, 8, 32, 128, 256, 512)),
        (64, 100, (1, 8, 32, 64, 100)),
        (256, 2048, (1, 8, 32, 64, 128, 256, 512, 2048)),
        (300, 9000, (1, 8, 32, 64, 128, 256, 384, 512, 2048, 8192, 9000)),
    ],
)
def test_steps_of_decodes_have_sizes_between_those_of_chunks(
    max_num_seqs: int, max_num_batched_tokens: int, wanted: tuple[int, ...]
) -> None:
    assert buckets(max_num_seqs, max_num_batched_tokens, "cpu") == wanted


def test_a_gpu_has_no_bucket_of_a_single_row() -> None:
    assert buckets(64, 512, "gpu") == (8, 32, 64, 128, 512)


@pytest.mark.parametrize(
    ("options", "on_gpu", "on_cpu"),
    [({}, 16, 1), ({"staging_pages": 4}, 4, 4), ({"staging_pages": 1}, 1, 1)],
)
def test_pages_of_a_context_cross_a_link_in_arrays_of_16(options: dict[str, Any], on_gpu: int, on_cpu: int) -> None:
    config = EngineConfig.from_options(options)
    assert (staging_pages(config, "gpu"), staging_pages(config, "cpu")) == (on_gpu, on_cpu)
