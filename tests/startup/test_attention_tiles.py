"""The price of tiles comes back out of steps that were made of it."""

import pytest

from jinfercept.sched.plan import Chunk, StepPlan
from jinfercept.sched.tiled_price import AttentionTiles, TiledPrice
from jinfercept.startup.attention_tiles import attention_tiles, fit_tiles

TILES = AttentionTiles(8, 64, 64, 256, 128)
PRICE = TiledPrice(TILES, (1, 8, 128), (2e-3, 4e-3, 12e-3), 4e-6, 1e-6, 1e-7)


def plan(bucket: int, *rows: tuple[int, int]) -> StepPlan:
    return StepPlan(
        0, bucket, tuple(Chunk(slot, start, (0,) * size, (), None) for slot, (start, size) in enumerate(rows))
    )


PLANS = [
    plan(1, (0, 1)),
    plan(1, (700, 1)),
    plan(8, *[(0, 1)] * 8),
    plan(8, *[(300, 1)] * 8),
    plan(8, (700, 1)),
    plan(128, (0, 128)),
    plan(128, (600, 128)),
    plan(128, *[(0, 32)] * 4),
    plan(128, *[(300, 32)] * 4),
]


def test_exact_steps_give_their_terms_back_and_a_disturbed_one_moves_none_far() -> None:
    measured = [(step, PRICE.plan_s(step)) for step in PLANS]
    fitted = fit_tiles(TILES, measured)
    assert fitted.bucket_s == pytest.approx(PRICE.bucket_s)
    assert (fitted.per_tile_s, fitted.per_row_s, fitted.per_pair_s) == pytest.approx((4e-6, 1e-6, 1e-7))
    measured[4] = PLANS[4], 3 * measured[4][1]
    disturbed = fit_tiles(TILES, measured)
    assert [disturbed.plan_s(step) for step in PLANS[:4]] == pytest.approx([s for _, s in measured[:4]], rel=0.2)


def test_no_term_is_below_zero() -> None:
    fitted = fit_tiles(TILES, [(step, 0.01 / (1 + index)) for index, step in enumerate(PLANS)])
    assert min(*fitted.bucket_s) > 0
    assert min(fitted.per_tile_s, fitted.per_row_s, fitted.per_pair_s) >= 0
    assert list(fitted.bucket_s) == sorted(fitted.bucket_s)


def test_only_a_cpus_attention_has_tiles() -> None:
    assert attention_tiles("auto", 16) == AttentionTiles(8, 64, 64, 256, 128)
    assert attention_tiles("cpu", 96) == AttentionTiles(8, 96, 64, 256, 96)
    assert attention_tiles("reference", 16) is None
