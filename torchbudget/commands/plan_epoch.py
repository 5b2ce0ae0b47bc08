"""`plan`: what an epoch would be under a budget."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from torchbudget.commands import costs, pages, size_files
from torchbudget.commands.answer import Answer, as_json
from torchbudget.data.sampler import MemoryBudgetBatchSampler
from torchbudget.errors import OversizeError, UnevenRanksError
from torchbudget.plan.report import PlanReport

HELP: Final = "what an epoch would be under a budget"
DESCRIPTION: Final = """\
Plan an epoch of samples of these sizes under a budget, and report it: fill, padding, numbers of
micro-batches and samples, imbalance of ranks. Nothing is read but the sizes.

  python -m torchbudget plan sizes.npy --budget 8GiB --cost cost.json
  python -m torchbudget plan lengths.txt --budget 16384 --cost tokens --html plan.html"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes to its parser."""
    parser.add_argument("sizes", metavar="SIZES", help=size_files.HELP)
    parser.add_argument("--budget", required=True, help='the device\'s bytes, such as "8GiB"')
    parser.add_argument("--cost", required=True, help=costs.HELP)
    parser.add_argument("--packed", action="store_true", help="batches without padding")
    _add_rules(parser.add_argument_group("batches, as MemoryBudgetBatchSampler's arguments"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="JSON instead of a table")
    output.add_argument(
        "--figure", metavar="FILE", type=Path, help="draw sizes and padding: .png, .svg, .pdf"
    )
    output.add_argument("--html", metavar="FILE", type=Path, help="one page with figures in it")
    output.add_argument(
        "--min-fill", type=_share, metavar="SHARE", help="fail where the fill is lower, such as 0.9"
    )


def _share(text: str) -> float:
    share = float(text)
    if not 0 <= share <= 1:  # nan is not: nothing is below it
        raise argparse.ArgumentTypeError(f"expected a share from 0 to 1, got {text}")
    return share


def _add_rules(group: Any) -> None:
    group.add_argument("--samples-per-step", type=int, metavar="N")
    group.add_argument("--window", type=int, metavar="N")
    group.add_argument("--ranks", type=int, metavar="N", default=1)
    group.add_argument("--max-batch-size", type=int, metavar="N")
    group.add_argument("--batch-size-multiple", type=int, metavar="N", default=1)
    group.add_argument("--size-multiple", type=int, metavar="N", default=1)
    group.add_argument("--oversize", choices=("raise", "skip", "alone"), default="raise")
    group.add_argument("--drop-last", action="store_true")
    group.add_argument("--seed", type=int, metavar="N", default=0)


def run(options: argparse.Namespace) -> Answer:
    """Plan, and write what was asked for."""
    try:
        sampler = _sampler(options)
        report = sampler.report()
    except (OversizeError, UnevenRanksError) as error:
        return Answer(failed=(str(error),))
    if options.figure is not None:
        from torchbudget.observe.figures import plot_sizes

        pages.save_figure(plot_sizes(sampler.plan), options.figure)
    if options.html is not None:
        pages.save(options.html, _page(options, sampler, report))
    failed = []
    if options.min_fill is not None and report.fill < options.min_fill:
        failed.append(f"the fill is {report.fill:.1%}, below {options.min_fill:.1%}")
    text = as_json(asdict(report)) if options.json else str(report)
    return Answer(text=text, failed=tuple(failed))


def _sampler(options: argparse.Namespace) -> MemoryBudgetBatchSampler:
    return MemoryBudgetBatchSampler(
        size_files.read_sizes(options.sizes),
        costs.read_cost(options.cost, packed=options.packed),
        options.budget,
        samples_per_step=options.samples_per_step,
        window=options.window,
        num_replicas=options.ranks,
        rank=0,
        max_batch_size=options.max_batch_size,
        batch_size_multiple=options.batch_size_multiple,
        size_multiple=options.size_multiple,
        oversize=options.oversize,
        drop_last=options.drop_last,
        seed=options.seed,
    )


def _page(
    options: argparse.Namespace, sampler: MemoryBudgetBatchSampler, report: PlanReport
) -> str:
    """The report as a page with figures in it."""
    from torchbudget.observe import figures

    plan = sampler.plan
    costliest = plan.sizes.values[sampler.extremes()["largest"]]
    first = costliest.reshape(len(costliest), -1)[:, 0]
    multiple = plan.rules.size_multiple
    return pages.page(
        f"Plan of {options.sizes}",
        pages.paragraph(f"Budget {options.budget}, cost {options.cost}."),
        pages.table([("figure", "value"), *report.rows]),
        *(pages.paragraph(f"Advice: {advice}") for advice in report.advice),
        pages.picture(figures.plot_sizes(plan), "Elements by the size of their samples"),
        pages.picture(
            figures.plot_batch(first, size_multiple=multiple), "The costliest micro-batch"
        ),
    )
