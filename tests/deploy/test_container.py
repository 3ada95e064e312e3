"""The container's file: linted, and in agreement with the package, its extras and the command line."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jinfercept.cli.command import parse_command_line
from jinfercept.cli.main import COMMANDS, PROG
from tests.support.deployed import WRITABLE, check_serve

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "Containerfile"
TEXT = re.sub(r"\\\n", " ", FILE.read_text(encoding="utf-8"))
LINES = [line for line in TEXT.splitlines() if line and not line.startswith("#")]
PACKAGE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def arguments(instruction: str) -> list[str]:
    """What follows an instruction, for each time that the file has it."""
    return [line.partition(" ")[2].strip() for line in LINES if line.startswith(f"{instruction} ")]


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, FILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_last_stage_runs_a_command_that_exists_as_another_user_than_root() -> None:
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", arguments("USER")[-1])
    [entry], [command] = arguments("ENTRYPOINT"), arguments("CMD")[-1:]
    assert json.loads(entry) == [PROG]
    options, _ = check_serve(json.loads(command))
    assert (options.host, f"{options.port}") == ("0.0.0.0", arguments("EXPOSE")[0])
    [check] = arguments("HEALTHCHECK")
    assert f"http://127.0.0.1:{options.port}/health" in check
    assert {*json.loads(arguments("VOLUME")[0]), "/tmp"} == WRITABLE
    assert "JINFERCEPT_CACHE=/var/cache/jinfercept" in TEXT
    with pytest.raises(SystemExit):
        parse_command_line(PROG, COMMANDS, ["serve", "smollm2-135m", "--no-such-flag"])


def test_extras_and_copied_files_are_those_of_the_package() -> None:
    extras = PACKAGE["project"]["optional-dependencies"]
    [given] = [line.removeprefix("EXTRAS=") for line in arguments("ARG") if line.startswith("EXTRAS=")]
    accelerators = set(re.findall(r"\bcuda\d+\b", TEXT))
    assert {*given.split(","), *accelerators} <= extras.keys()
    assert accelerators == {name for name in extras if name.startswith("cuda")}
    copied = {word for line in arguments("COPY") if "--from" not in line for word in line.split()[:-1]}
    wanted = {"pyproject.toml", PACKAGE["project"]["readme"], *PACKAGE["project"]["license-files"]}
    assert wanted | set(PACKAGE["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= copied
    ignore = FILE.with_name("Containerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignore[0] == "*"
    assert {line.removeprefix("!") for line in ignore if line.startswith("!")} == copied
    assert all((ROOT / name).exists() for name in copied)
