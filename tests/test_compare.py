"""Comparing runs: reading their metrics, the table at equal steps and time, and the plot."""

import json
import math
import os
import pathlib
import sys
from typing import Any

import pytest
from matplotlib.figure import Figure
from quick import quick

from convt5 import compare
from convt5.errors import UserError
from convt5.reports import markdown
from convt5.text import vocabulary_files

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def write_run(folder: pathlib.Path, losses, *, seconds_per_step: float = 1.0) -> pathlib.Path:
    """A run directory with a training record each 10 steps and a validation each 20."""
    folder.mkdir(parents=True)
    lines = []
    for step in range(10, 20 * len(losses) + 1, 10):
        record = {
            "step": step,
            "loss": 9.0,
            "tokens_per_second": 100.0 / seconds_per_step,
            "train_seconds": step * seconds_per_step,
            "train_cpu_seconds": 2 * step * seconds_per_step,
        }
        if step % 20 == 0:
            record["validation/loss"] = losses[step // 20 - 1]
            record["validation/bits_per_byte"] = float(losses[step // 20 - 1]) / 2
        lines.append(json.dumps(record) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
def two_runs(tmp_path) -> list[str]:
    fast = write_run(tmp_path / "fast", [5.0, 4.0, 3.5], seconds_per_step=1.0)
    slow = write_run(tmp_path / "slow", [4.5, 3.0], seconds_per_step=4.0)
    return [str(fast), str(slow)]


def cells(table: str) -> list[dict[str, str]]:
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()
    )
    return [dict(zip(head, row, strict=True)) for row in rows]


def compared(runs, **how) -> list[dict[str, str]]:
    return cells(markdown.sections([compare.comparison(runs, **how)]))


def test_table_orders_by_last_value_and_compares_at_equal_steps_and_time(two_runs):
    rows = compared(compare.read_runs(two_runs))
    assert [row["run"] for row in rows] == ["slow", "fast"]
    # Both reached step 40; the fast run ended after 60 s, when the slow one had made 15 steps.
    assert [row["at step 40"] for row in rows] == ["3.0000", "4.0000"]
    assert [row["at 1m 00s"] for row in rows] == ["", "3.5000"]
    assert [row["tokens/s"] for row in rows] == ["25", "100"]
    assert [row["bits per byte"] for row in rows] == ["1.5000", "1.7500"]


def test_time_can_be_that_of_the_processor(two_runs):
    runs = compare.read_runs(two_runs, clock="processor")
    rows = compared(runs, clock="processor")
    assert [row["processor time"] for row in rows] == ["5m 20s", "2m 00s"]
    assert [row["s/step"] for row in rows] == ["8.00", "2.00"]
    # Tokens per second of the wall clock would not belong beside them.
    assert "tokens/s" not in rows[0]


def count_flops(folder: str, notes: dict[int, Any]) -> None:
    """Notes what a step takes, by the step after which that holds."""
    lines = [json.dumps({"step": s, "flops_per_step": f}) + "\n" for s, f in notes.items()]
    (pathlib.Path(folder) / "machines.jsonl").write_text("".join(lines))


def test_runs_are_compared_at_equal_flops(two_runs, tmp_path, drawn):
    count_flops(two_runs[0], {0: 1e15})
    # The first 25 steps were made with batches of half the size.
    count_flops(two_runs[1], {0: 1e15, 25: 2e15})
    runs = compare.read_runs(two_runs, clock="flops")
    assert [[point.spent for point in run.points] for run in runs] == [
        [2e16, 4e16, 6e16],
        [2e16, 2.5e16 + 15 * 2e15],
    ]
    rows = compared(runs, clock="flops")
    assert [row["training FLOPs"] for row in rows] == ["55 PFLOP", "60 PFLOP"]
    assert [row["FLOP/step"] for row in rows] == ["1.38P", "1P"]
    assert [row["at 55 PFLOP"] for row in rows] == ["3.0000", "4.0000"]
    compare.main([*two_runs, "--clock=flops", f"--output={tmp_path}"])
    page = (tmp_path / "comparison.html").read_text()
    assert '"clock": "training FLOPs", "unit": "FLOP"' in page
    assert "[20, 2e+16, 4.5]" in page
    (figure,) = drawn
    assert figure.axes[1].get_xlabel() == "training FLOPs in PFLOP"
    ends = [line.get_xdata()[-1] for line in figure.axes[1].lines]
    assert ends == pytest.approx([55, 60])


@pytest.mark.parametrize("notes", [{0: None}, {0: "many"}, {30: 1e15}, {0: 1e15, 10: None}])
def test_flops_that_are_not_known_from_the_first_step_on_are_left_out(two_runs, notes):
    count_flops(two_runs[0], {0: 1e15})
    count_flops(two_runs[1], notes)
    runs = compare.read_runs(two_runs, clock="flops")
    assert [run.spent for run in runs] == [6e16, None]
    with pytest.raises(UserError, match="--clock=flops needs flops_per_step, which none"):
        compare.read_runs([two_runs[1]], clock="flops")


def test_table_is_aligned_as_plain_text(two_runs):
    lines = markdown.sections([compare.comparison(compare.read_runs(two_runs))]).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_runs_of_a_study_are_named_by_what_differs(tmp_path):
    folders = [
        str(write_run(tmp_path / name, [1.0], seconds_per_step=1.0))
        for name in ("model=t5,seed=0", "model=dynamic,seed=0")
    ]
    assert [run.name for run in compare.read_runs(folders)] == ["model=t5", "model=dynamic"]
    assert [run.name for run in compare.read_runs(folders[:1])] == ["model=t5,seed=0"]
    named = [folders[0], f"ours={folders[1]}"]
    assert [run.name for run in compare.read_runs(named)] == ["model=t5", "ours"]


def test_higher_accuracy_is_better(tmp_path):
    for name, value in (("low", 0.25), ("high", 0.5)):
        folder = tmp_path / name
        folder.mkdir()
        record = {"step": 1, "validation/accuracy": value, "train_seconds": 1.0}
        (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    metric = "validation/accuracy"
    runs = compare.read_runs([str(tmp_path / "low"), str(tmp_path / "high")], metric=metric)
    assert [r["run"] for r in compared(runs, metric=metric)] == ["high", "low"]


def test_runs_are_compared_by_the_metric_of_their_task(tmp_path):
    folders = [str(tmp_path / name) for name in ("a", "b")]
    for folder in map(pathlib.Path, folders):
        folder.mkdir()
        record = {"step": 1, "validation/loss": 1.0, "squad/loss": 2.0, "squad/em": 1.0}
        (folder / "metrics.jsonl").write_text(json.dumps(record | {"squad/f1": 3.0}) + "\n")
    assert compare.common_metric(folders) == "squad/em"
    (tmp_path / "a" / "summary.json").write_text('{"metric": "squad/f1"}')
    assert compare.common_metric(folders) == "squad/f1"
    (tmp_path / "b" / "summary.json").write_text('{"metric": "squad/em"}')
    assert compare.common_metric(folders) == "squad/em"
    (tmp_path / "b" / "metrics.jsonl").write_text('{"step": 1, "validation/loss": 1.0}\n')
    assert compare.common_metric(folders) == "validation/loss"


@pytest.mark.parametrize(
    ("metric", "lower"),
    [
        ("squad/em", False),
        ("loss_of_life/f1", False),
        ("tokens_per_second", False),
        ("rte/rank_accuracy", False),
        ("ema/validation/loss", True),
        ("validation/bits_per_byte", True),
        ("accuracy_task/perplexity", True),
        ("seconds_per_step", True),
        ("sst2/invalid", True),
    ],
)
def test_the_last_part_of_a_metric_says_what_is_better(tmp_path, metric, lower):
    for name, value in (("low", 20.0), ("high", 80.0)):
        (tmp_path / name).mkdir()
        record = {"step": 1, metric: value, "train_seconds": 1.0}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    runs = compare.read_runs([str(tmp_path / name) for name in ("low", "high")], metric=metric)
    rows = compared(runs, metric=metric)
    assert [row["run"] for row in rows] == (["low", "high"] if lower else ["high", "low"])


def test_runs_are_named_by_their_directory_or_as_given(tmp_path):
    first = write_run(tmp_path / "a" / "seed0", [1.0])
    second = write_run(tmp_path / "b" / "seed0", [1.0])
    by_folder = compare.read_runs([str(first), str(second)])
    assert [run.name for run in by_folder] == ["a/seed0", "b/seed0"]
    named = compare.read_runs([f"attention={first}", f"dynamic={second}"])
    assert [run.name for run in named] == ["attention", "dynamic"]


def test_an_equals_sign_in_a_directory_is_part_of_its_name(tmp_path):
    (run,) = compare.read_runs([str(write_run(tmp_path / "rate=0.1", [1.0]))])
    assert run.name == "rate=0.1"


def test_a_run_of_a_study_can_be_given_a_name(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "runs" / "model=t5,seed=0", [1.0])
    (run,) = compare.read_runs([f"attention={folder}"])
    assert (run.name, run.last.value) == ("attention", 1.0)
    monkeypatch.chdir(tmp_path / "runs")
    (run,) = compare.read_runs(["a=model=t5,seed=0"])
    assert run.name == "a"
    with pytest.raises(UserError, match="model=t5,seed=1 is no directory"):
        compare.read_runs(["a=model=t5,seed=1"])


def test_a_bar_in_a_name_begins_no_other_cell(tmp_path):
    (run,) = compare.read_runs([f"a|b={write_run(tmp_path / 'run', [1.0])}"])
    assert r"| a\|b |" in markdown.sections([compare.comparison([run])])


@pytest.fixture
def timeless(tmp_path) -> str:
    """A run that did not record how long it took."""
    (tmp_path / "timeless").mkdir()
    records = [{"step": s, "validation/loss": 60 / s} for s in (20, 40, 60)]
    (tmp_path / "timeless" / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )
    return str(tmp_path / "timeless")


@pytest.mark.parametrize("clock", ["wall", "processor"])
def test_time_that_was_not_recorded_is_left_empty(two_runs, timeless, clock, tmp_path):
    runs = compare.read_runs([*two_runs, timeless], clock=clock)
    rows = {row["run"]: row for row in compared(runs, clock=clock)}
    name = "training time" if clock == "wall" else "processor time"
    equal = "at 1m 00s" if clock == "wall" else "at 2m 00s"
    shown = [rows["timeless"][cell] for cell in (name, "s/step", equal, "at step 40")]
    assert shown == ["", "", "", "1.5000"]
    assert rows["fast"][equal] == "3.5000"
    compare.plot(runs, tmp_path / "plot.png", clock=clock)


def test_time_that_no_run_recorded_cannot_be_compared(timeless, tmp_path):
    with pytest.raises(UserError, match="--clock=processor needs train_cpu_seconds, which none"):
        compare.read_runs([timeless], clock="processor")
    compare.main([timeless, f"--output={tmp_path}"])
    (row,) = cells((tmp_path / "comparison.md").read_text())
    assert "training time" not in row


def test_not_a_number_is_left_out_of_the_curve(tmp_path):
    folder = write_run(tmp_path / "run", [2.0])
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(
            '{"step": 30, "validation/loss": "nan", "validation/bits_per_byte": "nan", '
            '"tokens_per_second": "inf", "train_seconds": 30}\n'
        )
    (run,) = compare.read_runs([str(folder)])
    assert (run.bits_per_byte, run.tokens_per_second) == (1.0, 100.0)
    assert compared([run])[0]["bits per byte"] == "1.0000"
    assert run.last.step == 20
    assert math.isfinite(run.last.value)


def test_a_time_that_is_not_a_number_is_unknown(tmp_path):
    folder = write_run(tmp_path / "run", [2.0])
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 40, "validation/loss": 3.0, "train_seconds": "nan"}\n')
    compare.main([str(folder), f"--output={tmp_path}"])
    (run,) = compare.read_runs([str(folder)])
    assert run.spent is None


def test_two_runs_of_one_name_are_refused(tmp_path):
    for name in ("x", "y"):
        write_run(tmp_path / name, [1.0])
    for given in ([f"a={tmp_path}/x", f"a={tmp_path}/y"], [f"{tmp_path}/x"] * 2):
        with pytest.raises(UserError, match=r"2 runs are called '[ax]'; give each a name"):
            compare.main([*given, f"--output={tmp_path}/out"])


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_run(tmp_path / "a", [1.0])
    compare.main(["~/a", "name=~/a", "--output=~/out"])
    assert (tmp_path / "out" / "comparison.png").exists()


def test_command_writes_table_page_and_plot(two_runs, tmp_path, capsys):
    output = tmp_path / "out" / "deep"
    compare.main([*two_runs, f"--output={output}"])
    table = (output / "comparison.md").read_text()
    assert capsys.readouterr().out.startswith(table)
    assert (output / "comparison.png").read_bytes().startswith(PNG_SIGNATURE)
    assert "<title>2 runs: validation loss</title>" in (output / "comparison.html").read_text()


FORMATS = [(".svg", b"<?xml"), (".pdf", b"%PDF"), (".png", PNG_SIGNATURE)]


@pytest.mark.slow
@pytest.mark.parametrize("format", quick(FORMATS, chosen=FORMATS[1:2]), ids=lambda f: f[0])
def test_the_suffix_chooses_the_format(two_runs, tmp_path, format):
    suffix, start = format
    compare.main([*two_runs, f"--output={tmp_path}", f"--plot_suffix={suffix}"])
    drawn = (tmp_path / f"comparison{suffix}").read_bytes()
    assert drawn.startswith(start)
    compare.main([*two_runs, f"--output={tmp_path}", f"--plot_suffix={suffix}"])
    assert (tmp_path / f"comparison{suffix}").read_bytes() == drawn


def test_a_suffix_of_no_format_is_refused_before_anything_is_written(two_runs, tmp_path):
    with pytest.raises(UserError, match=r"--plot_suffix=svg must end in one of .*\.svg"):
        compare.main([*two_runs, f"--output={tmp_path / 'out'}", "--plot_suffix=svg"])
    assert not (tmp_path / "out").exists()


def page_data(path: pathlib.Path) -> dict[str, Any]:
    text = (path / "comparison.html").read_text()
    return json.loads(text.partition('id="data">')[2].partition("</script>")[0])


def test_the_page_tells_settings_costs_samples_and_machines(tmp_path):
    folders = [write_run(tmp_path / name, [3.0, 2.0]) for name in ("<b>a", "c")]
    about = {"convt5": "0.1.0", "jax": "0.10", "device": "cpu", "flops_per_token": 1.5e6}
    for folder, mixing in zip(folders, ("dynamic", "<i>"), strict=True):
        lines = f"a.B.same = 1\na.B.mixing = {mixing!r}\nRUN_DIR = {str(folder)!r}\n"
        (folder / "config.gin").write_text(lines)
        (folder / "machines.jsonl").write_text(json.dumps({"step": 0, **about}) + "\n")
        (folder / "samples.jsonl").write_text('{"step": 20, "text": "<u>x</u>"}\n')
        (folder / "summary.json").write_text('{"num_parameters": 1770000}')
    compare.main([*map(str, folders), f"--output={tmp_path}"])
    found = page_data(tmp_path)
    tables = {table["title"]: table for table in found["tables"]}
    assert tables["Settings that differ"]["columns"] == ["run", "a.B.mixing"]
    assert tables["Settings that differ"]["rows"][1] == ["c", "'<i>'"]
    costs = dict(zip(tables["Costs"]["columns"], tables["Costs"]["rows"][0], strict=True))
    assert (costs["parameters"], costs["FLOPs per token"]) == ("1.77M", "1.5M")
    assert costs["training time"] == "40s"
    assert tables["Versions and machine"]["rows"][0][:3] == ["<b>a", "0.1.0", "0.10"]
    assert found["runs"][0]["samples"] == [[20, "<u>x</u>"]]
    assert found["runs"][0]["curves"]["validation/loss"] == [[20, 20.0, 3.0], [40, 40.0, 2.0]]
    assert "<b>a" not in (tmp_path / "comparison.html").read_text()


@pytest.fixture
def two_vocabularies(tmp_path) -> list[str]:
    """The run of the lower loss has the more bits per byte, as its vocabulary is smaller."""
    found = []
    for name, loss, bits, sentinels in (("bytes", 1.0, 1.5, 0), ("pieces", 4.0, 1.0, 100)):
        folder = write_run(tmp_path / name, [loss])
        path = folder / "metrics.jsonl"
        records = [json.loads(line) for line in path.read_text().splitlines()]
        records[-1]["validation/bits_per_byte"] = bits
        records[-1]["task/accuracy"] = bits
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        vocabulary = vocabulary_files.KeptVocabulary("characters", sentinels)
        text = vocabulary_files.KeptText(vocabulary, vocabulary)
        vocabulary_files.write(folder / vocabulary_files.FOLDER, text)
        found.append(str(folder))
    return found


@pytest.mark.parametrize(
    ("asked", "shown", "first"),
    [
        (["--metric=validation/loss"], "validation/loss", "pieces"),
        (["--metric=task/accuracy"], "task/accuracy", "bytes"),
    ],
)
def test_runs_of_different_vocabularies_are_ranked_by_bits_per_byte_with_a_warning(
    two_vocabularies, tmp_path, capsys, asked, shown, first
):
    compare.main([*two_vocabularies, *asked, f"--output={tmp_path}"])
    captured = capsys.readouterr()
    is_of_tokens = shown == "validation/loss"
    assert ("warning: The runs have different vocabularies" in captured.err) == is_of_tokens
    table = captured.out[captured.out.index("|") :].partition("\n\n")[0]
    best = cells(table)[0]
    assert best["run"] == first
    assert f"last {shown}" in best
    warnings = page_data(tmp_path)["warnings"]
    assert len(warnings) == is_of_tokens
    if is_of_tokens:
        assert "ranked by validation/bits_per_byte" in (tmp_path / "comparison.md").read_text()


def test_where_nothing_is_asked_for_different_vocabularies_are_compared_by_bits_per_byte(
    two_vocabularies, tmp_path, capsys
):
    for folder in two_vocabularies:
        path = pathlib.Path(folder) / "metrics.jsonl"
        path.write_text(path.read_text().replace("task/accuracy", "other"))
    compare.main([*two_vocabularies, f"--output={tmp_path}"])
    assert "last validation/bits_per_byte" in capsys.readouterr().out
    # One that did not record them is told of, and nothing is hidden.
    path = pathlib.Path(two_vocabularies[0]) / "metrics.jsonl"
    path.write_text(path.read_text().replace("validation/bits_per_byte", "other_bits"))
    compare.main([*two_vocabularies, f"--output={tmp_path}"])
    assert "not all of them recorded validation/bits_per_byte" in capsys.readouterr().err


@pytest.fixture
def drawn(monkeypatch) -> list[Any]:
    """Figures that were saved."""
    figures = []
    real = Figure.savefig

    def save(figure, *args, **options):
        figures.append(figure)
        real(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", save)
    return figures


@pytest.mark.slow
def test_a_plot_of_many_runs_with_long_names_can_be_read(tmp_path, drawn):
    names = [f"DATASET=mnist10k,PEAK=0.{i},OPTIMIZER=AdamW,model={'x' * 40}" for i in range(22)]
    names += ["_first", "a$b_{$", "y" * 200]
    folders = [
        str(write_run(tmp_path / name, [5.0, 4.0, 3.0 + i / 9])) for i, name in enumerate(names)
    ]
    compare.main([*folders, f"--output={tmp_path}"])
    (figure,) = drawn
    by_step, by_time = figure.axes
    (legend,) = figure.legends
    shown = [text.get_text() for text in legend.get_texts()]
    assert len(shown) == len(names)
    assert any("_first (" in text for text in shown)
    box = legend.get_window_extent()
    for axes in (by_step, by_time):
        assert axes.get_position().width > 0.4
        assert not axes.get_window_extent().overlaps(box)
        looks = {
            (line.get_color(), line.get_linestyle(), line.get_marker()) for line in axes.get_lines()
        }
        assert len(looks) == len(names)
    # The legend names the lines of both.
    assert [line.get_color() for line in legend.get_lines()] == [
        line.get_color() for line in by_step.get_lines()
    ]


def test_a_plot_that_cannot_be_written_names_the_flag(two_runs, tmp_path):
    (tmp_path / "comparison.png").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        compare.main([*two_runs, f"--output={tmp_path}"])


def test_settings_that_are_no_regular_file_are_left_out(two_runs, tmp_path):
    os.mkfifo(pathlib.Path(two_runs[0], "config.gin"))
    compare.main([*two_runs, f"--output={tmp_path}"])
    assert (tmp_path / "comparison.html").exists()


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "NaN", "-1.7e308"])
def test_numbers_that_are_not_finite_are_left_out(tmp_path, value):
    folder = write_run(tmp_path / "run", [2.0, 1.0])
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write(f'{{"step": 50, "validation/loss": {value}, "train_seconds": 50}}\n')
    (run,) = compare.read_runs([str(folder)])
    assert run.last == compare.Point(40, 40, 1.0)
    assert run.diverged


def test_a_run_that_diverged_comes_last_and_says_so(tmp_path):
    better = write_run(tmp_path / "better", [2.0, 1.0])
    with (better / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 50, "validation/loss": "nan", "train_seconds": 50}\n')
    worse = write_run(tmp_path / "worse", [2.0, 1.5])
    first, last = compared(compare.read_runs([str(better), str(worse)]))
    assert (first["run"], last["run"]) == ("worse", "better")
    assert (last["last validation/loss"], last["best validation/loss"]) == ("not finite", "1.0000")


@pytest.mark.parametrize("others", [0, 2])
def test_a_run_that_was_never_finite_is_listed(two_runs, tmp_path, others):
    never = write_run(tmp_path / "never", ["nan", "inf"])
    compare.main([str(never), *two_runs[:others], f"--output={tmp_path}"])
    row = cells((tmp_path / "comparison.md").read_text())[-1]
    assert (row["run"], row["last validation/loss"]) == ("never", "not finite")
    if others:
        assert (row["steps"], row["best validation/loss"], row["at step 40"]) == ("", "", "")


def test_a_record_before_the_first_step_can_be_compared(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "validation/loss": 3.0}\n')
    (row,) = compared(compare.read_runs([str(tmp_path)]))
    assert (row["steps"], row["s/step"]) == ("0", "0.00")


def test_a_run_that_was_not_evaluated_yet_is_listed_after_the_others(two_runs, tmp_path):
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    names = [str(tmp_path / "young"), *two_runs]
    assert compare.common_metric(names) == compare.common_metric(two_runs)
    compare.main([*names, f"--output={tmp_path}"])
    row = cells((tmp_path / "comparison.md").read_text())[-1]
    assert (row["run"], row["steps"], row["last validation/loss"]) == ("young", "", "none")


def test_every_directory_that_is_no_run_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as caught:
        compare.read_runs([str(tmp_path / "empty"), str(tmp_path / "missing")])
    assert "holds no metrics.jsonl" in str(caught.value)
    assert "missing is no directory" in str(caught.value)


def test_unknown_metric_suggests_a_recorded_one(two_runs):
    with pytest.raises(UserError, match="Did you mean validation/loss"):
        compare.read_runs(two_runs, metric="validation/los")


def test_without_matplotlib_the_table_is_written_and_the_message_says_what_to_install(
    two_runs, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"pip install 'convt5\[plot\]'"):
        compare.main([*two_runs, f"--output={tmp_path}"])
    assert (tmp_path / "comparison.md").exists()


def test_output_that_cannot_be_written_is_a_user_error(two_runs, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UserError, match="output="):
        compare.main([*two_runs, f"--output={blocked}"])


@pytest.mark.parametrize(
    "argv", [[], ["--metrics=loss", "run"], ["--metric=", "run"], ["--output", "", "run"]]
)
def test_usage_errors_point_to_help(argv):
    with pytest.raises(UserError, match="--help"):
        compare.main(argv)


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        compare.main(["--help"])
    assert caught.value.code == 0
    assert "python -m convt5.compare runs/t5_tiny" in capsys.readouterr().out
