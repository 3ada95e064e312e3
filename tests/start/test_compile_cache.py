"""Damaged entries of JAX's compilation cache are dropped, so that the next start compiles and stores them again; a cache in a
bucket works."""

import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest

from jinfercept.start.backend import drop_damaged
from tests.support.tiny_model import GOLDEN

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


START = """
import sys
from collections import Counter

import fsspec
import jax
from fsspec.implementations.local import LocalFileSystem


class Bucket(LocalFileSystem):
    protocol = ("gs", "gcs")

    @classmethod
    def _strip_protocol(cls, path):
        return f"{sys.argv[1]}/{path.partition('://')[2]}" if "://" in path else super()._strip_protocol(path)


for name in Bucket.protocol:
    fsspec.register_implementation(name, Bucket, clobber=True)
events = Counter()
jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
from jinfercept import LLM

LLM(sys.argv[2], dtype="float32", kv_tokens=64, max_num_seqs=2, max_model_len=32, max_num_batched_tokens=8).close()
print(events["cache_hits"], events["cache_misses"])
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_second_start_finds_what_the_first_one_kept_in_a_bucket(tmp_path: Path) -> None:
    """The name of the bucket reaches JAX as the user has written it, in two processes that share the bucket."""
    variables = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": "gs://bucket/xla",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]),
    }
    (cwd := tmp_path / "cwd").mkdir()

    def start() -> tuple[int, int]:
        command = [sys.executable, "-c", START, str(tmp_path), str(GOLDEN / "llama_gqa")]
        done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=True)
        hits, misses = map(int, done.stdout.split())
        return hits, misses

    hits, misses = start()
    assert misses > hits
    kept = {entry.name for entry in (tmp_path / "bucket" / "xla").glob("*-cache")}
    assert len(kept) == misses
    hits, misses = start()
    assert hits > 8 * misses
    assert not list(cwd.iterdir()), "a folder gs: beside the user's files"
