"""A paper's claims are judged by paired differences, and its page says what the runs say."""

import json
import pathlib
import statistics

import pytest
from scipy import stats

from convt5 import sweep
from convt5.errors import TrainingError, UserError
from convt5.sweeps import (
    Claim,
    CostClaim,
    Grid,
    Paper,
    Question,
    Study,
    archive,
    evidence,
    paper_page,
    paper_runs,
    reading,
    running,
)

ROOT = pathlib.Path(__file__).resolve().parents[1]
CASES = ["short", "long"]
MODELS = ["t5", "conv"]


def study(folder, *, tasks=("a", "b"), seeds=(0, 1, 2), **changes) -> Study:
    axes = {
        "task": {name: {"TASK": name} for name in tasks},
        "model": {name: {"MODEL": name} for name in MODELS},
        "start": {name: {"START": name} for name in CASES},
    }
    known = {
        "output_dir": str(folder),
        "gin_files": ["gin/runs/digits.gin"],
        "grids": [Grid(axes=axes)],
        "seeds": seeds,
        "metric": "validation/accuracy",
        "perfect": 100.0,
        "rows": ["model", "start"],
        "over": "task",
    }
    return Study(**known | changes)


def finish(chosen: Study, value, *, leave_out=()) -> None:
    """Records `value(labels)` as the metric of every run but those whose labels are left out."""
    for made in running.runs(chosen):
        labels = made.point.labels
        if labels in leave_out:
            continue
        made.folder.mkdir(parents=True, exist_ok=True)
        found = value(labels)
        record = {"step": 3, chosen.metric: found, "train_cpu_seconds": 1800.0}
        (made.folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        is_finite = found == found
        running.write_about(
            made.folder,
            {
                "settings": {
                    "gin_files": list(made.point.gin_files),
                    "bindings": list(made.point.bindings),
                },
                "status": "finished" if is_finite else "diverged",
                "message": "" if is_finite else "loss is not finite",
            },
        )


def accuracy(labels) -> float:
    """The longer start gains 4 on task a and 6 on task b, 1 more with conv, and the seed a bit."""
    gain = {"a": 4.0, "b": 6.0}[labels["task"]] + (labels["model"] == "conv")
    noise = [0.0, 0.5, -0.5][int(labels["seed"])]
    base = 70.0 + 5.0 * (labels["model"] == "conv") + 2.0 * int(labels["seed"])
    return base + (gain + noise) * (labels["start"] == "long")


START = {"start": CASES}


class TestDifferences:
    def test_are_paired_by_seed_and_averaged_over_other_axes(self, tmp_path):
        chosen = study(tmp_path)
        finish(chosen, accuracy)
        claim = Claim(text="longer is better", studies=["s"], contrast=START)
        found = evidence.of_claim(claim, {"s": chosen})
        assert [line.name for line in found.lines] == ["a", "b"]
        # Mean over t5 and conv, by seed.
        assert found.lines[0].values == pytest.approx((4.5, 5.0, 4.0))
        assert found.lines[1].values == pytest.approx((6.5, 7.0, 6.0))
        assert found.lines[0].ends == pytest.approx((74.5, 79.0))
        assert found.mean == pytest.approx(5.5)
        assert found.unit == "points"
        assert found.num_missing == 0

    def test_have_the_interval_of_students_t(self, tmp_path):
        chosen = study(tmp_path)
        finish(chosen, accuracy)
        claim = Claim(text="longer is better", studies=["s"], contrast=START)
        found = evidence.of_claim(claim, {"s": chosen})
        values = found.lines[0].values
        expected = stats.t.interval(0.95, 2, statistics.fmean(values), stats.sem(values))
        assert found.lines[0].interval == pytest.approx(expected)
        expected = stats.t.interval(0.95, 1, 5.5, stats.sem([4.5, 6.5]))
        assert found.interval == pytest.approx(expected)

    def test_of_one_line_have_its_interval_over_seeds(self, tmp_path):
        chosen = study(tmp_path)
        finish(chosen, accuracy)
        claim = Claim(text="", studies=["s"], contrast=START, where={"task": ["a"]})
        found = evidence.of_claim(claim, {"s": chosen})
        assert found.interval == found.lines[0].interval
        assert found.verdict == "reproduced"

    def test_seeds_that_change_nothing_are_no_evidence(self, tmp_path):
        chosen = study(tmp_path)
        finish(chosen, lambda labels: accuracy(dict(labels) | {"seed": "0"}) / 3)
        for where in ({}, {"task": ["a"]}):
            claim = Claim(text="", studies=["s"], contrast=START, where=where)
            found = evidence.of_claim(claim, {"s": chosen})
            assert found.mean > 1
            assert [line.interval for line in found.lines] == [None] * len(found.lines)
            assert (found.interval, found.verdict) == (None, "cannot be said at this scale")

    def test_of_differences_say_what_a_gain_gains(self, tmp_path):
        chosen = study(tmp_path)
        finish(chosen, accuracy)
        for contrast in ({"model": MODELS, **START}, {**START, "model": MODELS}):
            claim = Claim(text="conv gains more", studies=["s"], contrast=contrast)
            found = evidence.of_claim(claim, {"s": chosen})
            assert [line.values for line in found.lines] == [pytest.approx((1.0, 1.0, 1.0))] * 2
            assert found.lines[0].ends is None

    def test_are_those_of_numbers_however_these_are_written(self, tmp_path):
        chosen = study(
            tmp_path,
            grids=[Grid(axes={"task": ["a"], "model": ["t5"], "start": [256, 1024]})],
            rows=["start"],
            over=None,
        )
        finish(chosen, lambda labels: 50.0 + float(labels["start"]) / 1024)
        for values in ([256, 1024], ["256", "1024"]):
            contrast, where = {"start": values}, {"task": ["a"], "model": ("t5",)}
            claim = Claim(text="", studies=["s"], contrast=contrast, where=where)
            assert evidence.of_claim(claim, {"s": chosen}).mean == pytest.approx(0.75)

    @pytest.mark.parametrize("values", [5, "ab", None, {"a": 1}])
    def test_of_what_is_no_list_are_refused(self, values):
        for changes in (
            {"contrast": {"start": values}},
            {"contrast": START, "where": {"x": values}},
        ):
            with pytest.raises(UserError, match="must be a list of values"):
                Claim(text="", studies=["s"], **changes)

    def test_of_a_loss_are_positive_where_it_falls(self, tmp_path):
        chosen = study(tmp_path, metric="validation/loss", perfect=None)
        finish(chosen, lambda labels: 3.0 - 0.5 * (labels["start"] == "long"))
        claim = Claim(text="", studies=["s"], contrast=START)
        found = evidence.of_claim(claim, {"s": chosen})
        assert found.mean == pytest.approx(0.5)
        assert found.lines[0].ends == pytest.approx((3.0, 2.5))
        assert found.unit == "nats"

    def test_without_both_runs_are_counted_and_left_out(self, tmp_path):
        chosen = study(tmp_path)
        every = [made.point.labels for made in running.runs(chosen)]
        missing = [x for x in every if x["seed"] == "2" and x["start"] == "long"]
        diverged = {"task": "a", "model": "t5", "start": "short", "seed": "1"}
        finish(
            chosen,
            lambda labels: float("nan") if labels == diverged else accuracy(labels),
            leave_out=missing,
        )
        claim = Claim(text="", studies=["s"], contrast=START)
        found = evidence.of_claim(claim, {"s": chosen})
        assert found.num_missing == 5
        assert found.lines[0].values == pytest.approx((4.5, 5.5))  # Of seed 1, conv alone.
        assert found.lines[1].values == pytest.approx((6.5, 7.0))

    def test_below_what_can_differ_do_not_count(self, tmp_path):
        chosen = study(tmp_path)
        finish(chosen, lambda x: accuracy(x) / (50 if x["task"] == "b" else 1))
        claim = Claim(text="", studies=["s"], contrast=START, least=5.0)
        found = evidence.of_claim(claim, {"s": chosen})
        assert [line.counts for line in found.lines] == [True, False]
        assert found.mean == found.lines[0].mean
        assert found.interval == found.lines[0].interval
        page = paper_page.write(
            paper(tmp_path, questions=[Question(title="q", claims=[claim])]), {"s": chosen}
        )
        assert "| b* " in page
        assert "Lines with * do not count: no model reaches 5." in page

    def test_join_the_lines_of_several_studies(self, tmp_path):
        first, second = study(tmp_path / "a"), study(tmp_path / "b", tasks=("c",), over=None)
        finish(first, accuracy)
        finish(second, lambda labels: accuracy(labels | {"task": "a"}))
        claim = Claim(text="", studies=["x", "y"], contrast=START)
        found = evidence.of_claim(claim, {"x": first, "y": second})
        assert [line.name for line in found.lines] == ["a", "b", "y"]
        by_model = Claim(text="", studies=["y"], contrast=START, lines="model")
        found = evidence.of_claim(by_model, {"y": second})
        assert [line.name for line in found.lines] == MODELS


@pytest.mark.parametrize(
    ("gain", "verdict"),
    [
        ((4.0, 5.0, 6.0), "reproduced"),
        ((-4.0, -5.0, -6.0), "not reproduced"),
        ((-1.0, 1.0, 0.5), "cannot be said at this scale"),
    ],
)
def test_the_interval_decides(gain, verdict, tmp_path):
    chosen = study(tmp_path, tasks=("a",))
    finish(chosen, lambda x: 50.0 + gain[int(x["seed"])] * (x["start"] == "long"))
    claim = Claim(text="", studies=["s"], contrast=START)
    assert evidence.of_claim(claim, {"s": chosen}).verdict == verdict


def test_a_single_seed_says_nothing(tmp_path):
    chosen = study(tmp_path, seeds=(0,))
    finish(chosen, accuracy)
    found = evidence.of_claim(Claim(text="", studies=["s"], contrast=START), {"s": chosen})
    assert found.interval is None
    assert found.verdict == "cannot be said at this scale"


@pytest.mark.parametrize(
    ("interval", "shown"),
    [
        ((-12.34, 5.6), "-12.3 to 5.6"),
        ((-0.25, 0.5), "-0.250 to 0.500"),
        ((-0.00042, 0.0009), "-0.000420 to 0.000900"),
        ((0.0, 0.0), "0.0 to 0.0"),
        (None, "-"),
    ],
)
def test_intervals_have_three_digits(interval, shown):
    assert paper_page._interval(interval) == shown


def records(*seconds):
    return [
        {
            "suite": "train_step",
            "case": case,
            "length": length,
            "seconds": value,
            "low_seconds": 0.9 * value,
            "high_seconds": 1.2 * value,
            "flops": 100,
        }
        for length, pair in zip((128, 512), seconds, strict=True)
        for case, value in zip(("t5", "dynamic"), pair, strict=True)
    ]


class TestCosts:
    claim = CostClaim(text="cheaper", first="t5", second="dynamic")

    def test_are_ratios_with_the_interval_of_the_repeats(self):
        found = evidence.of_costs(self.claim, records((2.0, 1.0), (8.0, 2.0)))
        assert [line.name for line in found.lines] == ["128 tokens", "512 tokens"]
        assert [line.mean for line in found.lines] == [2.0, 4.0]
        assert found.lines[0].interval == pytest.approx((1.8 / 1.2, 2.4 / 0.9))
        assert found.mean == pytest.approx(8**0.5)
        assert found.verdict == "reproduced"

    @pytest.mark.parametrize(
        ("seconds", "verdict"),
        [
            (((1.0, 2.0), (1.0, 3.0)), "not reproduced"),
            (((2.0, 1.0), (1.0, 1.0)), "cannot be said at this scale"),
        ],
    )
    def test_must_be_less_at_every_length(self, seconds, verdict):
        assert evidence.of_costs(self.claim, records(*seconds)).verdict == verdict

    def test_that_are_times_without_an_interval_are_not_measured(self):
        # Such as the range that earlier versions recorded, by other names.
        known = [
            {key: value for key, value in record.items() if key != "low_seconds"}
            for record in records((2.0, 1.0), (8.0, 2.0))
        ]
        assert evidence.of_costs(self.claim, known).lines == ()

    def test_of_nothing_are_not_measured(self):
        claim = CostClaim(text="", first="t5", second="dynamic", quantity="temporary_bytes")
        known = [r | {"temporary_bytes": r["seconds"]} for r in records((1.0, 0.0), (2.0, 1.0))]
        found = evidence.of_costs(claim, known)
        assert [line.values for line in found.lines] == [(2.0,)]
        assert found.num_missing == 1

    def test_without_an_interval_are_exact(self):
        claim = CostClaim(text="", first="t5", second="dynamic", quantity="flops")
        found = evidence.of_costs(claim, records((1.0, 1.0), (1.0, 1.0)))
        assert found.interval == (1.0, 1.0)
        assert found.verdict == "cannot be said at this scale"

    def test_of_other_cases_are_none(self):
        claim = CostClaim(text="", first="t5", second="hyena")
        found = evidence.of_costs(claim, records((1.0, 1.0), (1.0, 1.0)))
        assert (found.lines, found.mean, found.num_missing) == ((), None, 2)


def paper(folder, **changes) -> Paper:
    known = {
        "page": str(folder / "paper.md"),
        "title": "Is longer better?",
        "studies": {"s": {"gin_file": "s.gin"}},
        "questions": [
            Question(
                title="Does it help?",
                claims=[
                    Claim(text="longer is better", studies=["s"], contrast=START),
                    CostClaim(text="cheaper", first="t5", second="dynamic"),
                ],
            )
        ],
        "bench_dir": str(folder / "bench"),
    }
    return Paper(**known | changes)


def measured(folder, name: str = "bench") -> None:
    (folder / name).mkdir(exist_ok=True, parents=True)
    machine = {"suite": "machine", "device": "cpu", "processor": "AMD", "processors": 2, "jax": "1"}
    lines = [json.dumps(r) + "\n" for r in [machine, *records((2.0, 1.0), (8.0, 2.0))]]
    (folder / name / "records.jsonl").write_text("".join(lines))


def test_the_page_has_a_verdict_a_table_and_a_picture(tmp_path):
    chosen = study(tmp_path / "s")
    finish(chosen, accuracy)
    measured(tmp_path)
    text = paper_page.write(paper(tmp_path), {"s": chosen})
    assert text == (tmp_path / "paper.md").read_text()
    (line,) = [x for x in text.splitlines() if "| longer is better" in x]
    interval = stats.t.interval(0.95, 1, 5.5, stats.sem([4.5, 6.5]))
    assert "+5.50 points" in line
    assert f"{interval[0]:.1f} to {interval[1]:.1f}" in line
    assert "### longer is better" in text
    assert line.rstrip(" |").endswith("cannot be said at this scale")
    assert "| a " in text
    assert "+4.50" in text
    assert "s 24 of 24" in text
    assert "12.0 CPU hours" in text
    assert "2.83 times" in text
    assert "Costs were measured on cpu (AMD) with 2 processors and jax 1." in text
    assert "](paper/question_1.png)" in text
    assert (tmp_path / "paper" / "question_1.png").stat().st_size > 1000


def test_a_page_without_runs_says_so(tmp_path):
    text = paper_page.write(paper(tmp_path), {"s": study(tmp_path / "s")})
    assert text.count("no run") >= 2
    assert "Pairs of runs that are not finished: 12." in text
    assert "question_1" not in text


def test_a_page_that_cannot_be_written_is_named_before_any_run(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(reading, "studies_of", lambda *_: {"s": study(tmp_path / "s")})
    monkeypatch.setattr(paper_runs, "run_all", lambda *_, **__: calls.append(1))
    (tmp_path / "file").touch()
    flags = ("--gin_file=paper.gin",)
    for page, more in (("file/paper.md", ()), ("paper.md", (f"--export_results={tmp_path}/file",))):
        chosen = paper(tmp_path, page=str(tmp_path / page))
        monkeypatch.setattr(reading, "read", lambda *_, chosen=chosen: chosen)
        with pytest.raises(UserError, match=r"(page|export_results)=.*file.* cannot be written"):
            sweep.main([*flags, *more])
    assert not calls


class TestRuns:
    def launch(self, calls):
        def run(arguments, log):
            calls.append(arguments)
            record = {"step": 1, "validation/accuracy": 50.0}
            (pathlib.Path(log).parent / "metrics.jsonl").write_text(json.dumps(record) + "\n")
            return 0

        return run

    @pytest.fixture(autouse=True)
    def unchecked(self, monkeypatch):
        monkeypatch.setattr(running, "check", lambda _: None)

    def bench(self, tmp_path, calls, code=0):
        def run(arguments):
            calls.append(list(arguments))
            # Also where it fails: at some lengths it had measured before.
            measured(tmp_path, "bench/unfinished")
            return code

        return run

    def test_studies_run_in_order_and_then_costs_are_measured_once(self, tmp_path):
        studies = {
            "s": study(tmp_path / "s", tasks=("a",), seeds=(0,)),
            "t": study(tmp_path / "t", tasks=("b",), seeds=(0,)),
        }
        chosen = paper(tmp_path, bench={"lengths": "128,512", "only_ours": True, "quick": False})
        calls, benches = [], []
        for _ in range(2):
            paper_runs.run_all(
                chosen,
                studies,
                launch=self.launch(calls),
                bench=self.bench(tmp_path, benches),
            )
        tasks = [next(a for a in call if a.startswith("--gin.TASK")) for call in calls]
        assert tasks == ["--gin.TASK='a'"] * 4 + ["--gin.TASK='b'"] * 4
        expected = ["--suites=train_step", "--lengths=128,512", "--only_ours"]
        assert benches == [[*expected, f"--output={tmp_path / 'bench' / 'unfinished'}"]]
        assert [path.name for path in (tmp_path / "bench").iterdir()] == ["records.jsonl"]

    def test_costs_measured_with_other_flags_are_not_those_of_the_paper(self, tmp_path):
        studies = {"s": study(tmp_path / "s", tasks=("a",), seeds=(0,))}
        machine = {"suite": "machine", "arguments": ["--lengths=128", "--suites=train_step"]}
        costs = [machine, *records((2.0, 1.0), (8.0, 2.0))]
        (tmp_path / "bench").mkdir()
        text = "".join(json.dumps(record) + "\n" for record in costs)
        (tmp_path / "bench" / "records.jsonl").write_text(text)
        same = paper(tmp_path, bench={"lengths": 128})
        assert not paper_runs.missing_costs(same)
        other = paper(tmp_path, bench={"lengths": 128, "batch_size": 32})
        for use in (paper_runs.run_all, paper_runs.describe, paper_page.write):
            with pytest.raises(UserError, match=r"--lengths=128.*batch_size=32.*another bench_dir"):
                use(other, studies)
        assert not (tmp_path / "s").exists()

    def test_the_number_of_runs_is_that_of_all_studies(self, tmp_path):
        studies = {
            "s": study(tmp_path / "s", tasks=("a",), seeds=(0,)),
            "t": study(tmp_path / "t", tasks=("b",), seeds=(0,)),
        }
        calls = []
        paper_runs.run_all(paper(tmp_path), studies, launch=self.launch(calls), most_runs=5)
        assert len(calls) == 5

    def test_a_failed_benchmark_ends_the_paper(self, tmp_path):
        studies = {"s": study(tmp_path / "s", tasks=("a",), seeds=(0,))}
        finish(studies["s"], accuracy)
        for code, kind in ((2, UserError), (1, TrainingError)):
            with pytest.raises(kind, match=f"exit code {code}"):
                paper_runs.run_all(paper(tmp_path), studies, bench=self.bench(tmp_path, [], code))
            assert paper_runs.missing_costs(paper(tmp_path))

    def test_flags_of_the_benchmark_are_checked_before_any_run(self, tmp_path, monkeypatch):
        chosen = paper(tmp_path, bench={"lenghts": 128})
        studies = {"s": study(tmp_path / "s", tasks=("a",), seeds=(0,))}
        monkeypatch.setattr(reading, "read", lambda *_: chosen)
        monkeypatch.setattr(reading, "studies_of", lambda *_: studies)
        calls = []
        monkeypatch.setattr(running, "run_all", lambda *_, **__: calls.append(1))
        monkeypatch.setattr(paper_runs, "_bench", lambda arguments: calls.append(arguments) or 2)
        for more in ([], ["--dry_run"]):
            with pytest.raises(UserError, match="exit code 2"):
                sweep.main(["--gin_file=paper.gin", *more])
        assert calls == [["--suites=train_step", "--lenghts=128", "--dry_run"]] * 2
        assert not (tmp_path / "bench").exists()
        measured(tmp_path)
        paper_runs.check_costs(chosen)  # What was measured needs no flags.
        assert len(calls) == 2

    def test_a_benchmark_without_the_cases_is_named(self, tmp_path):
        studies = {"s": study(tmp_path / "s", tasks=("a",), seeds=(0,))}
        finish(studies["s"], accuracy)

        def bench(_):
            (tmp_path / "bench" / "unfinished").mkdir(parents=True)
            return 0

        with pytest.raises(UserError, match="no seconds of t5 and dynamic"):
            paper_runs.run_all(paper(tmp_path), studies, bench=bench)

    def test_results_travel_by_the_names_of_studies(self, tmp_path):
        studies = {"s": study(tmp_path / "s"), "t": study(tmp_path / "t")}
        finish(studies["s"], accuracy)
        assert paper_runs.write_results(studies, tmp_path / "results") == 24
        assert [p.name for p in (tmp_path / "results").iterdir()] == ["s.jsonl"]
        again = {"s": study(tmp_path / "s2"), "t": study(tmp_path / "t2")}
        assert paper_runs.read_results(again, tmp_path / "results") == {"s": 24}
        assert archive.write(again["s"], tmp_path / "again" / "s.jsonl") == 24
        with pytest.raises(UserError, match=r"has none of s\.jsonl, t\.jsonl"):
            paper_runs.read_results(studies, tmp_path)


class TestBadInput:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"studies": []}, "must name at least one"),
            ({"contrast": {}}, "one axis or two"),
            ({"contrast": {"start": ["short"]}}, "two different values"),
            ({"contrast": {"start": ["x"]}}, "two different values"),
            ({"where": {"start": ["short"]}}, "both contrast and where"),
            ({"where": {"seed": ["0"]}}, "paired by seed"),
        ],
    )
    def test_a_claim_names_what_is_wrong(self, changes, message):
        known = {"text": "t", "studies": ["s"], "contrast": START}
        with pytest.raises(UserError, match=message):
            Claim(**known | changes)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"contrast": {"begin": CASES}}, "'begin' is none of the axes"),
            ({"contrast": {"start": ["short", "lang"]}}, "start='lang' is none of short, long"),
            ({"where": {"task": ["z"]}}, "task='z' is none of a, b"),
            ({"lines": "size"}, "'size' is none of the axes"),
        ],
    )
    def test_a_claim_must_fit_its_study(self, changes, message, tmp_path):
        claim = Claim(**{"text": "t", "studies": ["s"], "contrast": START} | changes)
        with pytest.raises(UserError, match=message):
            claim.check(study(tmp_path), "s")

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"page": "paper.html"}, r"page='paper.html' must end in \.md"),
            ({"studies": {"s": {}}}, "must be settings with a gin_file"),
            ({"studies": {"s/../t": {"gin_file": "s.gin"}}}, "letters, digits and underscores"),
            ({"studies": {"other": {"gin_file": "s.gin"}}}, "names the study 's', which is none"),
            ({"questions": []}, "must hold at least one"),
        ],
    )
    def test_a_paper_names_what_is_wrong(self, changes, message, tmp_path):
        with pytest.raises(UserError, match=message):
            paper(tmp_path, **changes)

    def test_a_question_holds_claims(self):
        with pytest.raises(UserError, match="neither a Claim nor a CostClaim"):
            Question(title="q", claims=["longer is better"])
        with pytest.raises(UserError, match="claims=\\[\\] must hold"):
            Question(title="q", claims=[])

    def test_a_quantity_is_known(self):
        with pytest.raises(UserError, match="quantity='second' must be one of"):
            CostClaim(text="t", first="a", second="b", quantity="second")


