"""`python -m torchbudget`: the parser of all commands, and the exit codes of their answers."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Final

import torchbudget
from torchbudget.commands.inspect_machine import INSPECT
from torchbudget.commands.measure_step import MEASURE
from torchbudget.commands.plan_epoch import PLAN, SIZES
from torchbudget.commands.watch_run import REPORT, WATCH
from torchbudget.errors import TorchBudgetError, TorchBudgetWarning

_COMMANDS: Final = {
    "inspect": INSPECT,
    "sizes": SIZES,
    "plan": PLAN,
    "measure": MEASURE,
    "watch": WATCH,
    "report": REPORT,
}
_EPILOG: Final = """\
exit codes: 0: done; 1: the answer is no (a check failed, sizes do not fit, a step cannot be
measured); 2: used wrongly. Results go to stdout, messages to stderr."""


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        prog="python -m torchbudget",
        description="Memory budgets for PyTorch's DataLoaders: look before you train.",
        epilog=_EPILOG,
        formatter_class=raw,
    )
    top.add_argument("--version", action="version", version=torchbudget.__version__)
    parsers = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        one = parsers.add_parser(
            name, help=command.help, description=command.description, formatter_class=raw
        )
        one.set_defaults(run=command.run)
        command.add_arguments(one)
    return top


def main(arguments: Sequence[str]) -> int:
    """Run one command, and return its exit code.

    Args:
        arguments: the arguments after the program's name.
    """
    options = parser().parse_args(arguments)
    try:
        with _warnings_in_a_line(), redirect_stdout(sys.stderr):  # stdout is for the answer
            answer = options.run(options)
    except TorchBudgetError as error:
        _say(error)
        return 2  # used wrongly
    _write(answer.text)
    for line in answer.failed:
        _say(line)
    return int(answer.code or bool(answer.failed))


def _say(message: object) -> None:
    sys.stderr.write(f"torchbudget: {message}\n")


def _write(text: str) -> None:
    """Write to stdout, whose reader may be gone."""
    try:
        sys.stdout.write(f"{text}\n" if text else "")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more when it ends, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Show warnings as messages, without their place in the code."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        _say(f"warning: {message}")

    with warnings.catch_warnings():  # which also restores this
        warnings.showwarning = show
        warnings.simplefilter("always", TorchBudgetWarning)  # never an error
        yield


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
