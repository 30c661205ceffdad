"""Initialises a run from trained parameters of another run.

`trainer.train(init_from=...)` applies it when a run starts; a resumed run ignores it.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from convt5 import errors
from convt5.checkpoints import checkpoint, reading
from convt5.errors import checks
from convt5.interchange import loading
from convt5.modeling.tree_paths import matches, named_leaves, pattern_faults
from convt5.text import vocabulary_files, vocabulary_transfer

TOKEN_TABLE = "token_embedder/embedding"
OUTPUT_TABLE = "output_head/kernel"
_TOKEN_AXES = {TOKEN_TABLE: 0, OUTPUT_TABLE: 1}
"""The tables with a row for each token, and the axis of the tokens."""


class Report(NamedTuple):
    """What happened to each parameter, by name.

    Attributes:
        restored: copied whole.
        resized: copied in the rows that both models have; other rows keep their initial values.
        transferred: tables of another vocabulary, whose rows are means of rows of the checkpoint.
        fresh: excluded parameters of the model, which keep their initial values.
        skipped: excluded parameters of the checkpoint.
        spelled: the ids of the checkpoint for each token of the transferred tables.
    """

    restored: list[str]
    resized: list[str]
    transferred: list[str]
    fresh: list[str]
    skipped: list[str]
    spelled: Sequence[Sequence[int]] = ()

    def text(self, path: str) -> str:
        """Returns one line for each of the five groups that is not empty."""
        counts = f"{len(self.restored)} parameter arrays restored from {path}"
        lines = [counts if self.restored else f"no whole array restored from {path}"]
        for kind, explanation in (
            ("resized", "restored in the rows that both tables have"),
            ("transferred", f"made for another vocabulary, {self._origins()}"),
            ("fresh", "freshly initialised"),
            ("skipped", "left in the checkpoint"),
        ):
            names = getattr(self, kind)
            if names:
                lines.append(f"  {explanation}: {_listed(names)}")
        return "\n".join(lines)

    def _origins(self) -> str:
        """Returns how many tokens have which rows of the checkpoint."""
        numbers = [len(ids) for ids in self.spelled]
        return (
            f"with the row of one token for {numbers.count(1):,} tokens, the mean of several for "
            f"{sum(n > 1 for n in numbers):,}, and a new one for {numbers.count(0):,}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class InitFrom:
    """What a run copies from another one: its parameters, or its whole training state.

    Patterns are regular expressions searched in names such as `encoder/layers/0/mlp/wi/kernel`.
    Every parameter that is included and not excluded must exist on both sides with the same shape,
    so that nothing is dropped silently.

    Attributes:
        path: a run directory, one of its steps, or an exported model.
        step: the checkpoint of a run; None means the newest.
        include: patterns of the parameters to copy.
        exclude: patterns of parameters that keep their initial values.
        resize: patterns of tables that may differ in their number of rows, such as
            `position_embedder` for longer sequences; the first rows are copied.
        vocabulary_transfer: the run has another vocabulary than the checkpoint, and its tables of
            tokens are made from those of the checkpoint (`vocabulary_transfer`).
        continue_training: also restores the optimizer state and the step, which determines the
            learning rate. The data starts from its beginning; data, objective, batch size and
            length may differ. `trainer.train.num_steps` includes the earlier updates.
    """

    path: str
    step: int | None = None
    include: Sequence[str] = (".*",)
    exclude: Sequence[str] = ()
    resize: Sequence[str] = ()
    vocabulary_transfer: bool = False
    continue_training: bool = False

    def __post_init__(self):
        faults = pattern_faults(include=self.include, exclude=self.exclude, resize=self.resize)
        others = self.exclude or self.resize or self.vocabulary_transfer
        if self.continue_training and (list(self.include) != [".*"] or others):
            faults.append(
                "continue_training=True loads all parameters; leave out include, exclude, resize "
                "and vocabulary_transfer, or continue_training."
            )
        if not self.include:
            faults.append("include=[] loads nothing; name parameters, or leave out init_from.")
        errors.raise_all(faults, where="InitFrom")

    def check(self, model: Any) -> None:
        """Raises `UserError` where `apply` would; abstract shapes of a model suffice."""
        self._open_checked({name: leaf.shape for name, leaf in named_leaves(model)})

    def check_num_steps(self, num_steps: int) -> None:
        """Raises `UserError` if continued training has no update left to make."""
        step = reading.step_of(self._checkpoint()) if self.continue_training else -1
        if step >= num_steps:
            raise errors.UserError(
                f"num_steps={num_steps} counts all updates, and InitFrom.continue_training "
                f"continues after the {step} of {self.path}; raise num_steps, for example to "
                f"{step + num_steps} for {num_steps} updates."
            )

    def state(self, abstract_state: Any, *, model_config: Any) -> checkpoint.Restored:
        """Returns the state from which training continues, without a data position.

        Raises:
            UserError: there is none, or it belongs to another architecture or optimizer.
        """
        return checkpoint.read_state(self._checkpoint(), abstract_state, model_config=model_config)

    def _checkpoint(self) -> epath.Path:
        if loading.is_exported(self.path):
            raise errors.UserError(
                f"InitFrom: {self.path} is an exported model, which has no optimizer state; "
                "give the run directory, or leave continue_training unset."
            )
        return reading.find_checkpoint(self.path, step=self.step)

    def check_vocabulary(self, text: vocabulary_files.KeptText | None, model: Any) -> None:
        """Raises `UserError` if tables would be copied to ids that mean other text.

        Args:
            text: the text of each id in the new run; None if unknown.
            model: its model; abstract shapes suffice.
        """
        names = {name for name, _ in named_leaves(model)}
        taken = [table for table in _TOKEN_AXES if table in names and self._takes(table)]
        if self.vocabulary_transfer:
            self._spelled(text)
        elif taken:
            vocabulary_files.check_same_ids(
                text,
                self.path,
                where="InitFrom",
                remedy=f"exclude {taken!r} to start with new ones, or set "
                "InitFrom.vocabulary_transfer=True to make these from the old ones",
                halves=("inputs", "targets") if TOKEN_TABLE in taken else ("targets",),
            )

    def _spelled(self, text: vocabulary_files.KeptText | None) -> Sequence[Sequence[int]]:
        """Returns the ids of the checkpoint's vocabulary for the text of each id of the run."""
        both = [text, vocabulary_files.load(self.path)]
        for kept, owner in zip(both, ("the run's data", self.path), strict=True):
            if kept is None or kept.inputs != kept.targets:
                raise errors.UserError(
                    "InitFrom: vocabulary_transfer=True needs one vocabulary of inputs and "
                    f"targets, and {owner} has {'no known one' if kept is None else 'two'}; leave "
                    f"it out, and exclude {[*_TOKEN_AXES]!r} to start with new tables."
                )
        new, old = (kept.inputs for kept in both if kept is not None)
        return vocabulary_transfer.spell(new, old, "the run's data")

    def _takes(self, name: str) -> bool:
        """Returns whether a parameter is to be copied."""
        return matches(name, self.include) and not matches(name, self.exclude)

    def apply(
        self, model: Any, text: vocabulary_files.KeptText | None = None
    ) -> tuple[Any, Report]:
        """Returns the model with the copied parameters, sharded as before, and a report.

        Args:
            model: the initial one.
            text: the text of each id in the new run, for vocabulary_transfer.

        Raises:
            UserError: nothing is at `path`, or names or shapes do not match.
        """
        fresh = dict(named_leaves(model))
        source, report = self._open_checked({name: leaf.shape for name, leaf in fresh.items()})
        shardings = {name: fresh[name].sharding for name in report.restored}
        taken = source.read(shardings)
        for name, old in source.read(dict.fromkeys(report.resized)).items():
            rows = np.asarray(old[: len(fresh[name])])
            taken[name] = _with_rows(fresh[name], range(len(rows)), rows)
        if report.transferred:
            report = report._replace(spelled=self._spelled(text))
        for name, old in source.read(dict.fromkeys(report.transferred)).items():
            taken[name] = _transferred(fresh[name], old, report.spelled, axis=_TOKEN_AXES[name])
        leaves = [taken.get(name, leaf) for name, leaf in fresh.items()]
        return jax.tree.unflatten(jax.tree.structure(model), leaves), report

    def _open_checked(self, model: Mapping[str, tuple[int, ...]]) -> tuple["_Source", Report]:
        """Opens `path`, and decides what happens to each parameter."""
        source = _open(self.path, self.step)
        report, faults = self._plan(model, source.shapes)
        if faults:
            raise errors.UserError(
                f"InitFrom: {self.path} does not fit the model in {len(faults)} places:\n"
                + "\n".join(f"- {fault}" for fault in errors.abbreviate(faults))
            )
        return source, report

    def _plan(
        self, model: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]
    ) -> tuple[Report, list[str]]:
        """Decides for each parameter from shapes alone; also returns the conflicts."""
        report, faults = Report([], [], [], [], []), []
        every = sorted(model.keys() | saved.keys())
        for field in ("include", "exclude", "resize"):
            for pattern in getattr(self, field):
                if not any(matches(name, [pattern]) for name in every):
                    faults.append(f"{field}: {pattern!r} matches no parameter; correct it.")
        for name in every:
            if not self._takes(name):
                if name in model:
                    report.fresh.append(name)
                if name in saved:
                    report.skipped.append(name)
            elif name not in saved:
                faults.append(f"{name}: not in the checkpoint; exclude it to initialise it.")
            elif name not in model:
                faults.append(f"{name}: not in this model; exclude it to leave it.")
            elif self.vocabulary_transfer and _is_wide_alike(name, model[name], saved[name]):
                report.transferred.append(name)
            elif model[name] == saved[name]:
                report.restored.append(name)
            elif matches(name, self.resize) and model[name][1:] == saved[name][1:]:
                report.resized.append(name)
            else:
                table = " or resize" if model[name][1:] == saved[name][1:] else ""
                faults.append(
                    f"{name}: {_shape(saved[name])} in the checkpoint, {_shape(model[name])} in "
                    f"this model; use a model of the same size, or exclude{table} it."
                )
        if self.vocabulary_transfer and not faults and not report.transferred:
            faults.append(
                "vocabulary_transfer=True changes no table, as none is copied; leave it out, or "
                f"include {[*_TOKEN_AXES]!r}."
            )
        return report, faults


