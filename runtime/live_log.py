"""The log of a run as it goes: a line for each step in ``log.jsonl`` of the output folder, as soon as it is known.

The file only grows, so that it can be followed; a full disk costs lines until there is room again, never the run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from lazysched.outputs import free_number
from lazysched.runtime.folders import is_own_file
from lazysched.step_rows import LOG_FILE, StepRow


class LiveLog:
    """Writes rows as they become known.

    Args:
        folder: the run's output folder, made with the first row if it is not there; its parent exists.
        rows: of the steps before, which a checkpoint brought; the file begins with them. A log of other rows that is
            there already is kept as ``log.1.jsonl``, ``log.2.jsonl`` and so on.
        warn: called with one line when the file cannot be written.
    """

    def __init__(self, folder: Path, rows: list[StepRow], warn: Callable[[str], None]) -> None:
        self._path, self._warn, self._rows = folder / LOG_FILE, warn, list(rows)
        self._is_behind = True
        """Whether the file lacks rows, or holds a part of one."""
        self._has_warned = False
        with self._forgiving():
            self._keep_log_of_another_run()
            if rows:  # a run that ends before its first step leaves nothing
                self._write_all()

    def __call__(self, row: StepRow) -> None:
        """Add a row; it is with the operating system when this returns, so that killing the process leaves it."""
        self._rows.append(row)
        with self._forgiving():
            if self._is_behind:
                self._write_all()
            else:
                self._is_behind = True
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(row.as_line())
                self._is_behind = False

    def _keep_log_of_another_run(self) -> None:
        """Give it the first free number, unless it begins with what this run has behind it."""
        if not is_own_file(self._path) or (
            self._rows and self._path.read_text(encoding="utf-8").startswith(self._text)
        ):
            return
        if self._path.stat().st_size:
            self._path.rename(free_number(self._path))

    @property
    def _text(self) -> str:
        return "".join(row.as_line() for row in self._rows)

    def _write_all(self) -> None:
        """Put a whole file in place of what is there: rows after the checkpoint come again, a part of one goes."""
        self._path.parent.mkdir(exist_ok=True)
        temporary = self._path.with_name(f"{LOG_FILE}.tmp")
        try:
            temporary.write_text(self._text, encoding="utf-8")
            temporary.replace(self._path)
            self._is_behind = False
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_warned:
                self._warn(f"{self._path}: cannot be written ({error.strerror or error}); the run goes on without it")
            self._has_warned = True
