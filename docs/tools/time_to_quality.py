"""Trains T5 of three libraries for the same time, and draws the validation loss over that time.

`python docs/tools/time_to_quality.py --cache=CACHE --minutes=10 --t5x=CHECKOUT_OF_T5X` takes the
minutes for each side, and evaluations beside. Finished sides are kept: given again with the same
settings and cache, the command goes on behind them, and with --keep=FOLDER behind the last
evaluation of a side that was stopped; with --report_only it tells and draws what there is. A
machine lent for minutes, or one that has other work to do, can make the updates of an hour: with
--seconds_per_step each counts as the time that it takes elsewhere or alone, and table and picture
say so.

All sides have the same rows in the same order, the sizes of `t5_tiny`, float32, the dropout of the
model files and the rates of gin/studies/pretraining.gin, stretched over the minutes. Ours and T5X's
are updated by our Adafactor, Hugging Face's by the one of transformers, which also factors matrices
with fewer than 128 rows or columns. Each has the initial parameters of its library.
"""

import argparse
import dataclasses
import functools
import importlib.util
import io
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from kept_programs import write_tables
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from convt5 import errors
from convt5.benchmarks import hugging_face, peers, t5x
from convt5.configuration import command_line, gin_config
from convt5.data.cached_data import CachedDataConfig
from convt5.modeling.architecture import ConvT5Config
from convt5.reports import figures, markdown
from convt5.runtime import atomic_files, machine
from convt5.training.batch_fingerprint import fingerprint
from convt5.training.compilation import compile_step
from convt5.training.losses import TextLoss
from convt5.training.optimizer import AdafactorConfig
from convt5.training.plan import make_plan
from convt5.training.schedule import Constant, Cosine, Schedule
from convt5.training.train_step import CROSS_ENTROPY, StepConfig

MODELS = ("dynamic_tiny", "t5_tiny")
T5X, HUGGING_FACE = "t5x", "hugging_face"
SIDES = (*MODELS, T5X, HUGGING_FACE)
TITLES = {T5X: "T5X", HUGGING_FACE: "Hugging Face"}
SCHEDULE = Cosine(peak=0.03, warmup_steps=200, total_steps=3000)
"""Of gin/studies/pretraining.gin; a step is a part of the time here."""

MARK = "time_to_quality"
_FILE, _PICTURE = f"{MARK}.jsonl", f"{MARK}.png"
_TOKENS = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
_WEIGHTS = "decoder_loss_weights"

Batch = Mapping[str, np.ndarray]
Arrays = dict[str, np.ndarray]
Record = Mapping[str, Any]

_NOTHING: Record = {"number": 0, "seconds": 0.0, "steps": 0}
"""What a side has done that has not begun."""


