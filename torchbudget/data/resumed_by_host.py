"""Whether a framework goes on from a checkpoint that has no position of a sampler or a stream."""

from __future__ import annotations

from torchbudget.data.host_loop import host_loop
from torchbudget.errors import StateError


def check_not_resumed() -> None:
    """Raise where the caller is asked for its number of batches by a training that goes on.

    Lightning begins its loader before it chooses the epoch, and reads ahead of what a
    `StatefulDataLoader` saves. The Trainer counts epochs and batches back from its steps, by the
    first epoch's `len`, and passes over as many batches, whatever they were under the budget and
    the ranks of before. Each of them asks for `len` first, in the process that trains.

    Raises:
        StateError: samples would be lost, or come again. An adapter is asked in its place.
    """
    host = host_loop()
    if host is None or not host.reads or host.resumed is None:
        return
    otherwise = f"leave {host.resumed} out"
    if host.framework == "transformers":
        if host.loop.args.ignore_data_skip:
            return
        otherwise = "load its own state and set ignore_data_skip=True"
    raise StateError(
        f"{host.framework} goes on from {host.resumed}, which has no position of this sampler or "
        f"stream: samples would be lost, or come again. Use {host.instead}, whose checkpoints "
        f"have it, or {otherwise}"
    )
