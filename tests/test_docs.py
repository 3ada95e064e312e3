"""The documentation builds without a warning, and its notebook runs from top to bottom."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("furo", reason="the documentation's packages are not installed")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(tmp_path / "trees")]
    ran = subprocess.run([*build, "docs", str(tmp_path / "html")], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    reference = (tmp_path / "html" / "api.html").read_text()
    assert all(f"jinfercept.{name}" in reference for name in ("llm.LLM.generate", "calls.Tool"))
    commands = (tmp_path / "html" / "commands.html").read_text()
    assert all(f"usage: jinfercept {name} " in commands for name in ("serve", "bench throughput", "bench sessions"))
    assert "usage: python -m studies paper " in commands


def test_the_notebook_runs_from_top_to_bottom() -> None:
    nbformat = pytest.importorskip("nbformat", reason="notebooks need nbclient and ipykernel")
    nbclient = pytest.importorskip("nbclient", reason="notebooks need nbclient and ipykernel")
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "outputs do not belong into the repository"
    done = nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3", resources={"metadata": {"path": ROOT}})
    done.execute()
    shown = "".join(
        o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", ()) if o.output_type == "stream"
    )
    assert "Paris" in shown
    assert "copy_ahead" in shown
