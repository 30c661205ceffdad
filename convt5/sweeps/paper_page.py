"""The page of a paper: a verdict for each claim, and for each question tables and a plot."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from convt5 import errors
from convt5.reports import figures, markdown, tables
from convt5.reports.tables import Table
from convt5.runtime import atomic_files
from convt5.sweeps import archive, evidence, paper_runs, running
from convt5.sweeps.evidence import Evidence, Line
from convt5.sweeps.paper import Claim, Paper, Question
from convt5.sweeps.study import Study

_RULE = (
    "How to read it: differences are paired. Two runs have the same seed, data and settings, and "
    "differ in what the claim names; a positive difference agrees with the claim. The interval of "
    "a line is that of its mean over seeds, the interval of a claim that of the mean over its "
    "lines (over the seeds of a single line): 95 %, by Student's t. Of costs, a line is the cost "
    "of the first model divided by that of the second, and its interval follows from those of the "
    "two medians; that of the claim spans its lines. A claim is reproduced if its interval lies "
    "above zero (above one for costs), and not reproduced if it lies below. Otherwise nothing can "
    "be said at this scale."
)


def write(paper: Paper, studies: Mapping[str, Study], *, suffix: str = figures.SUFFIX) -> str:
    """Writes the page and a picture for each question; returns the page.

    Args:
        paper: the questions.
        studies: the studies by their names.
        suffix: of the pictures, which chooses their format.

    Raises:
        UserError: the page cannot be written, matplotlib is not installed, a claim does not fit its
            study, or costs were measured with other settings.
    """
    records = paper_runs.read_costs(paper)
    answers = [
        [
            evidence.of_claim(claim, studies)
            if isinstance(claim, Claim)
            else evidence.of_costs(claim, records)
            for claim in question.claims
        ]
        for question in paper.questions
    ]
    path = paper.path
    folder = path.with_suffix("")
    state = _state(studies) + _machine(records)
    parts = [f"# {errors.printable(paper.title)}", *paper.text, errors.printable(state), _RULE]
    parts.append(markdown.sections([_summary(paper, answers)]).rstrip())
    with archive.naming(f"page={paper.page!r}"):
        folder.mkdir(parents=True, exist_ok=True)
        for number, (question, found) in enumerate(zip(paper.questions, answers, strict=True), 1):
            parts += [f"## {errors.printable(question.title)}", *question.text]
            for one in found:
                parts.append(f"### {errors.printable(one.claim.text)}")
                parts.append(markdown.sections([_table(one)]).rstrip())
            if any(one.lines for one in found):
                picture = folder / f"question_{number}{suffix}"
                _draw(found, picture)
                shown = f"{folder.name}/{picture.name}"
                parts.append(f"![{_described(question)}]({shown})")
        text = "\n\n".join(parts) + "\n"
        atomic_files.replace_text(path, text)
    return text


def _state(studies: Mapping[str, Study]) -> str:
    """Returns a sentence on the runs of the studies, and the processor time they took."""
    told, seconds = [], 0.0
    for name, study in studies.items():
        every = running.runs(study)
        done = [made for made in every if made.is_done]
        told.append(f"{name} {len(done)} of {len(every)}")
        noted = (running.final_value(made.folder, "train_cpu_seconds") for made in done)
        seconds += sum(value for value in noted if value is not None)
    taken = f" Training took {seconds / 3600:.1f} CPU hours." if seconds else ""
    return f"Runs that are done: {', '.join(told)}.{taken}"


def _machine(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a sentence on the machine that measured costs; empty without records."""
    about = next((r for r in records if r.get("suite") == "machine"), None)
    if about is None:
        return ""
    where = f"{about.get('device')} ({about.get('processor') or about.get('platform')})"
    return (
        f" Costs were measured on {where} with {about.get('processors')} processors and jax "
        f"{about.get('jax')}."
    )


def _summary(paper: Paper, answers: Sequence[Sequence[Evidence]]) -> Table:
    rows = [
        {
            "question": str(number),
            "claim": found.claim.text,
            "mean": _with_unit(found),
            "95 % interval": _interval(found.interval),
            "verdict": found.verdict,
        }
        for number, of_question in enumerate(answers, start=1)
        for found in of_question
    ]
    return tables.of_rows("Verdicts", rows)


def _with_unit(found: Evidence) -> str:
    if found.mean is None:
        return "no line counts" if found.lines else "no run"
    return f"{_number(found, found.mean)} {'times' if found.is_ratio else found.unit}"


