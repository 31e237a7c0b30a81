"""torchrun, with the exit code of the rank that failed first in place of 1: python torchrun.py TORCHRUN'S WORDS"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder, whose names are not for torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main()
    except ChildFailedError as error:
        sys.exit(error.get_first_failure()[1].exitcode)  # of a rank that a signal ended, 256 less its number
