"""Kills a run again and again, and checks how it ends: `python docs/tools/chaos.py`.

The run is a real one, of the real command. It is killed without warning at random moments, among
them while it writes checkpoints and while it evaluates, and must end as a run left alone does.
"""

import argparse
import bisect
import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from convt5 import errors
from convt5.configuration import command_line
from convt5.configuration.command_line import Flag

MOMENTS = ("any", "saving", "evaluating", "starting")
"""When a process is killed: at any time of training, while a checkpoint is half written, during an
evaluation, and before the first step after a restart."""

_RUN_EQUALITY = pathlib.Path(__file__).with_name("run_equality.py")

COMMAND = command_line.Command(
    name="docs/tools/chaos.py",
    summary="Kills a training run with SIGKILL at random moments, restarts it with the same "
    "command each time, and checks that its parameters, optimizer state and records equal bit for "
    "bit those of a run never killed. The configuration must have a macro RUN_DIR.",
    examples=[
        (
            "the check of docs/reliability.md: thirty kills of a tiny run on real text",
            "--gin_file=gin/runs/resume_check.gin --output_dir=runs/chaos --kills=30",
        ),
        (
            "the same of two processes with two devices each",
            "--gin_file=gin/runs/resume_check.gin --output_dir=runs/chaos2 "
            "--train='python launch/local.py --devices_per_process=2 --'",
        ),
    ],
    flags=[
        Flag("output_dir", "for both runs and the report; what an earlier check left is replaced."),
        Flag("kills", "how often, 30.", {"type": int, "default": 30}),
        Flag("seed", "of the random moments, 0.", {"type": int, "default": 0}),
        Flag("train", "the command that trains, instead of python -m convt5.train."),
        Flag(
            "timeout",
            "seconds that a start may take at most, 900.",
            {"type": float, "default": 900.0},
        ),
    ],
)
_REPORT_FILE = "report.json"
_POLL_SECS = 0.002


@dataclasses.dataclass(frozen=True)
class Timeline:
    """How a run left alone goes, in seconds since its process started.

    Attributes:
        steps: those recorded, ascending.
        seconds: when each record was seen first.
        evaluated: steps with an evaluation.
    """

    steps: Sequence[int]
    seconds: Sequence[float]
    evaluated: Sequence[int]

    def step_secs(self) -> float:
        """Returns the median time between records."""
        gaps = [b - a for a, b in zip(self.seconds, self.seconds[1:], strict=False)]
        return statistics.median(gaps) if gaps else 0.1

    def evaluates_after(self, step: int) -> bool:
        """Returns whether the record that follows `step` is that of an evaluation."""
        at = bisect.bisect_right(self.steps, step)
        return at < len(self.steps) and self.steps[at] in self.evaluated

    def secs_after(self, step: int) -> float:
        """Returns the time until the record that follows `step`; 0 after the last."""
        at = bisect.bisect_right(self.steps, step)
        if at == len(self.steps):
            return 0.0
        return self.seconds[at] - (self.seconds[at - 1] if at else 0.0)


@dataclasses.dataclass(frozen=True)
class Kill:
    """One kill, as it happened.

    Attributes:
        moment: what was aimed at.
        step: the last one recorded before.
        half_written: whether it left an incomplete checkpoint that was not there before.
        evaluating: whether the next record would have been that of an evaluation.
    """

    moment: str
    step: int
    half_written: bool
    evaluating: bool


