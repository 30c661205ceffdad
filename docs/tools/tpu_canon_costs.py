"""What Canon layers add to a layer of t5_base by the TPU compiler: the table of docs/canon.md.

`python docs/tools/tpu_canon_costs.py` prints it, in minutes.
"""

import argparse
import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from jax.stages import Compiled

from convt5.analysis import topology
from convt5.configuration import command_line, gin_config
from convt5.modeling.blocks import EncoderLayer
from convt5.modeling.mixers.base import StackInputs

LENGTH = 512
PLACES = ("A", "B", "C", "D", "ABCD")

_ARRAY = re.compile(r"\b([a-z]+)(\d*)\[([\d,]*)\](\{[^}]*\})?")
_LINE = re.compile(
    r"\s+(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<type>.*?) (?P<op>[a-z][a-z\-]*)\((?P<of>.*)"
)
_MOVES_NOTHING = {
    *("parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element"),
    *("copy-done", "slice-done"),
}


def hbm_bytes(hlo: str) -> int:
    """Returns the bytes that a program without loops reads from and writes to HBM.

    The compiler's own count has those of the fast memory on the chip too, where it keeps results
    that fit; their layouts say so: S(1).
    """
    types: dict[str, str] = {}
    total = 0
    for line in hlo[hlo.index("\nENTRY ") :].splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        types[match["name"]] = match["type"]
        if match["op"] in _MOVES_NOTHING:
            continue
        if match["op"] == "slice-start":
            # Its type is (operand, result, ...): the result is what is read.
            total += list(_sizes(match["type"]))[1][0]
            continue
        operands = re.findall(r"%([\w.\-]+)", match["of"].split("), ")[0])
        read = sum(size for name in operands for size in _in_hbm(types.get(name, "")))
        written = sum(_in_hbm(match["type"]))
        # The type of an asynchronous copy names its operand as well.
        total += max(read, written) if match["op"] == "copy-start" else read + written
    return total


def _in_hbm(text: str) -> Iterator[int]:
    return (size for size, is_fast in _sizes(text) if not is_fast)


def _sizes(text: str) -> Iterator[tuple[int, bool]]:
    """Yields for each array of a type its bytes, and whether it is in another memory than HBM."""
    for _, bits, dims, layout in _ARRAY.findall(text):
        count = math.prod(int(d) for d in dims.split(",") if d)
        yield count * int(bits or 8) // 8, "S(" in layout


def compile_layer(places: str, *, batch: int, both: bool, device: Any) -> Compiled:
    """Compiles an encoder layer of t5_base on packed rows, forward or with its gradients."""
    config = gin_config.load(["gin/models/t5_base.gin"], roots=["%MODEL"]).macro("MODEL")
    encoder = dataclasses.replace(config.encoder, canon=places)
    config = dataclasses.replace(config, encoder=encoder)
    mixing = config.encoder_layers[0]
    layer = jax.eval_shape(lambda key: EncoderLayer(config, mixing, key=key), jax.random.key(0))
    x = jax.ShapeDtypeStruct((batch, LENGTH, config.emb_dim), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((batch, LENGTH), jnp.int32)

    def forward(layer, x, ids):
        return layer(x, StackInputs(ids))

    def gradients(layer, x, ids, cotangent):
        y, vjp = jax.vjp(lambda layer, x: forward(layer, x, ids), layer, x)
        return y, vjp(cotangent)

    function, given = (gradients, (layer, x, ids, x)) if both else (forward, (layer, x, ids))
    where = SingleDeviceSharding(device)
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where), given)
    return jax.jit(function).lower(*placed).compile()


def least_bytes(places: str, *, batch: int, both: bool) -> int:
    """Returns what Canon layers by themselves access: inputs and results once, in bfloat16."""
    channels = {"A": 768, "B": 3 * 768, "C": 768, "D": 3072}
    arrays = 4 if both else 2
    return arrays * 2 * batch * LENGTH * sum(channels[place] for place in places)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python docs/tools/tpu_canon_costs.py")
    parser.add_argument("--topology", default="v5e:2x2", help="a name of convt5.analysis.topology")
    parser.add_argument("--rows", type=int, default=8, help="rows of 512 tokens")
    settings = parser.parse_args(argv)
    device = topology.load(settings.topology).devices[0]

    def costs(places: str, both: bool) -> tuple[float, int]:
        compiled = compile_layer(places, batch=settings.rows, both=both, device=device)
        accessed = (compiled.cost_analysis() or {})["bytes accessed"]
        return accessed, hbm_bytes(compiled.as_text() or "")

    print("| places | passes | least, MB | more in HBM | ratio | more on and off the chip |")
    print("| --- | --- | ---: | ---: | ---: | ---: |", flush=True)
    for both in (False, True):
        without = costs("", both)
        for places in PLACES:
            accessed, hbm = (a - b for a, b in zip(costs(places, both), without, strict=True))
            least = least_bytes(places, batch=settings.rows, both=both)
            cells = [places, "both" if both else "forward"]
            cells += [f"{n / 1e6:.0f}" for n in (least, hbm)]
            cells += [f"{hbm / least:.2f}", f"{accessed / 1e6:.0f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    command_line.run(main)
