"""Files as the GPU suite writes them."""

import json
from pathlib import Path
from typing import Any

from benchmarks.suite.sizes import Row


def report_file(folder: Path, parts: dict[str, list[Row]], **changes: Any) -> str:
    measured = {name: {"status": "done", "device": "Test GPU", "rows": rows} for name, rows in parts.items()}
    report = {"version": 1, "date": "2026-01-02T03:04:05+00:00", "tiny": False, "parts": measured}
    machine = {"commit": "0123456789abcdef"}
    path = folder / "report.json"
    path.write_text(json.dumps(report | {"machine": machine} | changes))
    return str(path)
