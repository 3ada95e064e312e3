"""The Slurm script: checked by shellcheck, and run with programs of the same names as Slurm's."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.deployed import check_serve
from tests.support.live_server import until

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "serve.sbatch"
SRUN = """#!/bin/bash
trap 'echo terminated >> "$OUT/signals"; exit 0' TERM
printf '%s\\n' "$@" > "$OUT/words"
env | grep ^JINFERCEPT_ > "$OUT/environment"
touch "$OUT/begun"
while [[ -n $WAIT ]]; do sleep 0.02; done
exit 7
"""
KEY = "a long random text"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A folder of programs, a key, and the variables of a job on two nodes."""
    programs = {"srun": SRUN, "scontrol": "#!/bin/bash\necho node7\necho node8\n"}
    for name, code in programs.items():
        (tmp_path / name).write_text(code)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "key").write_text(f"{KEY}\n")
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "OUT": str(tmp_path),
        "WAIT": "",
        "JINFERCEPT_API_KEY_FILE": str(tmp_path / "key"),
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node[7-8]",
    }


def begin(environment: Mapping[str, str], *words: str) -> "subprocess.Popen[str]":
    pipe = subprocess.PIPE
    return subprocess.Popen(["bash", SCRIPT, *words], env=environment, stdout=pipe, stderr=pipe, text=True)


def test_shellcheck_finds_nothing() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([shellcheck, SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_step_is_a_command_that_exists_and_shows_no_secret(environment: dict[str, str], tmp_path: Path) -> None:
    job = begin(environment, "/models/llama-70b", "--kv-tokens", "65536")
    output, errors = job.communicate(timeout=60)
    assert (job.returncode, output, errors) == (7, "http://node7:22345\n", "")
    option, program, *words = (tmp_path / "words").read_text().splitlines()
    assert (option, program) == ("--kill-on-bad-exit=1", "jinfercept")
    options, config = check_serve(words)
    assert (options.port, config.cache.kv_tokens, config.hosts.coordinator) == (22345, 65536, "auto")
    variables = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().splitlines())
    assert variables["JINFERCEPT_API_KEY"] == KEY
    assert len(variables["JINFERCEPT_HOSTS_TOKEN"]) == 64
    assert not {KEY, variables["JINFERCEPT_HOSTS_TOKEN"]} & set(words)


def test_one_node_needs_no_coordinator_and_a_key_is_needed(environment: dict[str, str], tmp_path: Path) -> None:
    job = begin(environment | {"SLURM_JOB_NUM_NODES": "1"})
    job.communicate(timeout=60)
    _, _, *words = (tmp_path / "words").read_text().splitlines()
    assert check_serve(words)[1].hosts.coordinator is None
    (tmp_path / "words").unlink()
    (tmp_path / "key").write_text("")
    job = begin(environment)
    assert "no API key" in job.communicate(timeout=60)[1]
    assert (job.returncode, (tmp_path / "words").exists()) == (2, False)


def test_the_signal_before_the_time_limit_reaches_the_server(environment: dict[str, str], tmp_path: Path) -> None:
    job = begin(environment | {"WAIT": "yes"})
    until((tmp_path / "begun").exists)
    job.terminate()
    job.communicate(timeout=60)
    assert (job.returncode, (tmp_path / "signals").read_text()) == (0, "terminated\n")
