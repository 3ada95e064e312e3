"""The tiles that are chosen fit what Triton asks for, whatever the model."""

from hypothesis import given
from hypothesis import strategies as st

from jinfercept.pallas.tiles import SHARED_MEMORY_BYTES, choose_tiles, power_of_two

SOME_UNKNOWN_CHIP = 121


@given(
    st.integers(16, 256),
    st.integers(1, 128),
    st.sampled_from([2, 4]),
    st.sampled_from([*SHARED_MEMORY_BYTES, SOME_UNKNOWN_CHIP]),
)
def test_tiles_are_powers_of_two_that_hold_a_group_of_heads(head_dim, group, itemsize, compute_capability):
    tiles = choose_tiles(head_dim, group, itemsize, compute_capability, 100)
    for tile in (tiles.decode, tiles.chunk):
        assert tile.rows >= max(16, group)
        assert tile.tokens >= 16
        assert all(number == power_of_two(number) for number in (tile.rows, tile.tokens, tile.num_warps))


def test_hopper_gets_more_of_the_context_in_flight_than_a_chip_with_little_shared_memory():
    large, little = (choose_tiles(128, 4, 2, generation, 100) for generation in (90, 89))
    assert large.decode.tokens > little.decode.tokens
    assert large.chunk.tokens > little.chunk.tokens


def test_the_waves_of_the_decode_kernel_are_what_registers_and_shared_memory_allow():
    h100, a100, l4 = (
        [choose_tiles(head_dim, 4, 2, *gpu).programs // gpu[1] for head_dim in (64, 128, 256)]
        for gpu in ((90, 132), (80, 108), (89, 58))
    )
    assert (h100, a100) == ([4, 3, 3], [4, 3, 3])  # as in code that was compiled for them
    assert all(1 <= blocks <= 4 for blocks in l4)


def test_the_least_power_of_two_that_is_not_less():
    assert [power_of_two(number) for number in (1, 2, 3, 64, 96, 129)] == [1, 2, 4, 64, 128, 256]
