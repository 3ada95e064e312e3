"""What importing costs and who may import what, beyond what import-linter sees."""

import ast
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from jinfercept.pallas.layouts.rows import rms_normed
from jinfercept.runner import sampling
from jinfercept.runner.executables import Executables
from tests.support.strict_arrays import explicit

PACKAGE = Path(__file__).parent.parent / "jinfercept"


def imported(file: Path) -> set[str]:
    """The full names of the modules that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


DECISIONS = (
    "jinfercept, jinfercept.sched.scheduler, jinfercept.kv.manager, jinfercept.engine.engine, jinfercept.testing"
)
SIMULATIONS = "jinfercept.cli.simulate, studies.paper.command"


def test_decisions_run_without_arrays_and_simulations_without_jax_and_draw_only_when_asked() -> None:
    code = f"""import sys, {DECISIONS}
print({{"jax", "numpy"}} & sys.modules.keys())
import {SIMULATIONS}
print({{"jax", "matplotlib"}} & sys.modules.keys())"""
    root = PACKAGE.parent
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == "set()\nset()\n"


def test_only_those_who_wait_for_others_use_asyncio() -> None:
    waiting = {
        "tools",
        "serve",
        "fleet",
        "cli",
    }
    others = [file for file in PACKAGE.rglob("*.py") if file.relative_to(PACKAGE).parts[0] not in waiting]
    others.remove(PACKAGE / "sched" / "tenants.py")
    for name in ("streaming", "tool_executor"):
        others.remove(PACKAGE / "engine" / f"{name}.py")
    named = [file for file in others if "asyncio" in file.read_text(encoding="utf-8")]
    assert [str(file) for file in named if "asyncio" in imported(file)] == []


def test_kernels_import_nothing_of_the_package_but_what_the_machine_has() -> None:
    rooms = ("cpu_kernels", "pallas")
    names = set[str]().union(*(imported(file) for room in rooms for file in (PACKAGE / room).rglob("*.py")))
    own = tuple(f"jinfercept.{room}" for room in rooms)
    assert [name for name in names if name.startswith("jinfercept") and not name.startswith(own)] == []


ROOMS = sorted(file.parent for file in PACKAGE.glob("*/__init__.py"))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_every_room_says_what_it_knows_and_holds_nothing_else(room: Path) -> None:
    tree = ast.parse((room / "__init__.py").read_text(encoding="utf-8"))
    assert "nows" in (ast.get_docstring(tree) or "")
    assert len(tree.body) == 1


def test_the_map_of_the_rooms_refuses_a_circle(tmp_path: Path) -> None:
    tool = [sys.executable, PACKAGE.parent / "tools" / "rooms.py", tmp_path]
    for room, other in (("attic", "cellar"), ("cellar", "attic")):
        (tmp_path / "jinfercept" / room).mkdir(parents=True)
        (tmp_path / "jinfercept" / room / "boxes.py").write_text(f"import jinfercept.{other}.boxes\n\ndef box(): ...\n")
    done = subprocess.run(tool, capture_output=True, text=True)
    assert (done.returncode, done.stdout[:7]) == (1, "circle:")
    (tmp_path / "jinfercept" / "attic" / "boxes.py").write_text("def box(): ...\n")
    assert "no circles" in subprocess.run(tool, capture_output=True, text=True, check=True).stdout


def test_a_wrong_shape_is_an_error() -> None:
    with pytest.raises(TypeCheckError, match="K=8"):
        rms_normed(jnp.zeros((4, 8)), jnp.zeros(4), 1e-6)


def test_a_silent_broadcast_or_cast_is_an_error() -> None:
    with explicit():
        with pytest.raises(ValueError, match="rank_promotion"):
            jnp.add(jnp.zeros((4, 8)), jnp.zeros(8))
        with pytest.raises(ValueError, match="promotion"):
            jnp.add(jnp.zeros(8, jnp.bfloat16), jnp.zeros(8))


def by_bits(factor: int, x: jax.Array) -> jax.Array:
    return factor * sampling.BITS * x


def executable(factor: int = 1) -> jax.stages.Compiled:
    run = Executables()
    run.add("product", lambda x: by_bits(factor, x), jnp.ones(4))
    run.compile()
    return run.ready["product"]


def test_the_same_function_of_the_same_shapes_is_compiled_once() -> None:
    assert executable() is executable()
    assert executable(2) is not executable()


def test_what_a_test_replaces_is_traced_again_and_only_while_it_is_replaced() -> None:
    before = executable()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "BITS", sampling.BITS + 1)
        assert executable()(jnp.ones(4))[0] == before(jnp.ones(4))[0] + 1
    assert executable() is before
