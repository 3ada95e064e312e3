"""Engines that share a folder one after the other, are killed at any instant, and find the disk full: the same tokens.

`SOAK_S=3600 tools/test -m slow tests/startup/test_disk_soak.py` soaks for an hour.
"""

import os
import subprocess
import sys
from itertools import count
from pathlib import Path
from random import Random
from time import monotonic

import pytest

from jinfercept.engine.streaming import serve
from jinfercept.request import FollowUp, Request
from jinfercept.sampling_params import SamplingParams
from tests.support.small_disk import small_disk
from tests.support.tiny_model import count_ties, tiny_llm

SOAK_S = float(os.environ.get("SOAK_S", "120"))
SESSIONS, TURNS = 6, 4


def play(folder: Path, seed: int) -> None:
    """Serve conversations without end, and check every token; a line tells how many were read from the disk."""
    rng = Random(seed)
    options = {"kv_tokens": 160, "swap_space": 0.0001, "kv_disk": str(folder), "kv_disk_space": 0.0014}
    with tiny_llm(policy=rng.choice(["copy_ahead", "lru_host", "swap"]), **options) as llm:
        for number in count():
            session = rng.randrange(SESSIONS)
            tokens, written = [Random(session).randrange(128) for _ in range(40)], Random(-1 - session)
            for turn in range(rng.randrange(1, TURNS + 1)):
                params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
                request = Request(f"{number}.{turn}", tuple(tokens), params, follow_up=FollowUp())
                [output] = serve(llm.engine.thread, [request])
                assert output.outputs[0].finish_reason == "length", output
                count_ties("llama_gqa", output)
                tokens += [*output.outputs[0].token_ids, *(written.randrange(128) for _ in range(12))]
            llm.engine.check_pages()
            assert llm.disk is not None
            print(llm.disk.counters.read_bytes, llm.disk.counters.damaged_pages, flush=True)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_kills_and_a_full_disk_cost_no_token_and_no_error(tmp_path: Path) -> None:
    rng, end_s, num_read, num_kills = Random(0), monotonic() + SOAK_S, 0, 0
    (tmp_path / "small").mkdir()
    with small_disk(tmp_path / "small") as disk:
        disk.fill()
        while monotonic() < end_s or num_kills < 3:
            disk.empty()  # an engine that finds no room for its space does not start
            line = "0"
            command = [sys.executable, "-m", "tests.startup.test_disk_soak", str(disk.folder / "kv"), str(num_kills)]
            with (tmp_path / "errors").open("w") as errors:
                child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            assert child.stdout is not None
            try:
                for _ in range(rng.randrange(1, 40)):
                    if not (line := child.stdout.readline()):
                        break
                    if rng.random() < 0.1:
                        disk.fill() if rng.random() < 0.5 else disk.empty()
                assert child.poll() is None, (tmp_path / "errors").read_text()
            finally:
                child.kill()
                child.wait()
                child.stdout.close()
            assert "Traceback" not in (tmp_path / "errors").read_text()
            num_kills += 1
            num_read += int(line.split()[0]) > 0
    print(f"{num_kills} engines were killed, {num_read} of them had read from the disk")
    assert num_read


if __name__ == "__main__":
    play(Path(sys.argv[1]), int(sys.argv[2]))
