"""What files of `deploy/` have in common: commands, read by the parser of the command line, and pods that may do little."""

from collections.abc import Sequence
from typing import Any

from jinfercept.cli.command import parse_command_line
from jinfercept.cli.main import COMMANDS, PROG
from jinfercept.cli.serve import Serve
from jinfercept.config import EngineConfig
from jinfercept.server.options import ServerOptions

WRITABLE = {"/var/cache/jinfercept", "/var/lib/jinfercept", "/tmp"}
"""Where a container writes: the volumes of `deploy/Containerfile`, and temporary files."""
_SECRET = ("KEY", "TOKEN", "PASSWORD", "SECRET")


def check_serve(words: Sequence[str]) -> tuple[ServerOptions, EngineConfig]:
    """Options of a `jinfercept serve` command. Raises for flags that do not exist and values that are wrong.

    Args:
        words: of the command, `serve` first.
    """
    command = parse_command_line(PROG, COMMANDS, words)
    assert isinstance(command, Serve)
    return command.options(), EngineConfig.from_options(command.engine)


def check_restricted(pod: Any) -> Any:
    """The container of a pod's specification. Raises if it may do more than it needs, or has a secret's text."""
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")} == WRITABLE
    for variable in container["env"]:
        if any(word in variable["name"] for word in _SECRET):
            assert "secretKeyRef" in variable["valueFrom"], variable["name"]
    return container