def _table(found: Evidence) -> Table:
    """Returns the lines of a claim, with its verdict as a note."""
    notes = [f"**{found.verdict.capitalize()}**: {_with_unit(found)}{_of_interval(found)}."]
    if any(not line.counts for line in found.lines):
        least = getattr(found.claim, "least", None)
        notes.append(f"Lines with * do not count: no model reaches {least:g}.")
    if found.num_missing:
        notes.append(f"Pairs of runs that are not finished: {found.num_missing}.")
    rows = [
        {
            "line": line.name + "*" * (not line.counts),
            **_ends(found, line),
            **({} if found.is_ratio else {"seeds": str(len(line.values))}),
            "times" if found.is_ratio else "difference": _number(found, line.mean),
            "interval": _interval(line.interval),
        }
        for line in found.lines
    ]
    return tables.of_rows("", rows, notes=notes) if rows else Table("", notes=notes)


def _ends(found: Evidence, line: Line) -> dict[str, str]:
    if line.ends is None:
        return {}
    claim = found.claim
    names = (
        [" and ".join(v) for v in zip(*claim.contrast.values(), strict=True)]
        if isinstance(claim, Claim)
        else [f"{claim.first}, {found.unit}", f"{claim.second}, {found.unit}"]
    )
    return dict(zip(names, map(_plain, line.ends), strict=True))


def _of_interval(found: Evidence) -> str:
    return "" if found.interval is None else f", {_interval(found.interval)}"


def _interval(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return "-"
    decimals = _decimals(*interval)
    return f"{interval[0]:.{decimals}f} to {interval[1]:.{decimals}f}"


def _number(found: Evidence, value: float) -> str:
    return f"{value:{'' if found.is_ratio else '+'}.{_decimals(value)}f}"


def _decimals(*values: float) -> int:
    """Returns how many decimals show three digits of the largest value, but one at least."""
    largest = max(map(abs, values))
    if not 0 < largest < 10:
        return 1
    return 2 - math.floor(math.log10(largest))


def _plain(value: float) -> str:
    return f"{value:.4g}" if 1e-3 <= abs(value) < 1e5 or not value else f"{value:.3g}"


def _described(question: Question) -> str:
    return errors.printable(f"Evidence for: {question.title}").replace("]", ")")


def _draw(answers: Sequence[Evidence], path: pathlib.Path) -> None:
    """Draws a panel for each claim: its lines, their mean, and a line where nothing differs."""
    shown = [found for found in answers if found.lines]
    heights = [len(found.lines) + 1.6 for found in shown]
    figure = figures.figure_class("the plots")(
        figsize=(7.6, 0.5 + 0.36 * sum(heights) + 0.55 * len(shown)), layout="constrained"
    )
    panels = figure.subplots(len(shown), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, found in zip(panels, shown, strict=True):
        _draw_claim(axes, found)
    figures.save(figure, path)


def _draw_claim(axes: Any, found: Evidence) -> None:
    names = [line.name + "*" * (not line.counts) for line in found.lines]
    for place, line in enumerate(found.lines):
        axes.plot(line.values, [place] * len(line.values), ".", color="C0", alpha=0.4)
        _mark(axes, place, line.mean, line.interval, figures.style(0, joined=False))
    if found.mean is not None and len(names) > 1:
        _mark(axes, len(names), found.mean, found.interval, figures.style(1, joined=False))
        names.append("all")
    axes.axvline(1.0 if found.is_ratio else 0.0, color="0.3", linewidth=1, zorder=1)
    axes.set_yticks(range(len(names)), [figures.text(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_title(
        figures.text(f"{found.claim.text}: {found.verdict}"), fontsize=9, loc="left", wrap=True
    )
    claim = found.claim
    of = "difference" if isinstance(claim, Claim) else f"{claim.first} / {claim.second}"
    axes.set_xlabel(figures.text(f"{of}, {found.unit}"), fontsize=9)
    figures.tidy(axes)
    axes.grid(visible=False, axis="y")


def _mark(
    axes: Any,
    place: int,
    mean: float,
    interval: tuple[float, float] | None,
    style: Mapping[str, Any],
) -> None:
    low, high = interval or (mean, mean)
    away = [[max(mean - low, 0.0)], [max(high - mean, 0.0)]]
    axes.errorbar([mean], [place], xerr=away, capsize=3, elinewidth=1.4, **style)
