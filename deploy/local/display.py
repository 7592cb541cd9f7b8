"""What `springtide up` shows: a line a process with a spinner on a terminal, plain lines elsewhere, and what the logs warn of."""

from __future__ import annotations

import contextlib
import sys
import time
from types import TracebackType
from typing import IO, Any, Protocol, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn


class Display(Protocol):
    """Shows steps (named, begun, ended) and messages. A context manager."""

    def __enter__(self) -> Display: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def step(self, name: str, state: str, done: bool = False) -> None: ...

    def message(self, text: str) -> None: ...

    def end_of_start(self) -> None:
        """Notes that every step is done: from now on what happens is worth a line of its own."""
        ...


class PlainDisplay:
    """Prints a line for each change, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass

    def step(self, name: str, state: str, done: bool = False) -> None:
        self.message(f"[{time.monotonic() - self._began:5.1f} s] {name}: {state}")

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def end_of_start(self) -> None:
        pass


class LiveDisplay:
    """A spinner a step until all are done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<18}"),
            TextColumn("{task.fields[state]}", style="dim"),
        )
        self._progress = Progress(*columns, console=console)
        self._tasks: dict[str, TaskID] = {}
        self._starting = True

    def __enter__(self) -> LiveDisplay:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def step(self, name: str, state: str, done: bool = False) -> None:
        if not self._starting:
            self.message(f"{name}: {state}")
            return
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=1, state=state)
        self._progress.update(self._tasks[name], state=escape(state), completed=int(done))

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def end_of_start(self) -> None:
        self._progress.stop()
        self._starting = False


class _Unheeded:
    """An output that may be gone, or have no room for more: whoever writes to it goes on."""

    def __init__(self, output: IO[str]) -> None:
        self._output = output

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._output.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._output.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._output, name)


def new_display() -> Display:
    """On the standard output. A cluster does not end with who reads it."""
    console = Console(file=cast(IO[str], _Unheeded(sys.stdout)), highlight=False)
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)
