"""What the TPU compiler makes of convolutions with taps for whole rows: the table of docs/long.md.

`python docs/tools/tpu_long_costs.py --rows 8,512 --rows 1,4096` prints it, in minutes.
"""

import argparse
import dataclasses
from collections.abc import Sequence

from tpu_operator_costs import Case, measure

from convt5.analysis import topology
from convt5.configuration import command_line
from convt5.ops import long_conv


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongCase(Case):
    """A convolution of packed rows in bfloat16, with taps in float32."""

    def forward(self, x, weights, ids):
        return long_conv(x, weights, padding=self.padding, segment_ids=ids)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python docs/tools/tpu_long_costs.py")
    parser.add_argument("--topology", default="v5e:2x2", help="a name of convt5.analysis.topology")
    parser.add_argument("--rows", action="append", help="batch,length; may be repeated")
    settings = parser.parse_args(argv)
    device = topology.load(settings.topology).devices[0]
    for rows in settings.rows or ["8,512"]:
        batch, length = map(int, rows.split(","))
        for padding in ("CAUSAL", "CENTERED"):
            taps = length if padding == "CAUSAL" else 2 * length - 1
            sizes = {"batch": batch, "length": length, "taps": taps, "heads": 768}
            costs = measure(LongCase(kind="long", padding=padding, **sizes), device)
            cells = [f"{c.accessed / 1e6:.0f} MB ({c.least / 1e6:.0f})" for c in costs]
            print(f"| [{batch}, {length:,}, 768] | {padding} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    command_line.run(main)
