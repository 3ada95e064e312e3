"""The command line: flags are the options of `LLM`, mistakes one line and status 2; `info`, and `demo` without its model."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jinfercept import __version__
from jinfercept.cli.demo import PRICES, calculator, prompts, shop
from jinfercept.cli.main import COMMANDS, main
from jinfercept.vllm_names import NAMES
from tests.support.tiny_model import GOLDEN


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]])
def test_the_overview_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    shown = capsys.readouterr().out
    for name, entry in COMMANDS.items():
        assert f"  {name} " in shown
        assert entry.help in shown


def test_every_command_explains_its_flags_without_jax() -> None:
    code = """
        import sys
        from contextlib import suppress
        from jinfercept.cli.main import COMMANDS, main
        for name in COMMANDS:
            with suppress(SystemExit):
                main([name, "-h"])
            print("loaded by", name, {"jax", "matplotlib"} & sys.modules.keys())
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for name, entry in COMMANDS.items():
        assert entry.help in done.stdout
        assert f"loaded by {name} set()\n" in done.stdout
    assert not done.stderr


def test_the_help_of_serve_shows_25_flags_and_help_all_shows_every_one(capsys: pytest.CaptureFixture[str]) -> None:
    shown = dict[str, set[str]]()
    for flag in ("-h", "--help-all"):
        with pytest.raises(SystemExit, match="0"):
            main(["serve", "smollm2-135m", flag])
        shown[flag] = set(re.findall(r"^\W*(?:-\w+ \S+, )?(--[a-z][\w-]*)", capsys.readouterr().out, re.MULTILINE))
    assert len(shown["-h"] - {"--help", "--help-all"}) == 25
    assert {"--port", "--kv-tokens", "--quantization", "--help-all"} <= shown["-h"]
    assert shown["-h"] - {"--help", "--help-all"} <= shown["--help-all"]
    assert {"--coordinator", "--staging-pages", "--body-timeout"} <= shown["--help-all"] - shown["-h"]


def test_the_overview_imports_no_command() -> None:
    code = (
        "import sys; from jinfercept.cli.main import main; main(['-h']); print({'tyro', 'rich'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rn"], "jinfercept: no such command: rn (did you mean 'run'?); one of demo, run,"),
        (["--kv-tokens", "5", "run"], "jinfercept: a command comes before its flags; got --kv-tokens"),
        (["run"], "jinfercept run: MODEL is missing: smollm2-135m, a Hugging Face directory or hub id, or"),
        (["run", "m", "--kv-tokens"], "jinfercept run: Missing value for argument '--kv-tokens'"),
        (["run", "m", "--kv-tokens", "x"], "jinfercept run: --kv-tokens takes a whole number; got 'x'"),
        (
            ["run", "m", "--dtype", "int4"],
            "invalid choice 'int4' for argument '--dtype'. Expected one of ('auto', 'floa",
        ),
        (["run", "m", "--top-p", "x"], "jinfercept run: --top-p takes a number; got 'x'"),
        (["run", "m", "n"], "jinfercept run: one argument too many: n; a prompt is given as --prompt TEXT"),
        (
            ["serve", "--model", "m"],
            "jinfercept serve: this flag has another name in jinfercept; got --model; fix: MODEL",
        ),
        (["simulate", "--trace", "t", "--workload", "qa"], "--trace and --workload are not allowed together"),
        (
            ["simulate", "--live", "3", "--rate", "2"],
            "--live and --rate are not allowed together",
        ),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    shown = capsys.readouterr()
    assert shown.err.startswith("jinfercept")
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_a_mistake_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "no/such/model", "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert error.strip().startswith("jinfercept: there is no such model")
    assert "fix:" in error


def test_run_completes_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--kv-tokens", "256", "--max-num-seqs", "1", "--max-num-batched-tokens", "8", "--max-tokens", "4"]
    assert main(["run", "smollm2-135m", "--prompt", "The capital of France is", *flags]) == 0
    assert "Paris" in capsys.readouterr().out


