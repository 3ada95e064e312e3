"""A reader who does what a documentation page says, block by block, in a folder of their own.

`jinfercept serve` starts a server with the page's flags on a model that is there. What the page sends to port 8000 goes to it.
"""

import io
import os
import shlex
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, final

import numpy as np

from jinfercept.cli.command import parse_command_line
from jinfercept.cli.main import COMMANDS, PROG
from jinfercept.cli.main import main as run_command
from jinfercept.cli.serve import Serve
from jinfercept.llm import LLM
from jinfercept.models.protocol import Params
from jinfercept.sched.plan import FROM_DEVICE, Chunk
from jinfercept.serve.access.key_file import read_key_file
from jinfercept.serve.server_tools import open_server_tools
from jinfercept.tools.tool_tables import read_tables
from tests.support.docs_blocks import SHOWN, Block
from tests.support.live_server import END, Running, running
from tests.support.scripted_model import LENGTH, Scripted

PORT = "http://127.0.0.1:8000"


@final
class Voice:
    """Has a scripted model say one text after the other, whenever it has read to the end of what it was told.

    It stands before the runner and looks at the plans; one request speaks at a time.
    """

    def __init__(self, scripted: Scripted) -> None:
        self._scripted, self._runner = scripted, scripted.runner
        self.texts: deque[str] = deque()
        self._begun, self._ids = 0, [0]

    @contextmanager
    def heard(self) -> Iterator["Voice"]:
        """Until the end of the block."""
        forward = self._runner.forward

        def speak(plan: Any) -> Any:
            for chunk in plan.chunks:
                if self._is_turn(chunk):
                    self._say(chunk.start + len(chunk.tokens), chunk.tokens[-1])
            return forward(plan)

        self._runner.forward = speak  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield self
        finally:
            del self._runner.forward

    def _is_turn(self, chunk: Chunk) -> bool:
        """Whether the token that is drawn next is the first of a turn."""
        if chunk.sample is None or chunk.tokens[-1] == FROM_DEVICE:
            return False
        position = chunk.start - self._begun
        return not (0 <= position < len(self._ids) and chunk.tokens == (self._ids[position],))

    def _say(self, begins: int, after: int) -> None:
        text = self.texts.popleft() if self.texts else "Yes."
        self._begun, self._ids = begins, self._scripted.tokenizer.encode(text + END)
        old = self._runner.params
        table = np.zeros((LENGTH, self._scripted.llm.model.config.vocab_size), np.int32)
        for place, (token, follows) in enumerate(zip([after, *self._ids], self._ids, strict=False), begins - 1):
            table[place, token] = follows
        self._runner.use(Params(old.embed, ({"next": table},), old.head))


@final
class Reader:
    """Reads one page.

    Args:
        scripted: the model of the servers that the page starts; it writes what the page has it write.
        folder: where they work; everything that is written lands there.
    """

    def __init__(self, scripted: Scripted, folder: Path) -> None:
        self._llm, self._folder = scripted.llm, folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._voice = Voice(scripted)
        self._names: dict[str, Any] = {}
        self._policy = self._llm.policy_name
        self._server = ExitStack()
        self.served: Running | None = None

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *error: object) -> None:
        self._server.close()
        if self._llm.policy_name != self._policy:  # a program chose another one
            self._llm.restart(policy=self._policy)

    def read(self, block: Block) -> None:
        """Do what it says. Raises whatever goes wrong, `AssertionError` if something else is printed."""
        if block.file is not None:
            (self._folder / block.file).write_text(self._here(block.code), encoding="utf-8")
        if block.not_run is not None or block.only_real is not None or block.shorter is not None:
            return
        self._voice.texts.extend(block.writes)
        with self._voice.heard():
            printed = self._do(block)
        assert not self._voice.texts, f"{block.place}: the model was not asked for {list(self._voice.texts)}"
        if block.prints is not None:
            assert printed.strip() == block.prints.strip(), f"{block.place} prints\n{printed}"

    def _do(self, block: Block) -> str:
        """What it prints."""
        match block.language:
            case "python" if block.file is None:
                if not block.continues:
                    self._names = {"__name__": "page"}
                shown = io.StringIO()
                with redirect_stdout(shown):
                    exec(compile(self._here(block.code), block.place, "exec"), self._names)
                return shown.getvalue()
            case "python":
                compile(block.code, block.place, "exec")
                return ""
            case "toml":
                path = self._folder / (block.file or "")
                _ = read_tables(path) if "[[tool]]" in block.code else read_key_file(str(path))
                return ""
            case "bash":
                return "".join(self._command(lines) for lines in commands_in(block.code))
            case _ if block.language in SHOWN:
                return ""
        raise AssertionError(f"{block.place}: nobody knows how to run {block.language!r}")

    def _command(self, lines: str) -> str:
        words = shlex.split(lines, comments=True)
        if words[:2] == ["jinfercept", "serve"]:
            command = parse_command_line(PROG, COMMANDS, words[1:])
            assert isinstance(command, Serve)
            self._serve(command)
            return ""
        if words[:1] == ["jinfercept"]:
            shown = io.StringIO()
            with redirect_stdout(shown):
                assert run_command([self._here(word) for word in words[1:]]) == 0
            return shown.getvalue()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        (self._folder / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\nmax-time = 20\n")
        places = {"PATH": path, "CURL_HOME": str(self._folder)}
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._here(lines)],
            cwd=self._folder,
            env=os.environ | places,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{lines}\n{done.stdout}{done.stderr}"
        return done.stdout

    def open(self, model: str = "", **options: Any) -> Any:
        """The model that is there, empty, in place of the one that a program loads."""
        self._llm.restart(**{name: value for name, value in options.items() if name == "policy"})
        return _Opened(self._llm)

    def _serve(self, command: Serve) -> None:
        """Another server than before."""
        self._server.close()
        options = dict(command.server)
        names = {"served_model_name": options.get("served_model_name") or (command.model,)}
        tools = self._server.enter_context(open_server_tools(options.pop("tools", ())))
        self._llm.restart()
        settings: dict[str, Any] = options | names | {"host": "127.0.0.1", "port": self._port, "uds": None}
        self.served = self._server.enter_context(running(self._llm, tools, **settings))

    def _here(self, text: str) -> str:
        """What a page says, with the server's place for the one that it names."""
        return text.replace(PORT, f"http://127.0.0.1:{self._port}").replace(
            'command = "python"', f'command = "{sys.executable}"'
        )


@final
class _Opened:
    """An `LLM` that outlives its program."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def __enter__(self) -> "_Opened":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def commands_in(script: str) -> Iterable[str]:
    """Those of jinfercept one by one, what stands between them together; not what installs packages."""
    others: list[str] = []
    for line in script.replace("\\\n", " ").splitlines():
        if line.startswith("pip install "):
            continue
        if not line.startswith("jinfercept "):
            others.append(line)
            continue
        if "".join(others).strip():
            yield "\n".join(others)
        others = []
        yield line
    if "".join(others).strip():
        yield "\n".join(others)