class _Source(NamedTuple):
    """Parameters that can be read one at a time."""

    shapes: dict[str, tuple[int, ...]]
    read: Any  # Mapping of names to shardings (None: anywhere) -> arrays by name.


def _open(path: str, step: int | None) -> _Source:
    if loading.is_exported(path):
        if step is not None:
            raise errors.UserError(
                f"InitFrom: step={step} selects a checkpoint of a run, but {path} is an "
                "exported model; leave out step, or give the run directory."
            )
        params = loading.read_exported(path).params

        def read(names):
            return {
                name: jax.device_put(params[name], where) if where else jnp.asarray(params[name])
                for name, where in names.items()
            }

        return _Source({name: array.shape for name, array in params.items()}, read)
    folder = reading.find_checkpoint(path, step=step)
    saved = reading.saved_params(folder)
    return _Source(
        {name: leaf.shape for name, leaf in saved.items()},
        lambda names: reading.load_named(
            folder,
            {
                name: jax.ShapeDtypeStruct(saved[name].shape, saved[name].dtype, sharding=where)
                for name, where in names.items()
            },
        ),
    )


def _is_wide_alike(name: str, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Returns whether both shapes are of tables of tokens that differ only in their number."""
    axis = _TOKEN_AXES.get(name)
    return axis is not None and np.delete(one, axis).tolist() == np.delete(other, axis).tolist()


def _transferred(
    fresh: jax.Array, old: jax.Array, spelled: Sequence[Sequence[int]], *, axis: int
) -> jax.Array:
    """Returns a table with the mean of the old rows of each token that has some."""
    rows = np.moveaxis(np.asarray(old, np.float32), axis, 0)
    known = [token for token, ids in enumerate(spelled) if ids]
    if (last := max(max(spelled[token]) for token in known)) >= len(rows):
        raise errors.UserError(
            f"InitFrom: the table of the checkpoint has {len(rows)} rows, but its vocabulary has "
            f"the id {last}; give the checkpoint the vocabulary that it was trained with."
        )
    means = np.stack([rows[list(spelled[token])].mean(0) for token in known])
    return _with_rows(fresh, known, means, axis)


def _with_rows(
    fresh: jax.Array, indices: Sequence[int], rows: np.ndarray, axis: int = 0
) -> jax.Array:
    """Returns a table with other rows at some indices of an axis; it may be sharded over hosts."""

    def changed(table: jax.Array, rows: jax.Array) -> jax.Array:
        moved = jnp.moveaxis(table, axis, 0).at[np.asarray(indices)].set(rows)
        return jnp.moveaxis(moved, 0, axis)

    # Every host has all of the rows.
    return jax.jit(changed, out_shardings=fresh.sharding)(fresh, rows)


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(errors.abbreviate(names))