def test_info_tells_a_models_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "smollm2-135m"]) == 0
    shown = capsys.readouterr().out
    assert "45 KiB per token" in shown
    assert "--quantization gguf" in shown
    assert "weights 0.09 GiB" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt", "x", "--attention", "triton"], "attention=triton is a GPU's"),
        (["--attention", "mosaic"], "attention=mosaic is a GPU's"),
        (["--prompt", "x", "--max-tokens", "0"], "max_tokens is wrong; got 0; fix: give a whole number, at least 1"),
        (["--prompt", ""], "a prompt needs at least one token"),
        (["--tool-call-parser", "smoke"], "no such tool_call_parser"),
        (["--reasoning-parser", "smoke"], "no such reasoning_parser"),
    ],
)
def test_what_cannot_work_is_said_before_the_model_is_looked_for(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "no/such/model", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["serve", "m", "--kv-tokns", "5"], "no such flag: --kv-tokns (did you mean '--kv-tokens'?)"),
        (["run", "m", "--sytem=x", "--jubilant"], "--sytem (did you mean '--system'?), --jubilant; see"),
    ],
)
def test_a_flag_that_is_not_known_is_refused_with_the_nearest(
    command: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tools", "flags", "message"),
    [
        (
            "def f() -> str:\n    'A tool.'\n",
            ["--chat-template", "own.jinja"],
            "the chat template uses no known format of tool calls",
        ),
        ("def f() -> str:\n    'A tool.'\n", ["--prompt", "x"], "these flags need a chat; got --prompt and --tools"),
        ("def f(:\n", [], "tools.py"),
    ],
)
def test_run_refuses_tools_before_it_loads_the_model(
    tools: str,
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tools.py").write_text(tools)
    (tmp_path / "own.jinja").write_text("{{ messages[-1].content }}{{ tools }}")
    assert main(["run", "smollm2-135m", "--tools", str(tmp_path / "tools.py"), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "KV pool" not in error  # the plan of memory, which is made once the weights are there


def test_flags_of_vllm_for_which_there_is_nothing_to_do_are_taken_and_said_once(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    page = (
        (Path(__file__).parents[2] / "docs" / "migration.md").read_text().split("value that asks for something else")[1]
    )
    shown = re.findall(r"`(--[^`]+)`", page.split("Only here")[0])
    assert {flag.split()[0] for flag in shown} == set(NAMES["unneeded"])
    given = [
        part
        for flag in shown
        for part in (*flag.split(), *(["x"] if NAMES["unneeded"][flag.split()[0]][1:] == ["*"] else []))
    ]
    values = ["--dtype", "half", "--load-format=safetensors", "-q", "none"]
    assert main(["serve", "no/such/model", "--port", "0", *given, "--enforce-eager", "-pp", "1", "-O3", *values]) == 2
    assert "there is no such" in capsys.readouterr().err
    logged = [record.getMessage() for record in caplog.records]
    assert "--dtype half is --dtype bfloat16 here" in logged
    assert "--load-format safetensors is --load-format auto here" in logged
    assert not any("--quantization" in line for line in logged)
    told = [record.getMessage().split()[0] for record in caplog.records if "is not needed: " in record.getMessage()]
    assert told == [flag.split()[0] for flag in shown]


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "jinfercept", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"jinfercept {__version__}\n"


def test_sessions_are_simulated_as_they_are_served_and_rivals_first_come_first_served(tmp_path: Path) -> None:
    def played(*options: str) -> list[tuple[str, str, str]]:
        sizes = [
            "--duration",
            "5",
            "--kv-tokens",
            "400000",
            "--page-size",
            "64",
            "--policy",
            "copy_ahead,lru_host",
            "--jobs",
            "1",
        ]
        assert main(["simulate", *options, *sizes, "--json", str(tmp_path / "runs.json")]) == 0
        return [
            (run["policy"], run["order"], run["estimator"]) for run in json.loads((tmp_path / "runs.json").read_text())
        ]

    sessions = ["--trace", "agents", "--live", "1"]
    assert played(*sessions) == [("copy_ahead", "missing_work", "history"), ("lru_host", "fcfs", "history")]
    assert played(*sessions, "--order", "fcfs") == [("copy_ahead", "fcfs", "history"), ("lru_host", "fcfs", "history")]
    assert played("--rate", "1") == [("copy_ahead", "fcfs", "elapsed"), ("lru_host", "fcfs", "elapsed")]


@pytest.mark.parametrize(("expression", "value"), [("48/2", "24"), (" 6*3 ", "18"), ("7/2", "3.50"), ("2+3*4-1", "13")])
def test_the_calculator_computes_what_the_model_writes(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize("expression", ["__import__('os')", "a+1", "2**9", "(1).real", "-1"])
def test_the_calculator_runs_nothing_but_arithmetic(expression: str) -> None:
    with pytest.raises(ValueError, match="only"):
        calculator(expression)


def test_every_question_has_a_price_and_no_context_begins_as_another_one() -> None:
    assert shop(0.0)(" Pencil ") == str(PRICES["pencil"])
    first_lines = [prompt.splitlines()[0] for prompt in prompts(40)]
    assert len(set(first_lines)) == 40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--requests", "0"], "--requests must be at least 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *words]) == 2
    assert message in capsys.readouterr().err


MODEL = str(GOLDEN / "llama_gqa")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["info", *words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_each_of_several_devices_takes_a_part_and_kv_heads_that_are_too_few_are_stored_more_than_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    alone, each = shown(capsys, MODEL), shown(capsys, MODEL, "-tp", "4")
    assert "each of 2 stored 2 times" in each
    assert "stored" not in alone
    assert "bfloat16, on each of 4 devices" in each


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([MODEL, "-tp", "0"], "tensor_parallel_size is too small; got 0; fix: at least 1"),
        ([MODEL, "-tp", "3"], "of 1, 2, 4"),
        (["no/such/model"], "no such model"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
