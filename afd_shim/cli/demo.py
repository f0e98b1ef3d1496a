"""`afd-shim demo`: two real vLLM servers, one per role, against one unsplit server."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from afd_shim.testing.checkpoints import Checkpoint, Role
    from afd_shim.testing.comparison import SplitRun
    from afd_shim.testing.servers import Completion

__all__ = ["demo"]

FAMILIES = ("deepseek-v2", "deepseek-v3", "qwen3-moe", "qwen3-next", "olmoe")
QUICK_FAMILIES = ("deepseek-v2",)

# An unsplit server keeps one core busy while it starts: two at a time share a small machine well.
_UNSPLIT_AT_ONCE = 2


def demo(
    quick: Annotated[bool, typer.Option("--quick", help="One model only: about 3 minutes.")] = False,  # noqa: FBT002 - typer's way to declare a flag
) -> None:
    """Serve tiny random models unsplit and split, and show that every token is the same.

    Makes the checkpoints, starts real vLLM servers on this machine, and prints one row per model and
    gate placement. Fails unless all tokens are identical, every MoE layer of every forward was one
    exchange, each role read no more than it owns, and zeroing an expert on the FFN changes the output.
    """
    from rich.console import Console
    from rich.markup import escape

    from afd_shim.compat import installed_release
    from afd_shim.testing.servers import ServerError

    # The servers live in process groups of their own: end by an exception, so that they are stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    console = Console()
    directory = Path(tempfile.mkdtemp(prefix="afd-demo-"))
    started = time.monotonic()
    console.print(f"vLLM {installed_release()}, Python {sys.version.split()[0]}; checkpoints and logs in {directory}")
    try:
        runs = _run(QUICK_FAMILIES if quick else FAMILIES, directory, console)
    except ServerError as error:
        console.print(f"[red]{escape(str(error))}[/red]", markup=True, highlight=False)
        console.print(f"The servers' logs are in {directory / 'logs'}.")
        raise typer.Exit(1) from error
    console.print(_table(runs))
    failures = [f"{run.checkpoint.family.name}, gate {run.gate}: {what}" for run in runs for what in run.failures()]
    for failure in failures:
        console.print(f"[red]FAILED[/red] {escape(failure)}", highlight=False)
    if failures:
        console.print(f"The servers' logs are in {directory / 'logs'}.")
        raise typer.Exit(1)
    shutil.rmtree(directory)
    console.print(
        f"[green]All {len(runs)} split deployments gave the tokens of unsplit vLLM[/green] "
        f"({time.monotonic() - started:.0f} s).",
        highlight=False,
    )


def _run(families: Sequence[str], directory: Path, console: Console) -> list[SplitRun]:
    """Run every model, unsplit first, then each gate placement."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from afd_shim.testing.checkpoints import write_checkpoint
    from afd_shim.testing.comparison import run_split

    checkpoints = [write_checkpoint(family, directory / family) for family in families]
    cases = [(one, gate) for one in checkpoints for gate in one.family.gate_placements]
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("unsplit vLLM", total=len(checkpoints) + len(cases))
        expected = dict(zip(families, _unsplit(checkpoints, directory / "logs", progress), strict=True))
        runs = []
        for checkpoint, gate_on_attention in cases:
            name = checkpoint.family.name
            progress.update(task, description=f"{name}, split")
            started = time.monotonic()
            run = run_split(
                checkpoint,
                directory / "logs" / f"{name}-gate-{'attention' if gate_on_attention else 'default'}",
                expected=expected[name],
                compute_gate_on_attention=gate_on_attention,
            )
            runs.append(run)
            progress.advance(task)
            verdict = "[red]differs[/red]" if run.failures() else "identical"
            progress.console.print(f"{name}, split, gate {run.gate}: {verdict} ({time.monotonic() - started:.0f} s)")
    return runs


def _unsplit(checkpoints: Sequence[Checkpoint], logs: Path, progress: Progress) -> Iterable[tuple[Completion, ...]]:
    """What unsplit vLLM generates, in the order of the checkpoints."""
    from afd_shim.testing.comparison import run_unsplit

    def run(numbered: tuple[int, Checkpoint]) -> tuple[Completion, ...]:
        index, checkpoint = numbered
        started = time.monotonic()
        outputs = run_unsplit(checkpoint, logs, core=index % _UNSPLIT_AT_ONCE)
        progress.advance(progress.task_ids[0])
        progress.console.print(f"{checkpoint.family.name}, unsplit: done ({time.monotonic() - started:.0f} s)")
        return outputs

    with ThreadPoolExecutor(_UNSPLIT_AT_ONCE) as pool:
        return list(pool.map(run, enumerate(checkpoints)))


def _table(runs: Iterable[SplitRun]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title="One unsplit server against one Attention and one FFN server",
        caption="read: bytes read from the checkpoint, and their ratio to what the role owns (1.00 is ideal)\n"
        "us: mean time of an exchange on the Attention side, experts included",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("model", no_wrap=True)
    table.add_column("gate", no_wrap=True)
    for name in ("tokens", "Attention read", "FFN read", "exchanges", "us"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        total = sum(len(one.token_ids) for one in run.expected)
        table.add_row(
            run.checkpoint.family.name,
            run.gate,
            f"{run.identical_tokens}/{total}",
            _reads(run, "attention"),
            _reads(run, "ffn"),
            f"{run.exchanges}={len(run.checkpoint.moe_layers)}x{run.forwards}",
            f"{run.microseconds_per_exchange:.0f}",
            style="red" if run.failures() else "",
        )
    return table


def _reads(run: SplitRun, role: Role) -> str:
    reads = run.reads[role]
    return f"{reads.read / 1e6:.2f} MB {reads.ratio:.2f}"
