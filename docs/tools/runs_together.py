"""Trains runs of a study that differ in seed, schedule and start as one program, and asks them.

A small model does not fill an accelerator, and its program compiles longer than it trains. So runs
of equal shapes are the rows of one program, `jax.vmap` of the update that the trainer makes: they
have the same batches, dropout and updates as alone, and round differently.

`python docs/tools/runs_together.py --gin_file=gin/studies/STUDY.gin --output=FOLDER` makes all runs
of a study on cached rows. FOLDER has a file of JSON lines for each group of runs: the training loss
of each run, and its answers to the questions about its task (`--questions`; see
`remote_evaluation.py`). Groups that have a file are not trained again.

With `--metrics=FILE`, lines that `remote_evaluation.py measure` printed of these answers, the same
command trains nothing, and writes what it finds into the study, for `python -m convt5.sweep
--report_only`: metrics of the split "test" as those of `task`, others by the name of their split.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import remote_evaluation

from convt5 import errors
from convt5.configuration import command_line
from convt5.evaluation.batching import Batch
from convt5.evaluation.predictor import Predictor
from convt5.modeling.model import ConvT5
from convt5.runtime import atomic_files
from convt5.sweeps import reading, running
from convt5.sweeps.study import Point, Study
from convt5.training.plan import Plan, run_keys
from convt5.training.run_log import METRICS_FILE
from convt5.training.train_state import TrainState
from convt5.training.train_step import make_train_step
from convt5.training.trainer import TrainRun

_MOST_STEPS = 100
"""Most updates between two reports of the loss."""

Batches = Mapping[str, np.ndarray]


class _OneShape(Predictor):
    """Pads all inputs to the longest length, as each shape takes seconds to compile."""

    def _batches(self, lengths: Sequence[int], rows: int | None = None) -> list[Batch]:
        longest = self._lengths["inputs"]
        return [each._replace(length=longest) for each in super()._batches(lengths, rows)]


class Member(NamedTuple):
    """A run of the study."""

    point: Point
    run: TrainRun


def members(study: Study, names: Sequence[str] | None = None) -> list[Member]:
    """Returns the runs of a study, or those of these names."""
    chosen = [run for run in running.states(study) if names is None or run.point.name in names]
    return [Member(run.point, running.describe(run)) for run in chosen]


def groups(runs: Sequence[Member]) -> list[list[Member]]:
    """Returns the runs by what they cannot differ in, in their order."""
    found: list[tuple[TrainRun, list[Member]]] = []
    for member in runs:
        run = member.run
        like = dataclasses.replace(
            run,
            run_dir="",
            seed=0,
            schedule=runs[0].run.schedule,
            init_from=None,
            train_data=dataclasses.replace(_rows(run), seed=0),
        )
        for other, same in found:
            if other == like:
                same.append(member)
                break
        else:
            found.append((like, [member]))
    return [same for _, same in found]


def _rows(run: TrainRun) -> Any:
    """Returns the description of the batches, which has a seed."""
    return run.train_data


def batches(run: TrainRun) -> Batches:
    """Returns all batches of a run, as arrays of [num_steps, ...]."""
    rows = _rows(run).build(process_index=0, process_count=1)
    taken = list(itertools.islice(rows, run.num_steps))
    return {name: np.stack([batch[name] for batch in taken]) for name in taken[0]}


def first_state(run: TrainRun, plan: Plan) -> TrainState:
    """Returns the state that the trainer begins with."""
    state = plan.make_state(run_keys(run.seed)[0])
    if run.init_from is None:
        return state
    return state.starting_with(run.init_from.apply(state.model, run.kept_text())[0])


def train(group: Sequence[Member]) -> Iterator[tuple[np.ndarray, TrainState]]:
    """Yields the mean training losses of the runs since the last yield, and their states.

    Every array has the runs as its first axis; a state is valid until the next one.
    """
    runs = [member.run for member in group]
    plan = runs[0].plan(jax.devices()[:1])
    by_seed = {_rows(run).seed: run for run in runs}
    read = [batches(run) for run in by_seed.values()]
    rows = {name: jnp.asarray(np.stack([each[name] for each in read], 1)) for name in read[0]}
    read_by = np.array([list(by_seed).index(_rows(run).seed) for run in runs])
    keys = jnp.stack([run_keys(run.seed)[1] for run in runs])
    rates = jnp.stack([jax.vmap(run.schedule)(jnp.arange(run.num_steps)) for run in runs])

    def update(state: TrainState, batch: Any, key: Any, rates: Any) -> Any:
        updates = runs[0].optimizer.build(lambda step: rates[step])
        step = make_train_step(runs[0], updates, plan.shardings, plan.batch_sharding, seed_key=key)
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    def advance(states: TrainState, batches: Any) -> Any:
        def one(states: TrainState, batch: Any) -> Any:
            own = {name: array[read_by] for name, array in batch.items()}
            return jax.vmap(update)(states, own, keys, rates)

        return jax.lax.scan(one, states, batches)

    states = jax.tree.map(lambda *x: jnp.stack(x), *(first_state(run, plan) for run in runs))
    num_steps = runs[0].num_steps
    size = next(n for n in range(min(_MOST_STEPS, num_steps), 0, -1) if num_steps % n == 0)
    advance = jax.jit(advance, donate_argnums=0)
    for start in range(0, num_steps, size):
        states, losses = advance(states, {k: v[start : start + size] for k, v in rows.items()})
        yield np.asarray(losses).mean(0), states


def models(states: TrainState) -> Iterator[ConvT5]:
    """Yields the model of each run."""
    for i in range(len(states.step)):
        model = jax.tree.map(lambda x, i=i: x[i], states.model)
        assert isinstance(model, ConvT5)
        yield model


def make(group: Sequence[Member], questions: Sequence[pathlib.Path]) -> Iterator[dict[str, Any]]:
    """Trains a group, and yields a record for each run and for each of its answers."""
    began, curves, last = time.monotonic(), [], None
    for losses, states in train(group):
        last = states
        curves.append(losses)
        print(f"{time.monotonic() - began:.0f} s, losses {np.round(losses, 3)}", flush=True)
    assert last is not None
    about = {
        "steps": group[0].run.num_steps,
        "together": len(group),
        "seconds": time.monotonic() - began,
        "device": jax.devices()[0].device_kind,
    }
    for i, (member, model) in enumerate(zip(group, models(last), strict=True)):
        name = {"run": member.point.name}
        yield {**name, **about, "loss": [float(losses[i]) for losses in curves]}
        for file in questions:
            yield name | remote_evaluation.answers(model, file, make=_OneShape)


def _make_all(study: Study, settings: argparse.Namespace, argv: Sequence[str]) -> int:
    """Makes the groups without a file, each in a process of its own; returns how many failed."""

    def one(group: Sequence[Member]) -> int:
        file = settings.output / f"{group[0].point.name}.jsonl"
        if file.exists():
            return 0
        command = [sys.executable, __file__, *argv, f"--group={file}"]
        command += [f"--run={member.point.name}" for member in group]
        with file.with_suffix(".log").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
        print(f"{file.stem}: {'made' if code == 0 else f'exit code {code}'}", flush=True)
        return code

    with futures.ThreadPoolExecutor(settings.processes) as pool:
        return sum(code != 0 for code in pool.map(one, groups(members(study))))


def write_results(study: Study, output: pathlib.Path, metrics: pathlib.Path) -> int:
    """Writes the runs that were made and measured into a study; returns their number."""
    losses, measured = {}, collections.defaultdict(dict)
    for line in (line for file in output.glob("*.jsonl") for line in file.read_text().splitlines()):
        record = json.loads(line)
        if "loss" in record:
            losses[record["run"]] = {"step": record["steps"], "loss": record["loss"][-1]}
    for line in metrics.read_text().splitlines():
        record = json.loads(line)
        name, split = record.pop("run"), record.pop("split")
        prefix = "task" if split == "test" else split
        measured[name] |= {f"{prefix}/{metric}": value for metric, value in record.items()}
    written = 0
    for made in running.states(study):
        name = made.point.name
        if name in losses and name in measured:
            made.folder.mkdir(parents=True, exist_ok=True)
            record = json.dumps(losses[name] | measured[name])
            atomic_files.replace_text(made.folder / METRICS_FILE, record + "\n")
            running.write_status(made, "finished")
            written += 1
    return written


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python docs/tools/runs_together.py", allow_abbrev=False)
    add = parser.add_argument
    add("--gin_file", action="append", required=True, help="a study on cached rows")
    add("--output", type=command_line.path, required=True, help="folder of the results")
    add("--questions", type=command_line.path, help="folder of TASK-*.json, TASK being a label")
    add("--processes", type=int, default=1, help="groups at a time")
    add("--metrics", type=command_line.path, help="what the answers were measured to be")
    add("--group", type=command_line.path, help="the file of one group, made in this process")
    add("--run", action="append", help="a run of this group")
    settings, bindings = parser.parse_known_args(argv)
    if unknown := [each for each in bindings if not each.startswith("--gin.")]:
        raise errors.UserError(f"{unknown[0]} is no flag of this command; --help lists them.")
    settings.output.mkdir(parents=True, exist_ok=True)
    study = reading.read(settings.gin_file, [b.removeprefix("--gin.") for b in bindings], ())
    assert isinstance(study, Study)
    if settings.metrics is not None:
        print(f"{write_results(study, settings.output, settings.metrics)} runs written")
        return 0
    if settings.group is None:
        return _make_all(study, settings, argv)
    group = members(study, settings.run)
    questions: list[pathlib.Path] = []
    if settings.questions is not None:
        questions = sorted(settings.questions.glob(f"{group[0].point.labels['task']}-*.json"))
    lines = [json.dumps(record) + "\n" for record in make(group, questions)]
    atomic_files.replace_text(settings.group, "".join(lines))
    return 0


if __name__ == "__main__":
    command_line.run(main)
