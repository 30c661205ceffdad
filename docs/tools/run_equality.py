"""Whether two finished runs are the same run: arrays bit for bit, records value for value.

`python docs/tools/run_equality.py RUN RUN` prints how they differ, as a JSON list.
"""

import json
import sys
from typing import Any

import numpy as np
from etils import epath

from convt5.checkpoints import reading
from convt5.training import run_log

# What depends on the clock: everything else that a run records must be equal.
CLOCK_METRICS = frozenset(
    {
        "seconds_per_step",
        "data_wait_share",
        "train_seconds",
        "train_cpu_seconds",
        "tokens_per_second",
        "flops_utilization",
    }
)


def differences(run_dir: epath.PathLike, reference: epath.PathLike) -> list[str]:
    """Returns a line for each way in which a run differs from another; none if it is the same.

    Compared are the steps recorded in `metrics.jsonl`, each value recorded but those of the clock,
    and the parameters and the optimizer's state of the last checkpoint.
    """
    ours, theirs = epath.Path(run_dir), epath.Path(reference)
    return _records_differ(ours, theirs) + _arrays_differ(ours, theirs)


def _records_differ(ours: epath.Path, theirs: epath.Path) -> list[str]:
    mine, expected = (run_log.read_metrics(path) for path in (ours, theirs))
    steps, wanted = [r["step"] for r in mine], [r["step"] for r in expected]
    lines = []
    if steps != wanted:
        missing, twice = sorted(set(wanted) - set(steps)), sorted(_repeated(steps))
        lines.append(
            f"records of other steps: missing {missing}, twice {twice}, "
            f"too many {sorted(set(steps) - set(wanted))}"
        )
    by_step = {record["step"]: record for record in expected}
    for record in mine:
        other = by_step.get(record["step"], {})
        names = sorted((record.keys() | other.keys()) - CLOCK_METRICS)
        lines += [
            f"step {record['step']}: {name} is {record.get(name)}, not {other.get(name)}"
            for name in names
            if other and record.get(name) != other.get(name)
        ]
    return lines


def _arrays_differ(ours: epath.Path, theirs: epath.Path) -> list[str]:
    folders = [reading.find_checkpoint(path) for path in (ours, theirs)]
    if folders[0].name != folders[1].name:
        return [f"the last checkpoint is of step {folders[0].name}, not {folders[1].name}"]
    mine, expected = (_flat(folder) for folder in folders)
    if mine.keys() != expected.keys():
        return [f"other arrays: {sorted(mine.keys() ^ expected.keys())}"]
    return [
        f"{name} differs in {np.count_nonzero(mine[name] != expected[name])} of "
        f"{mine[name].size} numbers"
        for name in mine
        if mine[name].tobytes() != expected[name].tobytes()
    ]


def _flat(folder: epath.Path) -> dict[str, Any]:
    parts = reading.load_everything(folder)
    return {f"{part}/{n}": np.asarray(a) for part, named in parts.items() for n, a in named.items()}


def _repeated(steps: list[int]) -> set[int]:
    return {step for step in steps if steps.count(step) > 1}


if __name__ == "__main__":
    print(json.dumps(differences(*sys.argv[1:3])))
