"""``python -m hpcdist`` is the ``hpcdist`` command, and answers signals from its first moment to its last."""

import gc
import sys
from typing import Final, NoReturn

from hpcdist.comm.launch import exit_file, garbage

STARTS_OR_TRAINS: Final = ("run", "train")


def main() -> NoReturn:
    """Run the command line and leave with its exit code.

    Those that start or are the ranks of a training leave at a signal with 75 or 130 while they import what they need.
    """
    stops = sys.argv[1:2] and sys.argv[1] in STARTS_OR_TRAINS
    if stops:
        garbage.collect_seldom()  # 13 % of the time of a start; steps collect as usual
        exit_file.leave_at_signals()
    from hpcdist.cli.main import main as command  # late: it takes a quarter of a second

    try:
        command()
    finally:
        gc.freeze()  # nor is anything to be gained from looking through what ends with the process
        if stops:
            exit_file.ignore_signals()


if __name__ == "__main__":
    main()
