"""The parser of all commands, and what becomes of their answers and errors."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Final, TypeAlias

import torchbudget
from torchbudget.commands import (
    inspect_machine,
    measure_step,
    plan_epoch,
    report_run,
    watch_command,
)
from torchbudget.commands.answer import Answer, UsageError
from torchbudget.errors import TorchBudgetError, TorchBudgetWarning

Run: TypeAlias = Callable[[argparse.Namespace], Answer]

_COMMANDS: Final = {
    "inspect": inspect_machine,
    "plan": plan_epoch,
    "measure": measure_step,
    "watch": watch_command,
    "report": report_run,
}
_USED_WRONGLY: Final = 2
_INTERRUPTED: Final = 130  # as a shell has it: 128 and SIGINT
_EPILOG: Final = """\
exit codes: 0: done; 1: the answer is no (a check failed, sizes do not fit, a step cannot be
measured); 2: used wrongly. Results go to stdout, messages to stderr."""


def parser() -> argparse.ArgumentParser:
    """Of all commands."""
    top = argparse.ArgumentParser(
        prog="python -m torchbudget",
        description="Memory budgets for PyTorch's DataLoaders: look before you train.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=torchbudget.__version__)
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=module.run)
        module.add_arguments(command)
    return top


def main(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
        arguments: without the program's name.

    Returns:
        The exit code.
    """
    options = parser().parse_args(arguments)
    run: Run = options.run
    try:
        with _warnings_in_a_line(), redirect_stdout(sys.stderr):  # stdout is for the answer
            answer = run(options)
    except (UsageError, TorchBudgetError) as error:
        _say(error)
        return _USED_WRONGLY
    except KeyboardInterrupt:
        return _INTERRUPTED
    _write(answer.text)
    for line in answer.failed:
        _say(line)
    return answer.exit_code


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
    """Show warnings as messages, without the place in the code that they come from."""

    def show(message: Warning | str, *_: object, **__: object) -> None:
        _say(f"warning: {message}")

    with warnings.catch_warnings():  # which also restores this
        warnings.showwarning = show
        warnings.simplefilter("always", TorchBudgetWarning)  # which tell, and end nothing
        yield
