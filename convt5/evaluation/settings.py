"""Settings of `eval` and `infer`: how texts become predictions, and which tasks are measured.

Gin files bind `evaluation.PredictConfig` and `evaluation.EvalConfig`; flags of the commands take
precedence.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from convt5 import errors
from convt5.errors import checks, rules
from convt5.evaluation.flags import LONG_INPUTS, STRATEGY_FLAGS
from convt5.generation.search import BeamSearch, Greedy, Sampling, Strategy, results_per_row
from convt5.modeling.description import ModelDescription
from convt5.text.task_format import TaskFormat

_LENGTHS = {"max_input_length": 512, "max_length": 128}  # If neither model nor run gives more.


@dataclasses.dataclass(frozen=True)
class Rank:
    """Ranks the task's labels (rank classification) instead of generating text.

    The probability of a label is the softmax over the log-probabilities of all labels.
    """


_STRATEGIES: dict[str, type[Strategy | Rank]] = {
    "greedy": Greedy,
    "sampling": Sampling,
    "beam": BeamSearch,
    "rank": Rank,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictConfig:
    """How texts become predictions.

    Attributes:
        strategy: how tokens are chosen: `search.Greedy`, `search.Sampling` or `search.BeamSearch`,
            or `Rank` among the labels of the task. None ranks if the task has labels, and is
            greedy otherwise; in `eval`, tasks themselves say what they rank, and None is greedy.
        max_length: the longest prediction in tokens, including the end token; None means the length
            used in training.
        max_input_length: the longest input in tokens, including the end token; None means the
            length used in training.
        long_inputs: "truncate" cuts longer inputs before their end token and counts them; "refuse"
            raises an error.
        batch_size: inputs decoded together, over all devices of a host. Changes results only by
            rounding, which may turn near ties, above all in bfloat16.
        seed: random seed of sampling. Samples depend on it and on the number of the input.
    """

    strategy: Strategy | Rank | None = None
    max_length: int | None = None
    max_input_length: int | None = None
    long_inputs: str = "truncate"
    batch_size: int = 32
    seed: int = 0

    def __post_init__(self):
        faults = [
            f"{name}={value!r} "
            + ("must be at least 1, and an integer." if rules.count(value) else broken)
            for name in ("max_length", "max_input_length", "batch_size")
            if (broken := rules.size(value := getattr(self, name)))
            and not (value is None and name in _LENGTHS)
        ]
        faults += _seed_faults(self.seed)
        if self.strategy is not None and not checks.is_description(self.strategy):
            faults.append(
                f"strategy={self.strategy!r} must be a strategy, such as search.BeamSearch()."
            )
        if self.long_inputs not in LONG_INPUTS:
            faults.append(
                f"long_inputs={self.long_inputs!r} must be one of {', '.join(LONG_INPUTS)}."
                f"{errors.suggest(str(self.long_inputs), LONG_INPUTS)}"
            )
        errors.raise_all(faults, where="PredictConfig")

    def completed(
        self, model: ModelDescription, trained_with: Mapping[str, int | None] | None = None
    ) -> "PredictConfig":
        """Returns the settings with all lengths set.

        Args:
            model: the model that the lengths must fit.
            trained_with: the training lengths, named as in this class, if known.

        Raises:
            UserError: a length exceeds the model's learned positions.
        """
        rows = model.max_positions
        values = {}
        for name, default in _LENGTHS.items():
            value = getattr(self, name)
            limit = model.most_tokens("encoder" if name == "max_input_length" else "decoder")
            if value is None:
                value = (trained_with or {}).get(name) or min(default, limit or default)
            if limit and value > limit:
                each = f" for {limit // rows} tokens each" if rows and limit > rows else ""
                raise errors.UserError(
                    f"{name}={value} is longer than the model's max_positions={rows}, its rows of "
                    f"learned positions{each}; set {name} to at most {limit}."
                )
            values[name] = value
        return dataclasses.replace(self, **values)

    def strategy_for(self, format: TaskFormat | None) -> "Strategy | Rank":
        """Returns the strategy; if None, chosen by the kind of answers of the task.

        Raises:
            UserError: labels are to be ranked, but there are none.
        """
        has_labels = format is not None and bool(format.labels)
        if isinstance(self.strategy, Rank) and not has_labels:
            raise errors.UserError(
                "strategy=rank chooses among the labels of the task, but the model keeps no task "
                "with labels; choose greedy, sampling or beam."
            )
        return self.strategy or (Rank() if has_labels else Greedy())

    def task_lengths(self) -> dict[str, int]:
        """Returns the lengths by the features of a seqio task; all lengths must be set."""
        if self.max_input_length is None or self.max_length is None:
            raise ValueError(f"{self} is not completed")
        return {"inputs": self.max_input_length, "targets": self.max_length}

    def described(self) -> dict[str, Any]:
        """Returns what results depend on, as JSON values."""
        strategy = self.strategy or Greedy()
        values = dataclasses.asdict(dataclasses.replace(self, strategy=strategy))
        del values["batch_size"]
        if isinstance(strategy, BeamSearch):  # Outputs state the number, whether set or derived.
            values["strategy"]["num_results"] = results_per_row(strategy)
        return values | {"strategy": {"name": type(strategy).__name__, **values["strategy"]}}


@dataclasses.dataclass(frozen=True, kw_only=True)
@checks.typed
class EvalConfig:
    """Which tasks are measured, and on which of their examples.

    Attributes:
        tasks: seqio tasks or mixtures, or names of registered ones, or a single one of these; empty
            means the run's own evaluation data.
        split: split of the tasks; None means the run's own, or else "validation".
        num_examples: number of examples, from the first; None means all.
        every_nth: takes only the first of each so many examples, before counting them, so that a
            sorted file is measured in all its parts.
        predict: also decodes the examples of tasks whose metrics need no predictions.
        seed: random seed of everything random in a task.
    """

    tasks: Any = ()
    split: str | None = None
    num_examples: int | None = None
    every_nth: int = 1
    predict: bool = False
    seed: int = 0

    def __post_init__(self):
        if not isinstance(self.tasks, list | tuple):
            object.__setattr__(self, "tasks", (self.tasks,))
        faults = _seed_faults(self.seed)
        if self.num_examples is not None and rules.count(self.num_examples):
            faults.append(f"num_examples={self.num_examples} must be at least 1, or None for all.")
        if rules.count(self.every_nth):
            faults.append(f"every_nth={self.every_nth} must be at least 1, which takes all.")
        errors.raise_all(faults, where="EvalConfig")


def from_flags(config: PredictConfig, flags: Mapping[str, Any]) -> PredictConfig:
    """Returns `config` with the values of the given flags of `flags.PREDICT_FLAGS`.

    Raises:
        UserError: a flag that the strategy does not have.
    """
    strategy_flags = {name: flags[name] for name in STRATEGY_FLAGS if flags[name] is not None}
    seed = {"seed": flags["seed"]} if flags["seed"] else {}
    chosen = flags["strategy"]
    strategy = config.strategy or Greedy()
    if chosen and not isinstance(strategy, _STRATEGIES[chosen]):
        strategy = _STRATEGIES[chosen]()
    name = chosen or type(strategy).__name__
    errors.raise_all(
        [
            f"--{flag}={value} does not apply to {name}; give "
            f"--strategy={' or '.join(_strategies_with(flag))} as well, or leave it out."
            for flag, value in (strategy_flags | seed).items()
            if flag not in _flags_of(type(strategy))
        ],
        where="strategy",
    )
    if chosen or strategy_flags:
        config = dataclasses.replace(
            config, strategy=dataclasses.replace(strategy, **strategy_flags)
        )
    names = ("max_length", "max_input_length", "long_inputs", "batch_size", "seed")
    values = {name: flags[name] for name in names if flags[name] is not None}
    return dataclasses.replace(config, **values)


def _seed_faults(seed: int) -> list[str]:
    if checks.fits_64_bits(seed):
        return []
    return [f"seed={seed!r} must fit into 64 bits: at least -2**63, and below 2**63."]


def _strategies_with(flag: str) -> list[str]:
    return [name for name, kind in _STRATEGIES.items() if flag in _flags_of(kind)]


def _flags_of(kind: type[Strategy | Rank]) -> set[str]:
    names = {field.name for field in dataclasses.fields(kind)}
    return names | {"seed"} if kind is Sampling else names
