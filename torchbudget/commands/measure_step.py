"""`measure`: the cost of a training step that a module defines."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torchbudget.commands import pages, size_files
from torchbudget.commands.answer import Answer, UsageError
from torchbudget.cost.measuring.measure import measure_cost
from torchbudget.cost.models.measured import MeasuredCost
from torchbudget.errors import CostError
from torchbudget.units import parse_bytes

HELP: Final = "the cost of a training step, into a file"
DESCRIPTION: Final = """\
Measure the peak bytes of a training step, and save them as a cost. The function takes nothing, and
returns the step and what makes its batches, as measure_cost takes them:

  # train.py
  def to_measure():
      model = ...
      def step(batch): ...         # forward, loss, backward, optimizer.step, zero_grad
      def make_batch(n, size): ... # a batch of n samples padded to a size
      return step, make_batch

  python -m torchbudget measure train:to_measure --budget 8GiB --max-size 2048 -o cost.json

The module is looked up in the current folder first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes to its parser."""
    parser.add_argument("function", metavar="MODULE:FUNCTION", help="returns step, make_batch")
    parser.add_argument(
        "--max-size", type=_size, metavar="N", help="the largest size; several axes: 480x640"
    )
    parser.add_argument("--min-size", type=_size, metavar="N", help="the smallest size")
    parser.add_argument("--sizes", metavar="FILE", help="instead of --max-size: " + size_files.HELP)
    parser.add_argument("--budget", help='the device\'s bytes, which no run exceeds, as "8GiB"')
    parser.add_argument(
        "--method", choices=("auto", "trace", "run"), help="default: auto; without --budget, trace"
    )
    parser.add_argument("--device", help='that the step runs on, or with "trace" will run on')
    parser.add_argument("--size-multiple", type=int, default=1, metavar="N")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="the cost, as JSON")
    parser.add_argument("--figure", metavar="FILE", type=Path, help="a .png, .svg or .pdf of it")


def _size(text: str) -> int | tuple[int, ...]:
    sizes = tuple(map(int, text.split("x")))
    return sizes[0] if len(sizes) == 1 else sizes


def run(options: argparse.Namespace) -> Answer:
    """Measure, and write what was asked for."""
    if options.max_size is None and options.sizes is None:
        raise UsageError("give --max-size, or the --sizes of a data set")
    sizes = None if options.sizes is None else size_files.read_sizes(options.sizes)
    step, make_batch = _returned(options.function)
    try:
        cost = measure_cost(
            step,
            make_batch,
            max_size=options.max_size,
            min_size=options.min_size,
            sizes=sizes,
            budget=options.budget,
            method=options.method or ("trace" if options.budget is None else "auto"),
            device=options.device,
            size_multiple=options.size_multiple,
        )
    except CostError as error:
        return Answer(failed=(str(error),))
    _save(cost, options)
    return Answer(text=cost.report())


def _returned(name: str) -> tuple[Callable[[Any], object], Callable[[int, Any], Any]]:
    """What the named function returns: the step, and what makes its batches.

    Raises:
        UsageError: there is no such function, or it returns something else. What the module or the
            function itself raises is passed on, with its traceback.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise UsageError(f"expected MODULE:FUNCTION, such as train:to_measure, got {name!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # what the module itself imports
        raise UsageError(f"there is no module {module_name!r} here, nor installed") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"{module_name} has no function {function_name!r}")
    found = function()
    if not isinstance(found, tuple) or len(found) != 2 or not all(map(callable, found)):
        raise UsageError(f"{name} must return the step and make_batch, returned {found!r}")
    return found


def _save(cost: MeasuredCost, options: argparse.Namespace) -> None:
    if options.output is not None:
        try:
            cost.save(options.output)
        except OSError as error:
            raise UsageError(f"cannot write {options.output}: {error.strerror}") from error
    if options.figure is not None:
        from torchbudget.observe.figures import plot_cost

        budget = None if options.budget is None else parse_bytes(options.budget)
        one_axis = cost.axes == 1
        figure = plot_cost(cost, budget_bytes=budget) if one_axis else cost.plot()
        pages.save_figure(figure, options.figure)
