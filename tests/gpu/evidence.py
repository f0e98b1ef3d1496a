"""The record of one run: every section guarded, written to disk as soon as it ends."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Evidence", "tail"]


class Evidence:
    """Collects sections; `NAME.md` for people and `NAME.json` for programs stand after each of them."""

    def __init__(self, name: str, title: str, out: Path) -> None:
        self._path = out / name
        self._started = time.monotonic()
        self._data: dict[str, Any] = {"title": title, "environment": environment(), "sections": {}}
        self._text = [f"# {title}", "", *_environment_lines(self._data["environment"])]
        self.failed: list[str] = []
        out.mkdir(parents=True, exist_ok=True)
        self._write()

    @property
    def elapsed(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self._started

    def section(self, title: str, work: Callable[[Evidence], bool]) -> None:
        """Run one part; `work` adds its own tables and says whether everything held.

        An exception is written down and ends the section only.
        """
        started = time.monotonic()
        self._text += ["", f"## {title}", ""]
        print(f"== {title}", flush=True)  # noqa: T201 - progress of a script
        try:
            held = work(self)
            outcome = "holds" if held else "DOES NOT HOLD"
        except Exception:  # noqa: BLE001 - the next section still runs
            held, outcome = False, "FAILED TO RUN"
            self.text("```\n" + traceback.format_exc()[-6000:] + "\n```")
        if not held:
            self.failed.append(title)
        seconds = time.monotonic() - started
        self._data["sections"].setdefault(title, {})["outcome"] = outcome
        self._text += ["", f"**{outcome}** ({seconds:.0f} s)"]
        print(f"   {outcome}, {seconds:.0f} s, {self.elapsed:.0f} s in all", flush=True)  # noqa: T201
        self._write()

    def table(self, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to the section; columns are the union of their keys."""
        columns = list(dict.fromkeys(key for row in rows for key in row))
        if title not in self._data["sections"]:
            self._data["sections"][title] = {}
        self._data["sections"][title]["rows"] = [dict(row) for row in rows]
        if not columns:
            return
        self._text += ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
        for row in rows:
            self._text.append("| " + " | ".join(_cell(row.get(column)) for column in columns) + " |")
            print("   ", {key: row[key] for key in row if row[key] not in (None, "")}, flush=True)  # noqa: T201

    def text(self, text: str) -> None:
        """Add a paragraph to the section."""
        self._text += ["", text, ""]
        print(text[-3000:], flush=True)  # noqa: T201

    def data(self, key: str, value: object) -> None:
        """Keep a value in the JSON file only."""
        self._data.setdefault("data", {})[key] = value

    def finish(self) -> int:
        """Write the summary; the exit status of the script."""
        failed = ", ".join(self.failed) or "none"
        self._text += ["", "## Summary", "", f"Sections that did not hold: {failed}. {self.elapsed:.0f} s in all."]
        self._write()
        print(f"== not held: {failed}", flush=True)  # noqa: T201
        return 1 if self.failed else 0

    def _write(self) -> None:
        self._path.with_suffix(".md").write_text("\n".join(self._text) + "\n")
        self._path.with_suffix(".json").write_text(json.dumps(self._data, indent=1, default=str))


def environment() -> dict[str, str]:
    """When, where and with what this runs; asked in a process of its own, so that no GPU context stays."""
    code = (
        "import torch, json, vllm; n = torch.cuda.device_count();"
        "nccl = '.'.join(map(str, torch.cuda.nccl.version())) if n else '';"
        "link = [torch.cuda.can_device_access_peer(0, i) for i in range(1, n)];"
        "print(json.dumps({'torch': torch.__version__, 'cuda': str(torch.version.cuda), 'vllm': vllm.__version__,"
        "'gpus': ', '.join(torch.cuda.get_device_name(i) for i in range(n)) or 'none', 'nccl': nccl,"
        "'peer access': str(link)}))"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = [line for line in asked.stdout.splitlines() if line.startswith("{")]
    found: dict[str, str] = json.loads(lines[-1]) if lines else {"error": asked.stderr[-500:]}
    return {
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "driver": _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0],
        "links": _ask("nvidia-smi", "topo", "-m").strip(),
        "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores",
        **found,
    }


def _environment_lines(found: Mapping[str, str]) -> list[str]:
    lines = [f"- {key}: {value}" for key, value in found.items() if key != "links"]
    if found.get("links", "none") != "none":
        lines += ["", "```", found["links"], "```"]
    return [*lines, "", "torch is the machine's own, which may be older than the version vLLM's wheel pins."]


def _ask(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout or "none"
    except (OSError, subprocess.CalledProcessError):
        return "none"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "/").replace("\n", " ")[:300]


def tail(path: Path, lines: int) -> str:
    """The end of a log, or nothing where there is none."""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""
