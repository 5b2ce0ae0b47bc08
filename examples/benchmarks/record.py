"""Run benchmarks and write what they print into their docstrings.

Command: python examples/benchmarks/record.py [NAME [ARGUMENT ...]]

Without a name all run, one after the other, on a machine that should have nothing else to do. The
interpreter should be one in which the peers are installed. What stands indented in a benchmark's
docstring is its table, and is replaced.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ALL = (
    "train_text_compared",
    "planning",
    "first_batch",
    "plan_large",
    "few_samples",
    "padding",
    "ranks",
    "rank_speed",
    "fairness",
    "scatter",
    "plan_step",
    "least_time",
    "alternatives",
    "packing",
    "several_axes",
    "several_limits",
    "collate",
    "loader",
    "columns",
    "streams",
    "tracked",
    "stop_together",
    "compared",
    "any_model",
    "any_model_cpu",
    "kept_budget",
    "malloc_settings",
    "host_budget",
    "accumulate",
    "gradient_error",
    "predict",
    "monitor_overhead",
)
TABLE = re.compile(r"(?:^    .*\S.*\n)+", re.MULTILINE)


def with_table(source: str, printed: str) -> str:
    """The script's source with the first indented block replaced."""
    table = "".join(f"    {line}\n" for line in printed.splitlines())
    head, docstring, rest = source.split('"""', 2)
    replaced, times = TABLE.subn(lambda _: table, docstring, count=1)
    if not times:
        raise ValueError(
            "the docstring has no table to replace: indent a line where it is to stand"
        )
    return '"""'.join((head, replaced, rest))


def main() -> None:
    names = sys.argv[1:2] or ALL
    for name in names:
        path = FOLDER / f"{name}.py"
        print(f"== {name}", flush=True)
        command = [sys.executable, str(path), *sys.argv[2:]]
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(finished.stdout, flush=True)
        path.write_text(with_table(path.read_text(), finished.stdout))


if __name__ == "__main__":
    main()
