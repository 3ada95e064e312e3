"""Query tokens of the executables: few sizes for chunks, more where a step may be decodes only."""

import pytest

from jinfercept.startup.sizing import buckets


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
