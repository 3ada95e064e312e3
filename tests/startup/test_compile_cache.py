"""Damaged entries of JAX's compilation cache are dropped, so that the next start compiles and stores them again."""

import os
import time
import zlib
from pathlib import Path

import pytest

from jinfercept.startup.compile_cache import drop_damaged

WHOLE = zlib.compress(bytes(range(256)) * 64)


def write(directory: Path, name: str, data: bytes, age_s: float) -> Path:
    entry = directory / f"{name}-cache"
    entry.write_bytes(data)
    age(entry, age_s)
    return entry


def age(file: Path, age_s: float) -> None:
    then = time.time() - age_s
    os.utime(file, (then, then))


def test_damaged_entries_are_dropped_and_whole_ones_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, other = write(tmp_path, "whole", WHOLE, 100), tmp_path / "notes"
    other.write_text("no entry")
    flipped = WHOLE[:-1] + bytes([WHOLE[-1] ^ 1])
    damaged = {
        write(tmp_path, name, data, 100)
        for name, data in {"short": WHOLE[:-9], "empty": b"", "flipped": flipped}.items()
    }
    assert set(drop_damaged(tmp_path)) == damaged
    assert whole.is_file()
    assert other.is_file()
    assert not any(entry.exists() for entry in damaged)
    assert len(caplog.messages) == 3


def test_entries_are_checked_once_after_they_were_written(tmp_path: Path) -> None:
    old = write(tmp_path, "old", WHOLE, 200)
    assert drop_damaged(tmp_path) == []
    write(tmp_path, "old", b"damaged later", 200)
    fresh = write(tmp_path, "fresh", b"another process writes it", 0)
    assert drop_damaged(tmp_path) == []
    assert old.is_file()
    age(fresh, 61)
    age(tmp_path / ".checked", 120)
    assert drop_damaged(tmp_path) == [fresh]


def test_a_directory_that_is_missing_is_left_alone(tmp_path: Path) -> None:
    assert drop_damaged(tmp_path / "none") == []
    assert not (tmp_path / "none").exists()
