"""The offline engine on the prompts that a server gets, in a process of its own: `python -m` runs this module there.

It reads `{"model", "flags", "new_tokens"}` from standard input and says `{}` when it is ready. Then it serves a wave of prompts
for each line `{"chats": […]}` or `{"prompts": […]}`, and answers `{"seconds", "tokens"}`. It ends with its input.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from jinfercept.errors import ConfigError, JinferceptError
from jinfercept.sampling_params import SamplingParams


@final
class OfflineEngine:
    """The other end: that process. See `offline_engine`."""

    def __init__(self, child: "subprocess.Popen[str]", log: Any) -> None:
        self._child, self._log = child, log

    def ask(self, work: Mapping[str, Any]) -> dict[str, float]:
        """Send a line and wait for its answer. Raises `ConfigError` if the process has failed."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(json.dumps(work) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            pass
        if answer := self._child.stdout.readline():
            return json.loads(answer)
        self._log.seek(0)
        last = self._log.read().strip().rpartition("\n")[2]
        raise ConfigError("the offline engine failed", got=last, fix="try jinfercept run with the same flags")


@contextmanager
def offline_engine(model: str, flags: Mapping[str, Any], new_tokens: int) -> Iterator[OfflineEngine]:
    """Start the process, and end it afterwards.

    Args:
        model, flags: as for `LLM`.
        new_tokens: of every answer.

    Raises:
        ConfigError: it does not start.
    """
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", __name__]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as child:
            try:
                engine = OfflineEngine(child, log)
                engine.ask({"model": model, "flags": flags, "new_tokens": new_tokens})
                yield engine
            finally:
                child.terminate()


def main() -> int:
    """Serve what standard input asks for."""
    from jinfercept.llm import LLM

    options = json.loads(sys.stdin.readline())
    params = SamplingParams(temperature=0.0, max_tokens=options["new_tokens"], ignore_eos=True)
    try:
        with LLM(options["model"], lazy=False, **options["flags"]) as llm:
            print("{}", flush=True)
            for line in sys.stdin:
                work, began_s = json.loads(line), time.perf_counter()
                if "chats" in work:
                    outputs = llm.chat(work["chats"], params)
                else:
                    outputs = llm.generate([{"prompt_token_ids": ids} for ids in work["prompts"]], params)
                seconds = time.perf_counter() - began_s
                tokens = sum(output.outputs[0].num_generated for output in outputs)
                print(json.dumps({"seconds": seconds, "tokens": tokens}), flush=True)
    except JinferceptError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
