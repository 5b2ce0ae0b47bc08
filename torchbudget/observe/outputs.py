"""Where a monitor writes what it sees: a file, a scalar writer, a callback, warnings."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torchbudget.errors import MemoryLimitWarning, MonitorWarning, TorchBudgetWarning
from torchbudget.observe.limits import MemoryLimit
from torchbudget.observe.lines import LineFile
from torchbudget.observe.sample import MemorySample
from torchbudget.warn import warn


class ScalarWriter(Protocol):
    """What scalars are written to: TensorBoard's `SummaryWriter`, or what has its method."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Write one number."""


class Outputs:
    """Writes for a monitor; what fails is warned of once and never ends a training.

    Args:
        path: of the file, or `None`.
        writer: of scalars, or `None`.
        on_limit: the callback, or `None`.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        path: str | Path | None,
        writer: ScalarWriter | None,
        on_limit: Callable[[MemoryLimit], object] | None,
    ) -> None:
        self._lines = None if path is None else LineFile(path)
        self._run = uuid.uuid4().hex[:8]  # other monitors may write to the same file meanwhile
        self._writer = writer
        self._on_limit = on_limit
        self._warned: set[str] = set()
        self._raised: TorchBudgetWarning | None = None

    @property
    def lost_lines(self) -> int:
        """Lines that could not be written."""
        return 0 if self._lines is None else self._lines.lost

    def write(self, event: str, record: Mapping[str, Any]) -> None:
        """Append a line."""
        line = {"event": event, "run": self._run, **record}
        if self._lines is not None and not self._lines.write(line):
            self.warn(
                "lines",
                f"the monitor's file cannot be written to: {self._lines.error}; it goes on, and "
                "counts the lines that are lost",
            )

    def write_scalars(self, sample: MemorySample) -> None:
        """Write a sample's numbers; steps are milliseconds since the monitor began."""
        if self._writer is None:
            return
        try:
            for name, value in sample.known().items():
                if name != "time_s":
                    self._writer.add_scalar(f"memory/{name}", value, round(1000 * sample.time_s))
        except Exception as error:  # noqa: BLE001  (a writer's fault must not end a training)
            self._writer = None
            self.warn("writer", f"the monitor's writer raised {error!r}, and is not used any more")

    def announce(self, time_s: float, limit: MemoryLimit) -> None:
        """Warn that use has come near a limit, and call back."""
        amounts = {"used_bytes": limit.used_bytes, "limit_bytes": limit.limit_bytes}
        self.write("limit", {"time_s": time_s, "name": limit.name, **amounts})
        self.warn(f"limit {limit.name}", str(limit), MemoryLimitWarning)
        if self._on_limit is None:
            return
        try:
            self._on_limit(limit)
        except Exception as error:  # noqa: BLE001  (a user's fault must not, either)
            self.warn("callback", f"the monitor's on_limit raised {error!r}")

    def warn(
        self, key: str, text: str, category: type[TorchBudgetWarning] = MonitorWarning
    ) -> None:
        """Warn, once for each key.

        Where a filter makes an error of it, that is raised where the training calls the monitor
        next, since in the monitor's thread nobody would see it.
        """
        if key in self._warned:
            return
        self._warned.add(key)
        try:
            warn(text, category)
        except TorchBudgetWarning as warning:
            self._raised = warning

    def raise_again(self) -> None:
        """Raise the warning that a filter has made an error."""
        raised, self._raised = self._raised, None
        if raised is not None:
            raise raised

    def close(self) -> None:
        """Close the file."""
        if self._lines is not None:
            self._lines.close()
