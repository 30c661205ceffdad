"""The report of a study: tables as Markdown, a page for the browser, values as JSON, and plots."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from convt5 import errors
from convt5.reports import figures, markdown, page, tables
from convt5.reports.tables import Table
from convt5.runtime import atomic_files, metric_names
from convt5.sweeps import analysis, plots, profile, running
from convt5.sweeps.analysis import Best, Distribution, Key, Result
from convt5.sweeps.running import StudyRun
from convt5.sweeps.study import SEED, Study
from convt5.training import run_overview
from convt5.training.run_overview import Overview

REPORT_FILE = "report.md"
PAGE_FILE = "report.html"
RESULTS_FILE = "results.json"


def write(study: Study, *, suffix: str = figures.SUFFIX) -> str:
    """Writes report.md, report.html, results.json and the plots; returns the tables.

    Args:
        study: whose runs are told.
        suffix: of the plots, which chooses their format.

    Raises:
        UserError: no run is finished, or the folder is not writable.
    """
    results = analysis.results(study)
    every = running.runs(study)
    num_done = sum(made.is_done for made in every)
    if not results:
        raise errors.UserError(
            f"no run of the study in {study.output_dir} is done; run the command without "
            "--report_only to train them."
        )
    groups = analysis.by_row(study, results)
    bests = {key: analysis.best(study, runs) for key, runs in groups.items()}
    profiles = profile.lines(study, results) if study.over else {}
    state = f"{num_done} of {len(every)} runs are done."
    if study.over:
        sections = profile.sections(study, profiles, profile.cost_table(study, profiles))
    else:
        distributions = {key: analysis.distribution(runs) for key, runs in groups.items()}
        sections = _sections(study, distributions, bests)
        error = study.metric if study.perfect is None else f"{study.perfect:g} - {study.metric}"
        state = (
            f"{num_done} of {len(every)} runs are done. The error is {error} after the last step."
        )
    sections = [Table("", notes=[state]), *sections]
    text = markdown.sections(sections)
    folder = study.folder
    overviews = {m.point.name: run_overview.read(m.folder) for m in every if m.is_done}
    try:
        atomic_files.replace_text(folder / REPORT_FILE, text)
        page.write(folder / PAGE_FILE, _page(study, sections, every, overviews))
        atomic_files.replace_text(folder / RESULTS_FILE, _json(study, results))
        if study.over:
            drawn = plots.draw_profiles(study, profiles, folder, suffix=suffix)
        else:
            drawn = plots.draw(study, groups, bests, folder, suffix=suffix)
    except OSError as error:
        raise errors.UserError(
            f"output_dir={study.output_dir!r} cannot be written ({error.strerror}); choose another."
        ) from error
    names = (REPORT_FILE, PAGE_FILE, *drawn)
    return f"{text}\nwrote {', '.join(str(folder / name) for name in names)}"


def _json(study: Study, results: Sequence[Result]) -> str:
    """Returns the final errors and the curves of all runs, as JSON."""
    values = {
        "metric": study.metric,
        "perfect": study.perfect,
        "runs": [
            {
                "labels": r.labels,
                "error": _plain(r.error),
                "curve": [[step, _plain(error)] for step, error in r.curve],
            }
            for r in results
        ],
    }
    return json.dumps(values, indent=1) + "\n"


def _page(
    study: Study,
    sections: Sequence[Table],
    every: Sequence[StudyRun],
    overviews: Mapping[str, Overview],
) -> page.Page:
    """Returns the page of a study: its report, and every run that is done."""
    runs = [run_overview.page_run(name, found) for name, found in overviews.items()]
    axes = run_overview.axes(runs)
    settings = {m.point.name: m.point.labels for m in every if m.is_done}
    return page.Page(
        title=f"Study in {study.output_dir}: {metric_names.display_name(study.metric)}",
        runs=runs,
        tables=[
            *sections,
            page.differing(settings)._replace(title="Settings of the runs"),
            run_overview.costs(overviews)._replace(title="Costs of the runs"),
            run_overview.machines(overviews),
        ],
        metric=study.metric,
        axes=axes,
        falling=[name for name in axes if metric_names.lower_is_better(name)],
    )


def _sections(
    study: Study, distributions: Mapping[Key, Distribution], bests: Mapping[Key, Best]
) -> list[Table]:
    """Returns the tables of a study; their rows are the values of `Study.rows`."""
    sections = [_errors(study, distributions), _best(study, bests)]
    if gaps := list(analysis.differences(study, bests)):
        sections.append(_gaps(study, gaps))
    return [*sections, _steps(study, bests)]


def _errors(study: Study, distributions: Mapping[Key, Distribution]) -> Table:
    """Returns a table of error quantiles."""
    quantiles = {
        "least": 0.0,
        "first quartile": 0.25,
        "median": 0.5,
        "third quartile": 0.75,
        "greatest": 1.0,
    }
    return tables.of_rows(
        "Errors over the grid",
        [
            {
                **_named(study.rows, key),
                "runs": str(len(d.errors)),
                "diverged": str(d.num_diverged),
                **{name: _number(d.quantile(share)) for name, share in quantiles.items()},
            }
            for key, d in distributions.items()
        ],
    )


def _best(study: Study, bests: Mapping[Key, Best]) -> Table:
    """Returns a table of the best settings and their errors."""
    return tables.of_rows(
        "Best settings",
        [
            {
                **_named(study.rows, key),
                **b.labels,
                f"{SEED}s": str(len(b.errors)),
                "mean error": _number(b.mean),
                "least": _number(min(b.errors)),
                "greatest": _number(max(b.errors)),
            }
            for key, b in bests.items()
        ],
    )


def _gaps(study: Study, gaps: Sequence[tuple[Key, float, float]]) -> Table:
    """Returns a table of both values of `Study.versus` and their difference."""
    first, second = analysis.versus_labels(study)[:2]
    other_rows = [axis for axis in study.rows if axis != study.versus]
    return tables.of_rows(
        f"{second} minus {first}, each at its best setting",
        [
            {
                **_named(other_rows, key),
                first: _number(a),
                second: _number(b),
                "difference": f"{b - a:+.4f}" if math.isfinite(b - a) else "-",
            }
            for key, a, b in gaps
        ],
        notes=["Means over the seeds that both have."],
    )


def _steps(study: Study, bests: Mapping[Key, Best]) -> Table:
    """Returns a table of the steps that the best settings need."""
    limits = analysis.common_errors(bests)
    rows = []
    for key, best in bests.items():
        limit = math.nan if best.diverged else limits.get(key[:-1], math.nan)
        steps = analysis.steps_to(best.curve, limit)
        rows.append(
            {
                **_named(study.rows, key),
                "error": "-" if steps is None else _number(limit),
                "steps": "-" if steps is None else f"{steps:,.0f}",
            }
        )
    but = ", but for those that diverged" if any(b.diverged for b in bests.values()) else ""
    return tables.of_rows(f"Steps of the best settings to an error that all reach{but}", rows)


def _named(axes: Sequence[str], key: Key) -> dict[str, str]:
    return dict(zip(axes, key, strict=True))


def _number(value: float) -> str:
    return f"{value:.4f}" if math.isfinite(value) else "diverged"


def _plain(value: float) -> Any:
    return value if math.isfinite(value) else str(value)
