"""`python -m torchbudget`: see `torchbudget.commands`."""

from __future__ import annotations

import sys

from torchbudget.commands.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
