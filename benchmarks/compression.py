"""What compressing gradients does to the loss, and to the time between hosts with slow links.

    python benchmarks/compression.py -o compression.h5 --plot compression.png --anonymous
    python benchmarks/compression.py --parts losses --ranks 4 --only dense int8 "powersgd 4"
    sudo python benchmarks/compression.py --parts times --link 1gbit

Losses: a byte GPT of a million parameters on the source text of the standard library, trained by --ranks ranks with
every compressor of `communication.compression`, with error feedback and without. Dense gradients, and compressors of
which something is claimed, are tried with all --rates, the others with the best rate of dense ones; the best rates of
those that count are trained with further --seeds. Told are the validation loss at the end and on the way, and the bytes
that a rank sent. What hpcdist refuses is listed with its reason.

Times: the same trainings between two hosts, which are network namespaces of this machine joined by links of --link
(root only), with one rank each; dense gradients and factors go by the algorithm that is made for it, hierarchical. All
take turns in one run; before each round raw TCP is measured on the same links. The bound of a step is what it computes,
encodes and decodes, and what raw TCP needs for its bytes; "of bound" is that over the step that was measured. A loss
against time is that of the training at the pace that was measured here.

Trainings go to the file one by one: the same command goes on where it was stopped, and prints and draws what is there.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import compression_file
import compression_report
import numpy as np
from compression_file import Records
from compression_plan import COMMON, CONTENDERS, DENSE, FOUND, Study, Training

from hpcdist.bench.sweep import results
from hpcdist.comm.launch import mpirun
from hpcdist.comm.launch.environment import python_path_variables
from hpcdist.errors import HpcdistError
from hpcdist.reporting.plotting import check_plot
from hpcdist.telemetry.provenance import provenance

HERE: Final = Path(__file__).resolve().parent
EVALUATIONS: Final = 10
BURST: Final = "8kb"  # that a link lets pass at any speed after a pause
RAW_BYTES: Final = 4 << 20


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("losses", "times"), default=["losses", "times"])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--ranks", type=int, default=2, help="of the trainings for their losses (default 2)")
    parser.add_argument("--threads", action="store_true", help="ranks as threads of one process: on busy machines")
    parser.add_argument("--steps", type=int, default=500, help="of each training (default 500)")
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 2e-3, 4e-3], help="learning rates to try")
    parser.add_argument("--seeds", type=int, default=3, help="of the best rates of those that count (default 3)")
    parser.add_argument("--text", default="", help="text file or directory, in place of the library's")
    parser.add_argument("--link", default="100mbit", help="rate of the hosts' links, as tc writes it (default 100mbit)")
    parser.add_argument("--rounds", type=int, default=5, help="in which all are timed (default 5)")
    parser.add_argument("--turn", type=int, default=6, help="steps of each in a round (default 6)")
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file of everything; one that exists is continued")
    parser.add_argument("--plot", type=Path, help="draw the losses against bytes and against time")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    options = parser.parse_args(words)
    for name, least in (("ranks", 2), ("steps", 20), ("seeds", 1), ("rounds", 1), ("turn", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: at least {least}")
    if DENSE not in options.only:
        options.only.insert(0, DENSE)
    return options


def followed(line: Sequence[str], environment: Mapping[str, str], take: Callable[[dict[str, Any]], None]) -> str:
    """Run ``line`` and ``take`` what it tells as it comes; return "", or why it ended early."""
    tail: deque[str] = deque(maxlen=20)
    with subprocess.Popen(
        line, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for said in process.stdout:
                if said.startswith(FOUND):
                    take(json.loads(said.removeprefix(FOUND)))
                else:
                    tail.append(said)
        except BaseException:
            process.terminate()
            raise
    return "" if process.returncode == 0 else f"the ranks ended with {process.returncode}:\n{''.join(tail)}"


def program(folder: Path, order: Mapping[str, Any]) -> list[str]:
    """Return the command line of one rank, its ``order`` in ``folder``."""
    path = folder / "order.json"
    path.write_text(json.dumps(order))
    return [sys.executable, str(HERE / "compression_ranks.py"), str(path)]


def losses(study: Study, ranks: int, threads: bool, records: Records, folder: Path) -> dict[Training, str]:
    """Make the trainings that the file does not have yet; return those that are refused, with the reasons."""
    launcher, refused = mpirun.find(), dict[Training, str]()
    while missing := study.next({one: ended.loss for one, ended in records.known.items()}, list(refused)):
        refused |= {one: reason for one in missing if (reason := study.refusal(one))}
        waiting = deque(one for one in missing if one not in refused)
        if not waiting:
            continue

        def take(found: dict[str, Any], waiting: deque[Training] = waiting) -> None:
            training, ended = waiting.popleft(), compression_file.ended(found)
            records.add(training, ended)
            print(compression_report.line(training, ended), file=sys.stderr, flush=True)

        order = {"what": "losses", "evaluations": EVALUATIONS, "trainings": [study.settings(one) for one in waiting]}
        environment = {
            **os.environ,
            **python_path_variables(),
            **mpirun.settings(launcher),
            **mpirun.session(launcher, folder),
        }
        line = program(folder, order | {"threads": ranks if threads else 0})
        if not threads:
            line = mpirun.command(launcher, ranks, line, mpirun.settings(launcher))
        if why := followed(line, environment, take):
            raise HpcdistError(f"{waiting[0]}: {why}")
    return refused


def times(study: Study, options: argparse.Namespace, records: Records, folder: Path) -> None:
    """Time steps of every compressor between two hosts. Raises MissingCapabilityError where none can be made."""
    names, keys = [], []
    for name in study.names:
        # Those that differ in a warm-up only have the same steps after it.
        own = study.keys(name) | (
            {"compression.warmup_steps": 2} if "compression.warmup_steps" in study.keys(name) else {}
        )
        feedback = not study.refusal(Training(name, True, study.rates_of(name)[0]))
        training = Training(name, feedback, study.rates_of(name)[0])
        if not study.refusal(training):
            names.append(name)
            keys.append(study.settings(training) | own | {"communication.algorithm": "hierarchical"})
    order = {"what": "times", "trainings": keys, "rounds": options.rounds, "turn": options.turn, "raw_bytes": RAW_BYTES}
    launcher = mpirun.find()
    os.environ |= python_path_variables()  # the hosts take it from there

    def take(found: dict[str, Any]) -> None:
        records.put_times(names, np.array(found["figures"]), found["raw_bytes_per_s"])

    with hosts(options.link) as made:
        line = made.command(launcher, 1, program(folder, order))
        if why := followed(line, made.environment(launcher), take):
            raise HpcdistError(why)


def hosts(link: str) -> Any:
    """Return two hosts with slow links, a context manager."""
    sys.path.insert(0, str(HERE / "hosts"))
    from cluster import Hosts

    return Hosts(2, link, BURST)


def main(words: Sequence[str] | None = None) -> None:
    """Make the study, print it, draw it."""
    options = arguments(words)
    if options.plot is not None:
        check_plot(options.plot)
    if "times" in options.parts:
        with hosts(options.link):
            pass  # before hours of training: whether there can be any
    more = (("data.path", str(Path(options.text).resolve())),) if options.text else ()
    names = tuple(name for name in CONTENDERS if name in options.only)
    study = Study(options.steps, tuple(sorted(options.rates)), options.seeds, names, more)
    said = {key: value for key, value in COMMON.items() if key.partition(".")[0] in ("model", "data", "run")}
    said |= {"steps": options.steps, "ranks": options.ranks, "link": options.link, "text": options.text or "library"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = options.output or folder / "compression.h5"
        results.check_place(path)
        with results.locked(path):
            records = Records(path, provenance(anonymous=options.anonymous), said)
            refused = (
                losses(study, options.ranks, options.threads, records, folder) if "losses" in options.parts else {}
            )
            if "times" in options.parts:
                times(study, options, records, folder)
        found = compression_report.Found(study, records.known, records.times(), refused)
    print(compression_report.text(found))
    if options.plot is not None:
        compression_report.plot(found, options.plot)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that ranks are ended and hosts taken down
    try:
        main()
    except HpcdistError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