class TestFiles:
    @pytest.mark.parametrize(("name", "questions"), [("paper", 5), ("paper_budget", 4)])
    def test_the_papers_of_the_project_are_read_with_their_studies(self, name, questions):
        found = reading.read([f"gin/studies/{name}.gin"], ["VOCABULARY='v.model'"])
        assert isinstance(found, Paper)
        studies = reading.studies_of(found)
        assert len(found.questions) == questions
        assert all(isinstance(one, Study) for one in studies.values())

    @pytest.mark.slow
    def test_its_recorded_results_make_the_page(self, tmp_path, capsys, monkeypatch):
        (tmp_path / "runs").mkdir()
        monkeypatch.chdir(tmp_path)
        arguments = [
            "--gin_file=gin/studies/paper.gin",
            "--gin.VOCABULARY=runs/results/english_8k.model",
            "--gin.CACHE=runs/results/cache",
            f"--gin.BENCH_DIR={ROOT / 'docs' / 'results' / 'bench'}",
            f"--gin.PAGE={tmp_path / 'paper.md'}",
            f"--import_results={ROOT / 'docs' / 'results'}",
            "--report_only",
        ]
        assert sweep.main(arguments) == 0
        shown = capsys.readouterr()
        assert "imported the results of 120 runs of finetuning" in shown.err
        assert "finetuning 120 of 120" in shown.out
        assert "times" in shown.out
        assert (tmp_path / "paper" / "question_1.png").exists()

    @pytest.mark.slow
    def test_recorded_results_of_the_larger_budget_make_its_page(
        self, tmp_path, capsys, monkeypatch
    ):
        monkeypatch.chdir(tmp_path)
        arguments = [
            "--gin_file=gin/studies/paper_budget.gin",
            f"--gin.PAGE={tmp_path / 'paper_budget.md'}",
            f"--import_results={ROOT / 'docs' / 'results'}",
            "--report_only",
        ]
        assert sweep.main(arguments) == 0
        assert "finetuning_cached 120 of 120" in capsys.readouterr().out
        page = (tmp_path / "paper_budget.md").read_text()
        assert page == (ROOT / "docs" / "paper_budget.md").read_text()

    def test_a_dry_run_lists_the_studies(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        files = ["--gin_file=gin/studies/paper.gin", "--gin.VOCABULARY=v.model", "--dry_run"]
        assert sweep.main(files) == 0
        assert "finetuning: 120 runs" in capsys.readouterr().out

    def test_a_fault_of_a_study_names_the_study(self, tmp_path):
        chosen = paper(tmp_path, studies={"s": {"gin_file": "gin/studies/none.gin"}})
        with pytest.raises(
            UserError, match=r"the study s of the paper cannot be read: .*none\.gin"
        ):
            reading.studies_of(chosen)
        chosen = paper(
            tmp_path, studies={"s": {"gin_file": "gin/studies/paper.gin", "VOCABULARY": "v"}}
        )
        with pytest.raises(UserError, match="describes a paper"):
            reading.studies_of(chosen)
