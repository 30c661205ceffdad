"""What the compiler of GPUs makes of the convolutions: bytes moved against the least possible.

`python docs/tools/gpu_operator_costs.py` prints the table of docs/performance.md.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from tpu_operator_costs import KINDS, Case, add_case_flags, check_case_flags, measure

from convt5.analysis import gpu_target as target
from convt5.configuration import command_line
from convt5.reports import markdown
from convt5.runtime.bars import Bar


def rows(device: Any, taps: Sequence[int], dilations: Sequence[int]) -> Iterator[dict[str, str]]:
    """Yields what is known of each operator, the larger of the two paddings."""
    for (kind, heads), count, dilation in itertools.product(KINDS, taps, dilations):
        costs = [
            measure(
                Case(kind=kind, taps=count, heads=heads, dilation=dilation, padding=padding),
                device,
                accessed=target.bytes_accessed,
            )
            for padding in ("CENTERED", "CAUSAL")
        ]
        forward, both = zip(*costs, strict=True)
        yield {
            "operator": kind,
            "H": str(heads),
            "K": str(count),
            "dilation": str(dilation),
            "forward": f"{max(cost.ratio for cost in forward):.2f}",
            "both": f"{max(cost.ratio for cost in both):.2f}",
            "temporaries, MB": f"{max(cost.temporaries for cost in both) / 1e6:.0f}",
        }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python docs/tools/gpu_operator_costs.py")
    parser.add_argument("--topology", default="h100:1", help="a name of convt5.analysis.gpu_target")
    add_case_flags(parser)
    settings = parser.parse_args(argv)
    check_case_flags(settings)
    device = target.load(settings.topology).devices[0]
    found = rows(device, settings.taps, settings.dilations)
    count = len(KINDS) * len(settings.taps) * len(settings.dilations)
    shown = []
    with Bar(sys.stderr, total=count, unit="operator") as progress:
        for row in found:
            shown.append(row)
            progress.update()
    print(markdown.table(shown))


if __name__ == "__main__":
    command_line.run(main)
