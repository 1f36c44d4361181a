"""From a parameter server to ZeRO and pipelines: how far does each architecture scale, and what stops it? By plan.

    python benchmarks/architectures.py -o architectures.h5 --plot architectures.png --anonymous
    python benchmarks/architectures.py --scenarios large-weak --cluster a100-selene

The story of the field goes from parameter servers through rings, trees and hierarchies of allreduce to pipelines and
ZeRO (A. Singh, IJFMR 6(6), 2024, doi 10.36948/ijfmr.2024.v06i06.34214). Here `hpcdist.planner` tells it in numbers, on
8 to 131,072 devices of a cluster: seconds, bytes, memory, joules and failures of a step, for BERT-large and for a GPT
of 175 thousand million parameters, with a batch that stays and one that grows. For each architecture and number of
devices the fastest layout that fits into 95 % of the memory is taken; gradients have 16 bits and hide behind the
backward wherever the architecture lets them.

What computes is the published implementation ("megatron": Megatron-LM's kernels and memory, with attention scores),
whatever the architecture; what sends is library "nccl", a ring or tree for each link of a node, or "mpi", one ring or a
hierarchy, as the architecture says. It is not what hpcdist sends: of 16-bit gradients its allreduces sum float32.

Goodput is samples a second with saves, failures and restarts (Young/Daly). An architecture stops scaling at the last
number of devices to which doubling gave 1.5 times the goodput. Of the doubling after that each second is booked: what
computes, latency of the exchange (what the same layout would not wait for if messages began at once), its bytes, the
bubble, messages inside of layers, devices that serve, failures. What grew most is named. Nothing is measured here: it
takes half a minute on one core, and is as good as the planner (see `validate_planner.py`). For ZeRO-3 that is not good:
of the six published rows there are, DeepSpeed's of early 2021, predictions are 26 to 92 % too fast. Latency is counted
for each message, so servers that take many at a time do better than here; lost packets, as incast brings on Ethernet,
worse.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import architectures_file
import architectures_plot
import architectures_report
from architectures_catalogue import SCENARIOS
from architectures_study import study

from hpcdist.errors import HpcdistError
from hpcdist.planner.cluster import toml_file
from hpcdist.reporting.plotting import check_plot
from hpcdist.telemetry.provenance import provenance


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line, or end with its help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--cluster", default="h100-hgx", help="name or TOML file (default h100-hgx)")
    parser.add_argument("--scenarios", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("-o", "--output", type=Path, help="HDF5 file of every point; written anew")
    parser.add_argument("--plot", type=Path, help="draw all of it")
    parser.add_argument("--anonymous", action="store_true", help="leave host names out of the file")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    """Make the study, print it, keep it, draw it."""
    options = arguments(words)
    if options.plot is not None:
        check_plot(options.plot)
    cluster = toml_file.read(options.cluster)
    found = [study(scenario, cluster) for scenario in SCENARIOS if scenario.name in options.scenarios]
    print(architectures_report.text(found))
    if options.output is not None:
        kept = provenance(anonymous=options.anonymous)
        architectures_file.write(options.output, found, kept, toml_file.dump(cluster))
    if options.plot is not None:
        architectures_plot.plot(found, options.plot)


if __name__ == "__main__":
    try:
        main()
    except HpcdistError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
