"""Loss and gradients on one TPU chip, by its compiler: a table and rooflines of performance.md.

`python docs/tools/gradient_costs.py --t5x=CHECKOUT` compiles base models of ours, and T5X's T5 of
the same size, at several lengths of equal tokens; half an hour in all. What was compiled is kept:
given again, the command goes on behind it; with --report_only it tells and draws what there is.
"""

import argparse
import dataclasses
import functools
import itertools
import math
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from kept_programs import KeptPrograms, Report, write_tables

from convt5 import errors
from convt5.analysis import compiled_step, inspect_command, topology
from convt5.benchmarks import t5x
from convt5.benchmarks.sides import TARGETS
from convt5.configuration import command_line, gin_config
from convt5.reports import figures, markdown

TOKENS = 4096
"""Encoder tokens of all rows together; the decoder has a fourth as many."""

PEER = "T5X"
"""T5X's T5, of the sizes of `LIKE`."""

LIKE = "t5_base"
MODELS = (LIKE, "dynamic_base", "lightweight_base")
LENGTHS = (512, 2048, 4096)
OUTPUT = "docs/performance"
MARK = "gradients"
_BYTES = {"accessed, GB": "bytes_accessed", "temporaries, GB": "temporaries"}
_FILE, _PICTURE = "gradients.jsonl", "roofline_tpu.png"


