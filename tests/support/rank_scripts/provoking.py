"""A rank that does what meets an error, and writes what it has met."""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from tests.support.provocations import collected

dist.init_process_group("gloo")
folder = Path(sys.argv[1])
(folder / f"{dist.get_rank()}.json").write_text(json.dumps(collected(sys.argv[2], folder)))
