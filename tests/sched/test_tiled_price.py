"""The price of attention in tiles: short rows wait for long ones, and a short chunk costs a whole tile."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from jinfercept.errors import ConfigError
from jinfercept.sched.named_profiles import PROFILES, load_profile
from jinfercept.sched.plan import Chunk, StepPlan
from jinfercept.sched.tiled_price import AttentionTiles, TiledPrice, TileWork, tile_work

TILES = AttentionTiles(decode_rows=8, decode_tokens=64, narrow_queries=64, wide_queries=256, chunk_tokens=128)
PRICE = TiledPrice(TILES, (1, 8, 128), (1.0, 2.0, 10.0), 1e-3, 1e-4, 1e-5)
PROFILE = replace(PROFILES["paper-gptj-6b-a100"], tiled=PRICE)


def test_rows_of_a_tile_read_as_much_as_the_longest_of_them() -> None:
    assert tile_work(TILES, 8, [(599, 1), (59, 1)]) == TileWork(640, 2 * 640, 0)
    assert tile_work(TILES, 32, [(63, 1)] * 9) == TileWork(2 * 64, 9 * 64, 0)
    assert tile_work(TILES, 1, [(0, 1)]) == TileWork(64, 64, 0)


def test_a_chunk_is_cut_into_tiles_of_whole_size() -> None:
    assert tile_work(TILES, 128, [(0, 16)]) == TileWork(128, 0, 64 * 128)
    assert tile_work(TILES, 128, [(0, 65)]) == TileWork(128, 0, 128 * 128)
    assert tile_work(TILES, 512, [(100, 300)]) == TileWork(384 + 512, 0, 256 * 384 + 64 * 512)


def test_a_plan_costs_its_bucket_and_its_tiles() -> None:
    plan = StepPlan(0, 8, (Chunk(0, 63, (1,), (), None), Chunk(1, 0, (1, 2), (), None)))
    assert PROFILE.plan_s(plan) == pytest.approx(2.0 + 1e-3 * (64 + 128) + 1e-4 * 64 + 1e-5 * 8 * 128)
    assert PROFILE.recompute_s(200, 128) == pytest.approx(PRICE.rows_s(128, [(0, 128)]) + PRICE.rows_s(72, [(128, 72)]))
    assert PRICE.rows_s(256, []) == 2 * 10.0


def test_a_file_gives_the_price_back_and_a_broken_one_is_refused(tmp_path: Path) -> None:
    PROFILE.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == PROFILE
    good = asdict(PRICE)
    broken: tuple[Any, ...] = (7, good | {"tiles": [1]}, good | {"bucket_s": [1.0]}, good | {"per_row_s": -1.0}, {})
    for values in broken:
        with pytest.raises(ConfigError, match="a profile's tiled price is wrong"):
            TiledPrice.from_json(values)
