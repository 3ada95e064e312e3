"""`python -m benchmarks aiperf MODEL`: AIPerf plays coding agents on `jinfercept serve`; its numbers beside the server's.

AIPerf 0.13 is a program with an environment of its own (`python -m venv E`, `E/bin/pip install 'aiperf==0.13.*'`), since it
wants other versions of packages that are installed here. Where it is missing, the command says so and measures nothing.

The sessions are those of `python -m benchmarks agents`, scaled, in the form that AIPerf reads: a JSON file each, in which
blocks of 64 tokens that prompts share have the same number. AIPerf makes the texts; answers are not part of later prompts.
"""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.request import urlopen

from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.agents import BLOCK, AgentCall, Scale, load_sessions
from benchmarks.servers import child_server
from jinfercept.chat.tokenizer.load import load_tokenizer
from jinfercept.cli.options import HOSTS, ModelName, engine_flags
from jinfercept.config import EngineOptions
from jinfercept.errors import ConfigError
from jinfercept.models import embedded
from jinfercept.sim.tables import check_least, plain_table, show

REPORT = "profile_export_aiperf.json"
NUMBERS = (
    ("requests", "request_count", "vllm:request_success_total", 1.0),
    ("prompt tokens", "total_isl", "vllm:prompt_tokens_total", 1.0),
    ("cached prompt tokens", "total_usage_prompt_cache_read_tokens", "vllm:prefix_cache_hits_total", 1.0),
    ("generated tokens", "total_osl", "vllm:generation_tokens_total", 1.0),
    ("seconds to the first token, mean", "time_to_first_token", "vllm:time_to_first_token_seconds", 1e-3),
)
"""Titles, and their names in AIPerf's report and in the server's metrics; and the unit of the former."""


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


@dataclass(frozen=True)
class AiperfAgents:
    """The command."""

    model: ModelName
    engine: Annotated[EngineOptions, engine_flags("seed", *HOSTS)]
    aiperf: str = "aiperf"
    """AIPerf's executable"""
    clients: int = 4
    """agents at a time"""
    sessions: int = 8
    """that are played, at most 16"""
    scale_prompts: float = 0.03
    """factor on the lengths of prompts, which are 12,000 to 62,000 tokens"""
    scale_answers: float = 0.05
    """factor on the lengths of answers"""
    scale_seconds: float = 0.1
    """factor on the seconds of tools"""

    def run(self) -> int:
        """Measure, and print a table; returns AIPerf's exit status. Raises `ConfigError` if AIPerf is missing."""
        check_least("--clients", self.clients, 1)
        check_least("--sessions", self.sessions, 1)
        program = shutil.which(self.aiperf)
        if program is None:
            fix = "install it into an environment of its own, and give --aiperf ENVIRONMENT/bin/aiperf"
            raise ConfigError("AIPerf is missing", got=self.aiperf, fix=fix)
        calls = load_sessions(Scale(self.scale_prompts, self.scale_answers, self.scale_seconds))[: self.sessions]
        with TemporaryDirectory() as made, child_server(self.model, self.engine) as url:
            folder = Path(made)
            name = OpenAI(base_url=f"{url}/v1", api_key="none").models.list().data[0].id
            (folder / "sessions").mkdir()
            for number, session in enumerate(calls):
                text = json.dumps(weka_session(number, session, name))
                (folder / "sessions" / f"{number}.json").write_text(text, "utf-8")
            command = [program, "profile", "--model", name, "--url", url, "--endpoint-type", "chat", "--streaming"]
            command += ["--tokenizer", self._tokenizer(folder / "tokenizer"), "--input-file", str(folder / "sessions")]
            command += ["--custom-dataset-type", "weka_trace", "--no-fixed-schedule", "--use-think-time-only"]
            command += ["--concurrency", str(self.clients), "--conversation-num", str(len(calls))]
            command += ["--extra-inputs", "ignore_eos:true", "--use-server-token-count", "--ui", "none"]
            status = subprocess.run([*command, "--output-artifact-dir", str(folder / "out")], check=False).returncode
            report = next((folder / "out").rglob(REPORT), None)
            if report is None:
                raise ConfigError("AIPerf reported nothing", got=f"exit status {status}", fix="see what it printed")
            show(_table(json.loads(report.read_text("utf-8")), _counted(url)))
        return status

    def _tokenizer(self, folder: Path) -> str:
        """What AIPerf reads the model's tokenizer from: a directory or hub id, or a folder that is made for it."""
        source = embedded.fetch() if self.model == embedded.NAME else Path(self.model)
        tokenizer = load_tokenizer(source) if source.suffix == ".gguf" else None
        if tokenizer is None:
            return self.model
        tokenizer.to_transformers().save_pretrained(folder)
        return str(folder)


def _counted(url: str) -> dict[str, float]:
    """The server's metrics by name: sums over labels, and means of histograms."""
    with urlopen(f"{url}/metrics") as reply:
        families = list(text_string_to_metric_families(reply.read().decode()))
    sums = dict[str, float]()
    for sample in (sample for family in families for sample in family.samples):
        sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    means = {
        name.removesuffix("_sum"): total / (sums[name.removesuffix("_sum") + "_count"] or 1.0)
        for name, total in sums.items()
        if name.endswith("_sum")
    }
    return sums | means


def _table(report: dict[str, Any], counted: dict[str, float]) -> Any:
    table = plain_table(("", "AIPerf", "server"), left=("",))
    for title, name, metric, unit in NUMBERS:
        value = report.get(name)
        theirs = None if value is None else unit * value["avg"]
        table.add_row(title, *("-" if number is None else _text(number) for number in (theirs, counted.get(metric))))
    return table


def _text(number: float) -> str:
    return f"{number:,.0f}" if number == round(number) else f"{number:.3f}"
