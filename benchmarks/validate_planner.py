"""How near the planner comes to published trainings: predicts rows of published tables on the shipped clusters.

    python benchmarks/validate_planner.py
    python benchmarks/validate_planner.py -o validate.h5 --plot validate.png
    python benchmarks/validate_planner.py --calibrate a100-selene

The rows are in benchmarks/published, with their sources and what had to be assumed. Constants of the shipped clusters
were chosen with the rows marked "calibration" alone; "test" rows count in the summary; "shared" rows are whole steps of
runs whose stages or blocks calibrate, and are counted apart; "extra" rows are shown, and their file tells why they do
not count. Closed forms (bytes of ZeRO, parameters, MFU and HFU of a known time, bubbles of
known stage times) have to agree to the last digit that is printed. Errors are of throughput: above 0 the planner is
faster than what was published. The exit code is 1 where a goal is missed: four fifths of the test rows within 10 %, all
of them within 20 %, closed forms exact.
"""

import argparse
import sys
from pathlib import Path

from validate_planner_calibrate import points
from validate_planner_predict import compared
from validate_planner_report import lines, missed, plot, said, scaling, summary, write
from validate_planner_rows import tables

from hpcdist.errors import HpcdistError
from hpcdist.hdf5 import files
from hpcdist.telemetry.provenance import provenance


def arguments() -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", nargs="+", help="files in benchmarks/published; default: all")
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file to write; must not exist")
    parser.add_argument("--plot", type=Path, help="picture to write")
    parser.add_argument(
        "--calibrate", metavar="CLUSTER", help="errors of its calibration rows over a grid of constants"
    )
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args()


def main() -> None:
    """Predict, print and write."""
    options = arguments()
    for path in (options.output, options.plot):
        if path is not None:
            files.check_place(path)
    known = tables()
    if options.calibrate:
        print(f"{'memory share':>12}{'curve x':>9}{'score':>8}{'worst':>8}")
        for point in sorted(points(known, options.calibrate), key=lambda one: one.score):
            print(f"{point.share:12.2f}{point.factor:9.2f}{100 * point.score:7.2f}%{100 * point.worst:7.1f}%")
        return
    chosen = options.table or list(known)
    if missing := [name for name in chosen if name not in known]:
        sys.exit(f"no table {', '.join(missing)}; there are {', '.join(known)}")
    found = [one for name in chosen for one in compared(known[name])]
    print("\n".join(lines(found, known)))
    if not options.table:
        print("\n".join(said(summary(found))))
    print("\n".join(scaling(found)))
    if options.output is not None:
        write(options.output, found, provenance(anonymous=options.anonymous))
        print(f"all comparisons are in {options.output}")
    if options.plot is not None:
        plot(options.plot, found, known)
        print(f"the picture is {options.plot}")
    if goals := missed(summary(found)):
        sys.exit(f"missed: {'; '.join(goals)}")


if __name__ == "__main__":
    try:
        main()
    except HpcdistError as error:
        sys.exit(f"{type(error).__name__}: {error}")
