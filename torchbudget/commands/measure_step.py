"""`measure`: the cost of a training step that a module defines."""

from __future__ import annotations

import argparse
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torchbudget.commands import Answer, Command
from torchbudget.commands.plan_epoch import SIZES_HELP, read_sizes
from torchbudget.cost.measure import measure_cost
from torchbudget.errors import CostError, OptionError

_DESCRIPTION: Final = """\
Measure the peak bytes of a training step, and save them as a cost. The function takes nothing, and
returns the step and a function that makes its batches, as measure_cost takes them:

  # train.py
  def to_measure():
      model = ...
      def step(batch): ...         # forward, loss, backward, optimizer.step, zero_grad
      def make_batch(n, size): ... # a batch of n samples padded to a size
      return step, make_batch

  python -m torchbudget measure train:to_measure --budget 8GiB --max-size 2048 -o cost.json

The module is looked up in the current folder first."""


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("function", metavar="MODULE:FUNCTION", help="returns step, make_batch")
    add("--max-size", type=_size, metavar="N", help="the largest size; several axes: 480x640")
    add("--min-size", type=_size, metavar="N", help="the smallest size")
    add("--sizes", metavar="FILE", help=f"instead of --max-size: {SIZES_HELP}")
    add("--budget", help='the device\'s bytes, which no run exceeds, as "8GiB"')
    add("--method", choices=("auto", "trace", "run"), help="default: auto; without --budget, trace")
    add("--device", help='that the step runs on, or with "trace" will run on')
    add("--size-multiple", type=int, default=1, metavar="N")
    add("--accumulate", action="store_true", help="several micro-batches make an optimizer step")
    add("-o", "--output", metavar="FILE", type=Path, help="the cost, as JSON")


def _size(text: str) -> int | tuple[int, ...]:
    sizes = tuple(map(int, text.split("x")))
    return sizes[0] if len(sizes) == 1 else sizes


def _run(options: argparse.Namespace) -> Answer:
    if options.max_size is None and options.sizes is None:
        raise OptionError("give --max-size, or the --sizes of a data set")
    step, make_batch = _step(options.function)
    try:
        cost = measure_cost(
            step,
            make_batch,
            max_size=options.max_size,
            min_size=options.min_size,
            sizes=None if options.sizes is None else read_sizes(options.sizes),
            budget=options.budget,
            method=options.method or ("trace" if options.budget is None else "auto"),
            device=options.device,
            size_multiple=options.size_multiple,
            accumulate=options.accumulate,
        )
    except CostError as error:
        return Answer(failed=(str(error),))
    if options.output is not None:
        try:
            cost.save(options.output)
        except OSError as error:
            raise OptionError(f"cannot write {options.output}: {error.strerror}") from error
    return Answer(text=cost.report())


def _step(name: str) -> tuple[Callable[[Any], object], Callable[[int, Any], Any]]:
    """The step and the function that makes its batches, as the named function returns them.

    Raises:
        OptionError: the function returns something else. Errors of the module or of the function
            itself are passed on, with their traceback.
    """
    if ":" not in name:
        raise OptionError(f"expected MODULE:FUNCTION, such as train:to_measure, got {name!r}")
    found = pkgutil.resolve_name(name)()
    if not isinstance(found, tuple) or len(found) != 2 or not all(map(callable, found)):
        raise OptionError(f"{name} must return the step and make_batch, got {found!r}")
    return found


_HELP: Final = "the cost of a training step, into a file"
MEASURE: Final = Command(_HELP, _DESCRIPTION, _add_arguments, _run)
