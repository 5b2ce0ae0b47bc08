"""What do ranks send each other before the first batch?

Question: at the first `iter` ranks compare what they plan by. How many bytes does each rank receive
for it, from the other ranks and from the store by which gloo connects them, as ranks grow? With
gloo's default, which connects each rank with each other one when the group is made, and with
`TORCH_GLOO_LAZY_INIT=1`, which connects those that meet.

Command: PYTHONPATH=. python examples/benchmarks/compared.py [--most-ranks R] [--json PATH]

Hardware: 2 cores of an Intel Xeon at 2.8 GHz, Python 3.11, torch 2.13.0 CPU, Linux; no figure
depends on it.

    connected        ranks  store, bytes  rank 0, bytes  packets  others, bytes  their packets
    all                  2           364          1,180       15          1,180             15
    all                  4           788          3,540       45          3,244             39
    all                  8         1,828          8,260      105          7,372             88
    all                 16         4,676         17,700      225         15,628            185
    all                 32        13,444         36,580      465         32,140            377
    all                 64        43,268         74,196      944         65,164            765
    those that meet      2           168          1,180       15          1,188             16
    those that meet      4           496          3,556       47          3,260             42
    those that meet      8         1,152          8,300      111          7,396             92
    those that meet     16         2,464         17,812      239         15,644            185
    those that meet     32         5,088         36,660      475         32,164            379
    those that meet     64        10,336         74,724      994         65,188            765

Counted by the kernel, for each TCP connection of a rank; the most of any rank. `store` is all that
a rank receives from the store until its first batch: 8·R² + 164·R + 4 bytes for R ranks by default,
and 164·(R - 1) + 4 if those connect that meet. The other columns are what `iter` makes ranks
receive from each other: one barrier, in which rank 0 hears from all, and two `all_gather`, which
pass what each rank has around a ring. They send as much as they receive.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import struct
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from _common import Results, options

from torchbudget import MemoryBudgetBatchSampler, PaddedCost

RANKS = (2, 4, 8, 16, 32, 64)
WAYS = {"all": "0", "those that meet": "1"}
# In `struct tcp_info` of Linux: bytes that were received, and segments of data.
RECEIVED, SEGMENTS = 128, 152


def received(store_port: int) -> dict[str, int]:
    """Bytes and packets that this process has received, over its open connections."""
    found = {"store": 0, "bytes": 0, "packets": 0}
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as one:
                port = one.getpeername()[1]
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # no connection
            continue
        (size,) = struct.unpack_from("Q", info, RECEIVED)
        if port == store_port:
            found["store"] += size
        else:
            found["bytes"] += size
            found["packets"] += struct.unpack_from("I", info, SEGMENTS)[0]
    return found


def rank_main(rank: int, ranks: int, port: int, lazy: str, folder: str) -> None:
    """Begin an epoch, and write what came."""
    torch.set_num_threads(1)
    os.environ["TORCH_GLOO_LAZY_INIT"] = lazy
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    time.sleep(1)  # until what others have sent has come
    before = received(port)
    sizes = range(1, 1001)
    iter(MemoryBudgetBatchSampler(sizes, PaddedCost(unit_bytes=1), 2000, samples_per_step=500))
    after = received(port)
    came = {name: after[name] - before[name] for name in after} | {"store": after["store"]}
    Path(folder, f"{rank}.json").write_text(json.dumps(came))
    store.set(f"{rank} is done", "")
    store.wait([f"{one} is done" for one in range(ranks)])
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo may still need the interpreter


def count(ranks: int, lazy: str) -> list[dict[str, Any]]:
    """What each rank has received."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    with TemporaryDirectory() as folder:
        processes = [
            context.Process(target=rank_main, args=(rank, ranks, store.port, lazy, folder))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(ranks)]


def main() -> None:
    settings = options(__doc__, most_ranks=64)
    multiprocessing.set_forkserver_preload(["torch._dynamo", "torchbudget"])
    results = Results(
        {
            "connected": "",
            "ranks": "d",
            "store, bytes": ",d",
            "rank 0, bytes": ",d",
            "packets": ",d",
            "others, bytes": ",d",
            "their packets": ",d",
        }
    )
    for way, lazy in WAYS.items():
        for ranks in [few for few in RANKS if few <= settings.most_ranks]:
            first, *others = count(ranks, lazy)
            results.row(
                **{
                    "connected": way,
                    "ranks": ranks,
                    "store, bytes": max(one["store"] for one in (first, *others)),
                    "rank 0, bytes": first["bytes"],
                    "packets": first["packets"],
                    "others, bytes": max(one["bytes"] for one in others),
                    "their packets": max(one["packets"] for one in others),
                }
            )
    results.finish(settings.json)


if __name__ == "__main__":
    main()