class Side(NamedTuple):
    """A model of a library, ready to train.

    Attributes:
        num_parameters: of the model.
        compile_seconds: time to compile update and evaluation.
        update: makes an update on a batch, with a learning rate, and waits for it.
        evaluate: returns the cross-entropy of a batch, in nats, and the number of its targets,
            without dropout.
        state: returns what later updates depend on.
        restore: takes what `state` returned, perhaps in another process.
        machine: what `machine.describe` does not know, if not JAX computes.
    """

    num_parameters: int
    compile_seconds: float
    update: Callable[[Batch, float], None]
    evaluate: Callable[[Batch], tuple[float, float]]
    state: Callable[[], Arrays]
    restore: Callable[[Arrays], None]
    machine: Mapping[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Told(AdafactorConfig):
    """Adafactor whose rate is a part of its state, to be set before each update."""

    def build(self, schedule: Schedule) -> optax.GradientTransformation:
        build = super().build
        return optax.inject_hyperparams(lambda rate: build(_always(rate)))(rate=0.0)


def _always(rate: jax.Array) -> Schedule:
    return lambda step: rate


def ours(config: ConvT5Config, batch: Batch) -> Side:
    """Returns the training step of `convt5.train`."""
    settings = StepConfig(
        model=config, loss=TextLoss(), optimizer=Told(), schedule=Constant(rate=SCHEDULE.peak)
    )
    plan = make_plan(settings, batch_size=len(batch[_WEIGHTS]), devices=jax.devices()[:1])
    step = compile_step(plan.train_step, plan.abstract, batch)
    sums = compile_step(plan.eval_step, plan.abstract.model, batch)
    state = [plan.init_state()]

    def update(batch: Batch, rate: float) -> None:
        memory = state[0].opt_state
        memory = memory._replace(hyperparams={"rate": jnp.float32(rate)})
        told = dataclasses.replace(state[0], opt_state=memory)
        state[0], metrics = step.call(told, jax.device_put(dict(batch), plan.batch_sharding))
        jax.block_until_ready(metrics)

    def evaluate(batch: Batch) -> tuple[float, float]:
        on_device = jax.device_put(dict(batch), plan.batch_sharding)
        total, weight = sums.call(state[0].model, on_device).metrics[CROSS_ENTROPY]
        return float(total), float(weight)

    seconds = step.seconds + sums.seconds
    return Side(plan.num_parameters(), seconds, update, evaluate, *_keepers(state))


def _keepers(state: list[Any]) -> tuple[Callable[[], Arrays], Callable[[Arrays], None]]:
    """Returns `Side.state` and `Side.restore` of a tree of JAX arrays, the only element."""

    def taken() -> Arrays:
        leaves = jax.tree.leaves(jax.tree.map(_numbers, state[0]))
        return {str(number): np.asarray(leaf) for number, leaf in enumerate(leaves)}

    def restore(arrays: Arrays) -> None:
        leaves, structure = jax.tree.flatten(state[0])
        placed = [_placed(arrays[str(number)], leaf) for number, leaf in enumerate(leaves)]
        state[0] = jax.tree.unflatten(structure, placed)

    return taken, restore


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _numbers(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _placed(array: np.ndarray, like: jax.Array) -> jax.Array:
    wrapped = jax.random.wrap_key_data(jnp.asarray(array)) if _is_key(like) else array
    return jax.device_put(wrapped, like.sharding)


def t5x_side(checkout: pathlib.Path, config: ConvT5Config, batch: Batch) -> Side:
    """Returns T5X's model with an update written for it: its own trainer no longer imports."""
    model = t5x.make_model(checkout, config)

    def cross_entropy(parameters: Any, batch: Batch, key: jax.Array | None) -> Any:
        tokens = [batch[name] for name in _TOKENS]
        losses = t5x.cross_entropies(model, parameters, tokens, key)
        return jnp.sum(losses * batch[_WEIGHTS]), jnp.sum(batch[_WEIGHTS])

    def updated(state: Any, batch: Batch, rate: jax.Array) -> Any:
        parameters, memory, steps = state
        optimizer = AdafactorConfig().build(_always(rate))
        (_, weight), gradients = jax.value_and_grad(cross_entropy, has_aux=True)(
            parameters, batch, jax.random.fold_in(jax.random.key(2), steps)
        )
        gradients = jax.tree.map(lambda g: g / weight, gradients)
        updates, memory = optimizer.update(gradients, memory, parameters)
        return optax.apply_updates(parameters, updates), memory, steps + 1

    tokens = [batch[name] for name in _TOKENS]
    parameters = jax.jit(functools.partial(t5x.init_parameters, model))(tokens)
    memory = jax.jit(AdafactorConfig().build(Constant(rate=SCHEDULE.peak)).init)(parameters)
    state = [(parameters, memory, jnp.int32(0))]
    step = compile_step(jax.jit(updated, donate_argnums=0), state[0], batch, jnp.float32(0))
    sums = compile_step(jax.jit(functools.partial(cross_entropy, key=None)), parameters, batch)

    def update(batch: Batch, rate: float) -> None:
        state[0] = jax.block_until_ready(step.call(state[0], dict(batch), jnp.float32(rate)))

    def evaluate(batch: Batch) -> tuple[float, float]:
        total, weight = sums.call(state[0][0], dict(batch))
        return float(total), float(weight)

    count = sum(leaf.size for leaf in jax.tree.leaves(parameters))
    return Side(count, step.seconds + sums.seconds, update, evaluate, *_keepers(state))


def hugging_face_side(config: ConvT5Config, batch: Batch) -> Side:
    """Returns Hugging Face's model and optimizer, in PyTorch without compilation.

    They are on a GPU if there is one, where products are of float32 too.
    """
    import torch  # An extra.
    from transformers.optimization import Adafactor

    del batch
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    # Nothing is rounded to fewer bits, also not inside fused attention.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    model = hugging_face.make_model(config).to(device)
    optimizer = Adafactor(model.parameters(), lr=0.0, relative_step=False, scale_parameter=True)

    def cross_entropy(batch: Batch) -> tuple[Any, float]:
        rows = {name: torch.from_numpy(array).to(device).long() for name, array in batch.items()}
        source, given, targets = (rows[name] for name in _TOKENS)
        mask = {"attention_mask": source.ne(0), "use_cache": False}
        logits = model(input_ids=source, decoder_input_ids=given, **mask).logits
        counted = targets.masked_fill(rows[_WEIGHTS] == 0, -100)
        total = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), counted.flatten(), ignore_index=-100, reduction="sum"
        )
        return total, float(batch[_WEIGHTS].sum())

    def update(batch: Batch, rate: float) -> None:
        model.train()
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        total, weight = cross_entropy(batch)
        (total / weight).backward()
        optimizer.step()

    def evaluate(batch: Batch) -> tuple[float, float]:
        model.eval()
        with torch.no_grad():
            total, weight = cross_entropy(batch)
        return float(total), weight

    # Dropout draws from the generator of the device.
    generator = torch.cuda.default_generators[0] if has_gpu else torch.default_generator

    def state() -> Arrays:
        file = io.BytesIO()
        parts = model.state_dict(), optimizer.state_dict(), generator.get_state()
        torch.save(parts, file)
        return {"torch": np.frombuffer(file.getvalue(), np.uint8)}

    def restore(arrays: Arrays) -> None:
        file = io.BytesIO(arrays["torch"].tobytes())
        parameters, memory, random = torch.load(file, weights_only=True, map_location="cpu")
        model.load_state_dict(parameters)
        optimizer.load_state_dict(memory)
        generator.set_state(random)

    about = {"platform": "gpu", "device": torch.cuda.get_device_name()} if has_gpu else {}
    count = sum(p.numel() for p in model.parameters())
    return Side(count, 0.0, update, evaluate, state, restore, about)