@dataclasses.dataclass(frozen=True)
class Program:
    """Loss and gradients of `TOKENS` encoder tokens in rows of `length`, on one chip.

    Attributes:
        model: a file of gin/models, or `PEER`.
        slice: a name of `convt5.analysis.topology`.
        length: encoder tokens of a row.
    """

    model: str
    slice: str
    length: int

    def compiled(self, checkout: pathlib.Path | None) -> Report:
        """Returns what the compiler says, after minutes.

        Args:
            checkout: of T5X; not needed for models of ours.
        """
        if self.model == PEER:
            assert checkout is not None
            return self._compiled_peer(checkout)
        update, name = inspect_command.read_step([_gin_file(self.model)], [])
        flags = {
            "batch_size": TOKENS // self.length,
            "encoder_length": self.length,
            "decoder_length": self.length // TARGETS,
        }
        subject = inspect_command.make_subject(name, update, {"devices": 1, **flags})
        step = compiled_step.Step(subject, gradients_only=True)
        slice_ = topology.load(self.slice)
        began = time.process_time()
        report = compiled_step.make_report(step, slice_)
        found = report.flops, report.bytes_accessed, report.memory.temporaries
        return _summary(slice_, *found, began=began)

    def _compiled_peer(self, checkout: pathlib.Path) -> Report:
        slice_ = topology.load(self.slice)
        config = gin_config.load([_gin_file(LIKE)], roots=["%MODEL"]).macro("MODEL")
        model = t5x.make_model(checkout, config)
        where = SingleDeviceSharding(slice_.devices[0])

        def placed(array: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

        rows = TOKENS // self.length
        shapes = [(rows, self.length), *[(rows, self.length // TARGETS)] * 2]
        tokens = [placed(jax.ShapeDtypeStruct(shape, jnp.int32)) for shape in shapes]
        initial = jax.eval_shape(functools.partial(t5x.init_parameters, model), tokens)
        key = placed(jax.eval_shape(lambda: jax.random.key(0)))
        loss = jax.value_and_grad(functools.partial(t5x.loss, model))
        began = time.process_time()
        compiled = jax.jit(loss).lower(jax.tree.map(placed, initial), tokens, key).compile()
        cost, memory = compiled.cost_analysis(), compiled.memory_analysis()
        if cost is None or memory is None:
            raise RuntimeError("the compiler says nothing of what the program costs")
        found = cost["flops"], cost["bytes accessed"], memory.temp_size_in_bytes
        return _summary(slice_, *found, began=began)


def _summary(
    slice_: topology.Topology, flops: float, accessed: float, temporaries: int, *, began: float
) -> Report:
    return {
        "flops": flops,
        "bytes_accessed": accessed,
        "temporaries": temporaries,
        "compute_seconds": flops / (slice_.peak_flops or math.inf),
        "memory_seconds": accessed / slice_.chip.hbm_bandwidth,
        "compile_cpu_seconds": time.process_time() - began,
    }


def _gin_file(model: str) -> str:
    return f"gin/models/{model}.gin"


def table(reports: Mapping[Program, Report]) -> str:
    """Returns a row for each program, with its share of what T5X takes at the same length."""
    rows = []
    for program, report in reports.items():
        peer = reports.get(dataclasses.replace(program, model=PEER))
        rows.append(
            {
                "model": program.model if program.model == PEER else f"`{program.model}`",
                "row length": f"{program.length:,}",
                "TFLOP": f"{report['flops'] / 1e12:.2f}",
                **{title: _gigabytes(report, peer, name) for title, name in _BYTES.items()},
                "no step is faster than": _bound(report),
                "compiled in": f"{report['compile_cpu_seconds']:.0f} s",
            }
        )
    return markdown.table(rows)


def _gigabytes(report: Report, peer: Report | None, name: str) -> str:
    text = f"{report[name] / 1e9:.3g}"
    if peer is None or peer is report:
        return text
    return f"{text} ({report[name] / peer[name]:.3f})"


def _bound(report: Report) -> str:
    compute, memory = report["compute_seconds"], report["memory_seconds"]
    by = "memory" if memory > compute else "compute"
    return f"{1e3 * max(compute, memory):.1f} ms ({by})"


def draw(reports: Mapping[Program, Report], path: pathlib.Path) -> None:
    """Draws where programs of one slice stand under its roofs, and their least times by length.

    Raises:
        UserError: matplotlib is not installed.
    """
    figure = figures.figure_class("the picture")(figsize=(11, 4.2), layout="constrained")
    roof, times = figure.subplots(1, 2)
    first = next(iter(reports.values()))
    peak = first["flops"] / first["compute_seconds"]
    bandwidth = first["bytes_accessed"] / first["memory_seconds"]
    ridge = peak / bandwidth
    reached = [report["flops"] / report["bytes_accessed"] for report in reports.values()]
    intensities = (min(reached) / 1.2, ridge, 1.2 * max(ridge, *reached))
    roof.plot(intensities, [min(peak, x * bandwidth) / 1e12 for x in intensities], color="0.4")
    for number, model in enumerate(dict.fromkeys(program.model for program in reports)):
        own = sorted((p.length, report) for p, report in reports.items() if p.model == model)
        lengths = [length for length, _ in own]
        found = [r["flops"] / r["bytes_accessed"] for _, r in own]
        attained = [min(peak, intensity * bandwidth) / 1e12 for intensity in found]
        (line,) = roof.plot(found, attained, **figures.style(number, joined=False))
        for length, x, y in zip(lengths, found, attained, strict=True):
            roof.annotate(
                f"{length}",
                (x, y),
                # On both sides of the roof, so that neighbours stay apart.
                xytext=(-26, 2) if number % 2 else (5, -8),
                textcoords="offset points",
                fontsize=7,
                color=line.get_color(),
            )
        seconds = [max(r["compute_seconds"], r["memory_seconds"]) for _, r in own]
        times.plot(lengths, [1e3 * s for s in seconds], label=model, **figures.style(number))
    roof.set(
        xlabel="operations per byte accessed",
        ylabel="TFLOP/s at most",
        title=f"under the roofs of {next(iter(reports)).slice.partition(':')[0]}",
    )
    times.set(
        xlabel="tokens of a row",
        ylabel="ms",
        title=f"no step of {TOKENS:,} + {TOKENS // TARGETS:,} tokens is faster than",
    )
    figures.log_values(roof, intensities, which="x")
    figures.log_values(roof, [min(peak, x * bandwidth) / 1e12 for x in intensities])
    times.set_xscale("log", base=2)
    figures.name_values(times.xaxis, (program.length for program in reports))
    figures.log_values(
        times, [1e3 * max(r["compute_seconds"], r["memory_seconds"]) for r in reports.values()]
    )
    for axes in (roof, times):
        figures.tidy(axes)
    times.legend(frameon=False)
    figures.save(figure, path)


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python docs/tools/gradient_costs.py")
    parser.add_argument(
        "--t5x", type=command_line.path, help="a checkout of T5X, which then is a row"
    )
    parser.add_argument("--models", nargs="+", help="files of gin/models")
    parser.add_argument("--lengths", type=int, nargs="+", help="encoder tokens of a row")
    parser.add_argument("--topology", default="v5p:1x1x1", help="one chip, such as v5e:1x1")
    parser.add_argument(
        "--output", type=command_line.path, default=OUTPUT, help="the folder of what was compiled"
    )
    parser.add_argument(
        "--page", type=command_line.path, help="also writes the table into this page"
    )
    parser.add_argument("--report_only", action="store_true", help="compiles nothing")
    settings = parser.parse_args(argv)
    errors.raise_all(
        (
            f"--{name} is for what is compiled; --report_only tells all that is kept: leave it out."
            for name in ("models", "lengths", "t5x")
            if settings.report_only and getattr(settings, name) is not None
        ),
        where="flags",
    )
    models, lengths = settings.models or MODELS, settings.lengths or LENGTHS
    for length in lengths:
        if length < TARGETS or TOKENS % length:
            raise errors.UserError(
                f"--lengths={length} must divide {TOKENS:,} encoder tokens, and be at least "
                f"{TARGETS}: the decoder has a fourth as many."
            )
    chip = topology.parse(settings.topology)
    if math.prod(chip.shape) * chip.chip.cores_per_chip > 1:
        raise errors.UserError(
            f"--topology={settings.topology} has several devices; give one chip of one device, "
            "such as v5e:1x1, v6e:1x1 or v5p:1x1x1."
        )
    if PEER in models:
        raise errors.UserError(f"--models={PEER} is no file of gin/models; give --t5x=CHECKOUT.")
    if settings.page is not None:
        write_tables(settings.page, MARK, None)
    folder = settings.output
    kept = KeptPrograms(folder / _FILE, Program)
    names = [*([PEER] if settings.t5x else []), *models]
    if not settings.report_only:
        for name, length in itertools.product(names, lengths):
            program = Program(name, settings.topology, length)
            kept.report(program, functools.partial(program.compiled, settings.t5x))
    shown = {p: report for p, report in kept.reports.items() if p.slice == settings.topology}
    if not shown:
        raise errors.UserError(
            f"--report_only: nothing is kept for {settings.topology} in {folder}; leave it out."
        )
    text = table(shown)
    print(text)
    if settings.page is not None:
        write_tables(settings.page, MARK, text)
    draw(shown, folder / _PICTURE)


if __name__ == "__main__":
    command_line.run(main)