class Run:
    """A run directory and the command that trains in it."""

    def __init__(self, command: Sequence[str], folder: pathlib.Path):
        self.folder = folder
        self.log = folder.with_suffix(".log")
        self._command = [*command, f"--gin.RUN_DIR={folder}"]

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen]:
        """Starts the command; whatever is left of it is killed when the context ends."""
        with self.log.open("ab") as log, started(self._command, log) as process:
            yield process

    def last_step(self) -> int:
        """Returns the step of the last complete record; 0 before the first."""
        path = self.folder / "metrics.jsonl"
        with contextlib.suppress(OSError, ValueError, IndexError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            return json.loads(file.read().split(b"\n")[-2])["step"]
        return 0

    def incomplete(self) -> frozenset[str]:
        """Returns the checkpoints half written: their names are longer than a step."""
        with contextlib.suppress(OSError):
            names = os.listdir(self.folder / "checkpoints")
            return frozenset(name for name in names if not name.isdigit())
        return frozenset()


def main(argv: Sequence[str]) -> int:
    arguments = command_line.parse(COMMAND, argv)
    flags = arguments.flags
    train = _train_command(flags.train)
    _check_flags(flags)
    command = [
        *train,
        *arguments.settings(),
    ]
    # Asked to end, the tool must not leave its training behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = _emptied(command_line.path(flags.output_dir).absolute())
    timeout = flags.timeout
    alone, killed = Run(command, folder / "alone"), Run(command, folder / "killed")
    _say("a run left alone")
    timeline = observe(alone, timeout)
    kills = under_fire(killed, timeline, flags.kills, random.Random(flags.seed), timeout)
    found = compare(killed, alone)
    report = summary(kills, found)
    (folder / _REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")
    print(_text(report))
    return 0 if not found and len(kills) == flags.kills else 1


def _train_command(text: str | None) -> list[str]:
    """Returns the words of the command that trains, to which settings are added."""
    if text is None:
        return [sys.executable, "-m", "convt5.train"]
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise errors.UserError(
            f"--train={text} is no command ({error}); quote it as a shell would have it."
        ) from None
    if not words or shutil.which(words[0]) is None:
        raise errors.UserError(
            f"--train={text} cannot be run: {''.join(words[:1])!r} is no program here; give a "
            "command such as 'python launch/local.py --'."
        )
    return words


def _check_flags(flags: argparse.Namespace) -> None:
    faults = []
    if not flags.output_dir:
        faults.append("--output_dir must name a folder for both runs and the report.")
    elif command_line.path(flags.output_dir).is_file():
        faults.append(f"--output_dir={flags.output_dir} is a file; name a folder to make.")
    if flags.kills < 1:
        faults.append(f"--kills={flags.kills} must be at least 1.")
    if not flags.timeout > 0:
        faults.append(f"--timeout={flags.timeout} must be a positive number of seconds.")
    errors.raise_all(faults, where="chaos")


def observe(run: Run, timeout: float) -> Timeline:
    """Trains without interruption; returns when what happened."""
    seen: dict[int, float] = {}
    with run.started() as process:
        began = time.monotonic()
        while process.poll() is None:
            seen.setdefault(run.last_step(), time.monotonic() - began)
            _check_time(run, began, timeout)
            time.sleep(_POLL_SECS)
    seen.setdefault(run.last_step(), time.monotonic() - began)
    _check_success(run, process)
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    looked = sorted(seen)
    steps = [record["step"] for record in records]
    # A step too short for a look of its own was seen with the one after.
    return Timeline(
        steps=steps,
        seconds=[seen[looked[bisect.bisect_left(looked, step)]] for step in steps],
        evaluated=[r["step"] for r in records if any(k.startswith("validation/") for k in r)],
    )


def under_fire(
    run: Run, timeline: Timeline, count: int, draw: random.Random, timeout: float
) -> list[Kill]:
    """Trains with so many kills, then to the end; returns those that happened before it."""
    kills = []
    aims = plan(timeline, count, draw)
    # A moment that does not come, or passes unseen, must not cost the kills after it.
    latest = [*(target for _, target in aims[1:]), (aims[-1][1] + timeline.steps[-1]) // 2]
    for number, (moment, target) in enumerate(aims, start=1):
        before, left_over = run.last_step(), run.incomplete()
        target = max(target, before + 1)  # Beyond what was there already: this start makes a step.
        window = range(target, max(target + 1, latest[number - 1]))
        with run.started() as process:
            _wait(run, process, timeline, moment, window, draw, timeout)
            if process.poll() is not None:
                _check_success(run, process)
                break  # Too late: the run has ended.
            kill(process)
        step, new = run.last_step(), run.incomplete() - left_over
        evaluating = moment != "starting" and timeline.evaluates_after(step)
        kills.append(Kill(moment, step, bool(new), evaluating))
        _say(f"kill {number} of {count}: {moment}, after step {step}")
    _say("to the end")
    with run.started() as process:
        began = time.monotonic()
        while process.poll() is None:
            _check_time(run, began, timeout)
            time.sleep(0.1)
    _check_success(run, process)
    return kills


def plan(timeline: Timeline, count: int, draw: random.Random) -> list[tuple[str, int]]:
    """Returns the moments of all kills, each with a step to reach before, ascending."""
    # A third of the steps is left for what happens after the last kill.
    last = max(1, timeline.steps[-1] * 2 // 3)
    targets = sorted(draw.randint(1, last) for _ in range(count))
    moments = [MOMENTS[i % len(MOMENTS)] for i in range(count)]
    draw.shuffle(moments)
    return list(zip(moments, targets, strict=True))


@contextlib.contextmanager
def started(
    command: Sequence[str | os.PathLike[str]],
    log: IO[Any],
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen]:
    """Starts a command in a process group of its own, which is killed when the context ends."""
    process = subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill(process)


def kill(process: subprocess.Popen) -> None:
    """Kills a process and those it started, without warning."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def compare(run: Run, reference: Run) -> list[str]:
    """Returns how the runs differ, from a process of its own, so that this one needs no JAX."""
    done = subprocess.run(
        [sys.executable, _RUN_EQUALITY, run.folder, reference.folder],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def summary(kills: Sequence[Kill], found: Sequence[str]) -> dict[str, object]:
    """Returns what is written to the report."""
    return {
        "kills": len(kills),
        "aimed_at": dict(collections.Counter(kill.moment for kill in kills)),
        "left_a_half_written_checkpoint": sum(kill.half_written for kill in kills),
        "during_a_step_with_evaluation": sum(kill.evaluating for kill in kills),
        "differences": list(found),
        "each": [dataclasses.asdict(kill) for kill in kills],
    }


def _wait(
    run: Run,
    process: subprocess.Popen,
    timeline: Timeline,
    moment: str,
    window: range,
    draw: random.Random,
    timeout: float,
) -> None:
    """Returns at a random time once the moment has come, or when the process has ended.

    The moment is the first of its kind from the first step of `window` on. Whatever is waited for,
    the wait ends with the window: this process may be quicker than the one whose times are drawn
    from, and a step too short to be seen.
    """
    began = time.monotonic()
    lowest = run.last_step()

    def is_due(step: int) -> bool:
        if moment == "starting":
            return True
        if step < window.start:
            return False
        if moment == "evaluating":
            return timeline.evaluates_after(step)
        return moment != "saving" or bool(run.incomplete())

    while process.poll() is None and not is_due(step := run.last_step()) and step < window.stop:
        _check_time(run, began, timeout)
        time.sleep(_POLL_SECS)
    longest = {
        "any": 3 * timeline.step_secs(),
        "saving": 0.05,
        "evaluating": timeline.secs_after(run.last_step()),
        "starting": timeline.seconds[0],
    }[moment]
    until = time.monotonic() + draw.uniform(0, longest)
    while time.monotonic() < until and process.poll() is None:
        step = run.last_step()
        lowest = min(lowest, step)  # A start drops records beyond its checkpoint.
        if step >= window.stop or (moment == "starting" and step > lowest):
            return
        time.sleep(_POLL_SECS)


def _check_success(run: Run, process: subprocess.Popen) -> None:
    if process.returncode:
        # Settings that training refuses are as wrong here.
        is_setting = process.returncode == errors.UserError.exit_code
        raise (errors.UserError if is_setting else errors.TrainingError)(
            f"training in {run.folder} ended by itself with exit code {process.returncode}; the "
            f"last lines of {run.log}:\n{_tail(run.log)}"
        )


def _check_time(run: Run, began: float, timeout: float) -> None:
    if time.monotonic() - began > timeout:
        raise errors.TrainingError(
            f"training in {run.folder} took more than timeout={timeout:.0f} s; give more with "
            f"--timeout, or see {run.log}:\n{_tail(run.log)}"
        )


def _emptied(folder: pathlib.Path) -> pathlib.Path:
    """Returns the folder, without what an earlier check left; anything else is left alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("alone", "killed"):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).with_suffix(".log").unlink(missing_ok=True)
    except OSError as error:
        raise errors.UserError(
            f"--output_dir={folder} cannot be used ({error.strerror}); name another folder."
        ) from error
    return folder


def _tail(path: pathlib.Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-15:])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _text(report: dict[str, object]) -> str:
    found = report["differences"]
    assert isinstance(found, list)
    lines = [
        f"{report['kills']} kills, {report['left_a_half_written_checkpoint']} of which left a half "
        f"written checkpoint and {report['during_a_step_with_evaluation']} fell into a step with "
        "an evaluation",
        "parameters, optimizer state and records are those of a run never killed"
        if not found
        else f"{len(found)} differences from a run never killed:",
        *(f"- {line}" for line in errors.abbreviate(found)),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    command_line.run(main)