def train(
    side: Side,
    rows: Iterator[Batch],
    validation: Sequence[Batch],
    *,
    seconds: float,
    evaluations: int,
    seconds_per_step: float | None = None,
    last: Record = _NOTHING,
) -> Iterator[Record]:
    """Trains for so many seconds, and yields what is known at evenly spread times of them.

    The clock runs while batches are read and updates are made, or counts updates, each as
    `seconds_per_step`. With the last record of a side that has its state, training goes on there.
    """
    rates = np.asarray(jax.vmap(SCHEDULE)(jnp.arange(SCHEDULE.total_steps)))
    trained, steps = last["seconds"], last["steps"]
    rows = itertools.islice(rows, steps, None)
    for number in range(last["number"] + 1, evaluations + 1):
        while trained < seconds * number / evaluations:
            began = time.perf_counter()
            side.update(next(rows), float(rates[int(len(rates) * trained / seconds)]))
            trained += seconds_per_step or time.perf_counter() - began
            steps += 1
        totals, weights = zip(*map(side.evaluate, validation), strict=True)
        loss = sum(totals) / sum(weights)
        yield {"number": number, "seconds": trained, "steps": steps, "loss": loss}


class Kept:
    """Records of finished sides, in a file of JSON lines.

    Attributes:
        finished: records by minutes and side.
    """

    def __init__(self, path: pathlib.Path):
        """Reads the file, if there is one, and leaves out what belongs to unfinished sides.

        Raises:
            UserError: it cannot be read.
        """
        self._path = path
        self.finished: dict[tuple[float, str], list[Record]] = {}
        try:
            lines = path.read_text().splitlines() if path.exists() else []
            for record in map(json.loads, lines):
                key = record["minutes"], record["side"]
                # A side that was stopped made again what follows its kept state, or everything.
                before = self.finished.get(key, [])[: record["number"] - 1]
                self.finished[key] = [*before, record]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise errors.UserError(
                f"{path} holds no records of this tool ({error!r}); remove it."
            ) from error
        for key, records in list(self.finished.items()):
            if len(records) < records[-1]["evaluations"]:
                del self.finished[key]

    def check(self, about: Record) -> None:
        """Raises `UserError` if a finished side has other settings; earlier ones tell none."""
        faults = [
            f"{name}={value}, but {self._path} holds sides of {name}={other}; give the flags and "
            "the cache of these, or another --output."
            for name, value in about.items()
            for other in {records[0].get(name, value) for records in self.finished.values()}
            if other != value
        ]
        errors.raise_all(faults, where="flags")

    def check_clock(self, minutes: float, sides: Sequence[str], seconds: float | None) -> None:
        """Raises `UserError` if an update of a finished side does not count as `seconds`."""
        faults = [
            f"--seconds_per_step={seconds}, but {self._path} holds {minutes:g} minutes of {name} "
            f"with {other or 'measured times'}; give other --sides or another --output."
            for name in sides
            if seconds is not None and (minutes, name) in self.finished
            for other in [_seconds_per_step(self.finished[minutes, name])]
            if other != seconds
        ]
        errors.raise_all(faults, where="flags")

    def add(self, record: Record) -> None:
        """Appends a record; call `Kept` again to see it."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


def table(minutes: float, sides: Mapping[str, Sequence[Record]]) -> str:
    """Returns a row for each side: what it did in these minutes, and when it passed the worst.

    A side whose updates were counted has a star, and a note below.
    """
    worst = max(records[-1]["loss"] for records in sides.values())
    rows, notes = [], []
    for name, records in sides.items():
        last, title = records[-1], TITLES.get(name, f"`{name}`")
        if counted := _seconds_per_step(records):
            notes.append(
                rf"\* {title}: compiled and updated on {last['machine']['device']}; an update "
                f"counts as {counted:g} s (`--seconds_per_step`)."
            )
        passed = next(r["seconds"] for r in records if r["loss"] <= worst)
        rows.append(
            {
                "side": f"{title} *" if counted else title,
                "parameters": f"{last['num_parameters']:,}",
                "compiled in": f"{last['compile_seconds']:.0f} s",
                "steps": f"{last['steps']:,}",
                "s/step": f"{last['seconds'] / last['steps']:.3f}",
                f"loss after {minutes:g} min": f"{last['loss']:.3f}",
                f"minutes to a loss of {worst:.3f}": f"{passed / 60:.1f}",
            }
        )
    return "\n\n".join([markdown.table(rows), *notes])


def _seconds_per_step(records: Sequence[Record]) -> float | None:
    """Returns what an update counts as, or None if it was measured."""
    return records[0].get("seconds_per_step")


def draw(finished: Mapping[tuple[float, str], Sequence[Record]], path: pathlib.Path) -> None:
    """Draws the loss of each side over minutes of training, in a panel for each budget.

    Raises:
        UserError: matplotlib is not installed.
    """
    budgets = sorted({minutes for minutes, _ in finished})
    figure = figures.figure_class("the picture")(
        figsize=(1 + 5.5 * len(budgets), 4.2), layout="constrained"
    )
    panels = figure.subplots(1, len(budgets), squeeze=False)[0]
    for axes, budget in zip(panels, budgets, strict=True):
        notes = ["minutes of training"]
        for number, name in enumerate(SIDES):
            if records := finished.get((budget, name)):
                x = [record["seconds"] / 60 for record in records]
                y = [record["loss"] for record in records]
                style = figures.style(number, points=len(records))
                axes.plot(x, y, label=TITLES.get(name, name), **style)
                if counted := _seconds_per_step(records):
                    notes.append(f"{TITLES.get(name, name)}: updates times {counted:g} s")
        axes.set(xlabel="\n".join(notes), title=f"{budget:g} min for each")
        axes.set_xlim(left=0)
        figures.tidy(axes)
    panels[0].set(ylabel="validation loss, nats per target token")
    panels[0].legend(frameon=False)
    figures.save(figure, path)


def main(argv: Sequence[str]) -> None:
    settings = _parser().parse_args(argv)
    _check(settings)
    if settings.page is not None:
        write_tables(settings.page, MARK, None)
    path = settings.output / _FILE
    kept = Kept(path)
    if not settings.report_only:
        validation = list(_batches(settings, split="validation", num_epochs=1))
        about = {name: getattr(settings, name) for name in ("batch_size", "vocab_size")}
        about["rows"] = int(fingerprint(jax.device_put(dict(validation[0]))))
        kept.check(about)
        sides = settings.sides or _present(settings.t5x)
        kept.check_clock(settings.minutes, sides, settings.seconds_per_step)
        for name in sides:
            if (settings.minutes, name) not in kept.finished:
                _train_side(name, settings, about, validation, kept)
    finished = Kept(path).finished
    if not finished:
        raise errors.UserError(f"--report_only: {settings.output} holds no finished side.")
    text = "\n\n".join(
        table(budget, {name: r for (b, name), r in finished.items() if b == budget})
        for budget in sorted({minutes for minutes, _ in finished})
    )
    print(text)
    if settings.page is not None:
        write_tables(settings.page, MARK, text)
    draw(finished, settings.output / _PICTURE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python docs/tools/time_to_quality.py")
    path = command_line.path
    add = parser.add_argument
    add("--cache", type=path, help="a folder written by convt5.cache")
    add("--minutes", type=float, default=10.0, help="of training, for each side")
    add("--seconds_per_step", type=float, help="that an update counts as; by default measured")
    add("--sides", nargs="+", choices=SIDES, help="by default those that are present")
    add("--t5x", type=path, help="a checkout of T5X, whose T5 is then a side")
    add("--evaluations", type=int, default=10, help="of each side")
    add("--batch_size", type=int, default=16, help="rows of a batch")
    add("--vocab_size", type=int, default=8192, help="of the models")
    add("--output", type=path, default="docs/performance", help="folder of records and picture")
    add("--keep", type=path, help="folder of the state of each side at its last evaluation")
    add("--page", type=path, help="also writes the table into this page")
    add("--report_only", action="store_true", help="trains nothing")
    return parser


def _check(settings: argparse.Namespace) -> None:
    faults = [
        f"--{name}={value} must be above 0."
        for name in ("minutes", "seconds_per_step", "evaluations", "batch_size", "vocab_size")
        for value in [getattr(settings, name)]
        if value is not None and not value > 0
    ]
    if settings.cache is None and not settings.report_only:
        faults.append("--cache is missing; give a folder written by convt5.cache.")
    present = _present(settings.t5x)
    remedies = {T5X: "give --t5x=CHECKOUT_OF_T5X", HUGGING_FACE: "install the extra torch"}
    faults += [
        f"--sides={name} is not present; {remedies[name]}."
        for name in settings.sides or ()
        if name not in present
    ]
    errors.raise_all(faults, where="flags")
    if settings.t5x is not None:
        t5x.check(settings.t5x)


def _present(checkout: pathlib.Path | None) -> list[str]:
    absent = {T5X} if checkout is None else set()
    if not all(map(importlib.util.find_spec, peers.HUGGING_FACE_NEEDS)):
        absent.add(HUGGING_FACE)
    return [name for name in SIDES if name not in absent]


def _batches(settings: argparse.Namespace, **how: Any) -> Iterator[Batch]:
    data = CachedDataConfig(path=str(settings.cache), batch_size=settings.batch_size, **how)
    built = data.build(process_index=0, process_count=1)
    return ({name: batch[name] for name in (*_TOKENS, _WEIGHTS)} for batch in built)


def _train_side(
    name: str,
    settings: argparse.Namespace,
    about: Record,
    validation: Sequence[Batch],
    kept: Kept,
) -> None:
    # The default of a GPU has fewer bits.
    with jax.default_matmul_precision("highest"):
        side = _make(name, settings, validation[0])
    about = {
        **about,
        "minutes": settings.minutes,
        "side": name,
        "evaluations": settings.evaluations,
        "num_parameters": side.num_parameters,
    }
    if settings.seconds_per_step is not None:
        about["seconds_per_step"] = settings.seconds_per_step
    place = settings.keep and settings.keep / f"{name}_{settings.minutes:g}.safetensors"
    measured = train(
        side,
        _batches(settings),
        validation,
        seconds=60 * settings.minutes,
        evaluations=settings.evaluations,
        seconds_per_step=settings.seconds_per_step,
        last=_restore(side, about, place) if place and place.exists() else _NOTHING,
    )
    found = {
        "compile_seconds": side.compile_seconds,
        "machine": {**machine.describe(), **side.machine},
    }
    for record in measured:
        kept.add({**about, **found, **record})
        if place is not None:
            _keep(side, {**about, **record}, place)
        print(
            f"{name}: {record['seconds']:.0f} s, {record['steps']:,} steps, "
            f"loss {record['loss']:.3f}",
            file=sys.stderr,
            flush=True,
        )


def _keep(side: Side, record: Record, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_files.replacing(path) as written:
        save_file(side.state(), written, {"record": json.dumps(record)})


def _restore(side: Side, about: Record, path: pathlib.Path) -> Record:
    """Restores a side that was stopped, and returns its last record.

    Raises:
        UserError: it had other settings.
    """
    with safe_open(path, "numpy") as file:
        record = json.loads(file.metadata()["record"])
    faults = [
        f"{name}={value}, but {path} is of a side of {name}={record.get(name)}; give the flags and "
        "the cache of that, or another --keep."
        for name, value in about.items()
        if record.get(name) != value
    ]
    errors.raise_all(faults, where="flags")
    side.restore(load_file(path))
    return record


def _make(name: str, settings: argparse.Namespace, batch: Batch) -> Side:
    config = _config(name if name in MODELS else "t5_tiny", settings.vocab_size)
    if name in MODELS:
        return ours(config, batch)
    if name == T5X:
        return t5x_side(settings.t5x, config, batch)
    return hugging_face_side(config, batch)


def _config(model: str, vocab_size: int) -> ConvT5Config:
    size = f"architecture.ConvT5Config.vocab_size={vocab_size}"
    return gin_config.load([f"gin/models/{model}.gin"], [size], roots=["%MODEL"]).macro("MODEL")


if __name__ == "__main__":
    command_line.run(main)
