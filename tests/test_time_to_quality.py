"""Sides of three libraries train for the same time on the same rows, and are told and drawn."""

import dataclasses
import importlib.util
import json

import jax.numpy as jnp
import numpy as np
import pytest
import time_to_quality
from convt5.tasks import vocabularies
from flax import linen
from time_to_quality import HUGGING_FACE, SIDES, T5X

from convt5.benchmarks import t5x
from convt5.data import cached_data
from convt5.errors import UserError

# A build of PyTorch for GPUs, where there is none.
pytestmark = pytest.mark.filterwarnings("ignore:CUDA initialization")

VOCAB_SIZE = 64
HAS_TORCH = importlib.util.find_spec("torch") is not None


class Transformer(linen.Module):
    """Called as T5X's is: the next token from the present one and the mean of the source."""

    @linen.compact
    def __call__(self, source, given, targets, *, enable_dropout):
        del targets
        embed = linen.Embed(VOCAB_SIZE, 16)
        mean = jnp.mean(embed(source) * (source > 0)[..., None], axis=1, keepdims=True)
        return linen.Dense(VOCAB_SIZE)(embed(given) + mean)


def batches(num: int, rows: int = 4):
    """Yields rows in which every target is the source's first token, and which end in padding."""
    rng = np.random.default_rng(0)
    for _ in range(num):
        source = rng.integers(2, 12, (rows, 8), dtype=np.int32)
        targets = np.repeat(source[:, :1], 4, axis=1)
        source[:, 6:] = targets[:, 3:] = 0
        yield {
            "encoder_input_tokens": source,
            "decoder_input_tokens": np.pad(targets[:, :-1], ((0, 0), (1, 0))),
            "decoder_target_tokens": targets,
            "decoder_loss_weights": (targets > 0).astype(np.int32),
        }


@pytest.fixture(autouse=True)
def _models_are_small(monkeypatch):
    def with_one_layer(model, vocab_size):
        config = whole(model, vocab_size)
        stacks = {
            name: dataclasses.replace(getattr(config, name), num_layers=1)
            for name in ("encoder", "decoder")
        }
        return dataclasses.replace(config, emb_dim=32, mlp_dim=32, **stacks)

    whole = time_to_quality._config
    monkeypatch.setattr(time_to_quality, "_config", with_one_layer)
    monkeypatch.setattr(t5x, "check", lambda checkout: None)
    monkeypatch.setattr(t5x, "make_model", lambda checkout, config: Transformer())


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows") / "cache"
    writer = cached_data.Writer(folder)
    for split, num in (("train", 8), ("validation", 2)):
        for _ in writer.write(split, batches(num)):
            pass
    writer.vocabulary(vocabularies.characters(), None)
    writer.finish(made_from={})
    return folder


def present():
    return [name for name in SIDES if name != HUGGING_FACE or HAS_TORCH]


def make(name, batch):
    flags = ["--cache=none", "--t5x=here", f"--vocab_size={VOCAB_SIZE}"]
    return time_to_quality._make(name, time_to_quality._parser().parse_args(flags), batch)


@pytest.mark.nightly
@pytest.mark.parametrize("name", present())
def test_a_side_learns_and_leaves_out_padding(name):
    (batch,) = batches(1)
    side = make(name, batch)
    before, weight = side.evaluate(batch)
    assert weight == 12
    assert side.evaluate(batch) == (before, weight)  # No dropout, no update.
    empty = {key: np.concatenate([values[:2], 0 * values[2:]]) for key, values in batch.items()}
    half = {key: np.concatenate([values[:2]] * 2) for key, values in batch.items()}
    # Empty rows add nothing, and what is computed of a row does not depend on the others.
    assert np.allclose(2 * np.asarray(side.evaluate(empty)), side.evaluate(half), rtol=1e-5)
    for _ in range(10):
        side.update(batch, 0.03)
    assert side.evaluate(batch)[0] < 0.9 * before


@pytest.mark.nightly
def test_a_side_that_updates_at_rate_zero_stays_where_it_was():
    (batch,) = batches(1)
    side = make("dynamic_tiny", batch)
    before = side.evaluate(batch)
    side.update(batch, 0.0)
    assert side.evaluate(batch) == before


def test_the_rate_follows_the_schedule_over_the_time():
    rates, now = [], [0.0]

    def update(batch, rate):
        rates.append(rate)
        now[0] += 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", lambda: now[0])
        side = time_to_quality.Side(1, 0.0, update, lambda batch: (6.0, 2.0), dict, print)
        records = list(
            time_to_quality.train(side, iter(range(99)), [{}, {}], seconds=30, evaluations=3)
        )
    assert records == [
        {"number": n, "seconds": 10 * n, "steps": 10 * n, "loss": 3.0} for n in (1, 2, 3)
    ]
    peak = time_to_quality.SCHEDULE.peak
    assert rates[0] < 0.01 * peak  # The first of 200 steps of warm-up.
    assert max(rates) == rates[2] > 0.99 * peak  # The warm-up is a fifteenth of the time.
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert rates[-1] < 0.02 * peak
    # The same clock, if an update counts as a second, whatever it takes.
    measured, rates[:] = list(rates), []
    counted = time_to_quality.train(
        side, iter(range(99)), [{}, {}], seconds=30, evaluations=3, seconds_per_step=1.0
    )
    assert list(counted) == records
    assert rates == measured


@pytest.mark.nightly
@pytest.mark.parametrize("name", present())
def test_a_side_goes_on_in_another_process_as_if_it_had_not_stopped(name):
    first, second, third = batches(3)
    side, other = make(name, first), make(name, first)
    side.update(first, 0.03)
    other.restore(side.state())
    assert other.evaluate(third) == side.evaluate(third)
    side.update(second, 0.02)
    other.update(second, 0.02)  # With the same dropout and memory.
    assert other.evaluate(third) == side.evaluate(third)


def test_a_side_that_was_stopped_goes_on_behind_its_last_evaluation(cache, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    seen, stops = [], [5]

    def make_sum(name, settings, batch):
        total = np.zeros(1)

        def update(batch, rate):
            seen.append((int(batch["encoder_input_tokens"][0, 0]), rate))
            total[0] += seen[-1][0]
            if len(seen) in stops:
                raise KeyboardInterrupt

        def restore(arrays):
            total[:] = arrays["total"]

        state, evaluate = lambda: {"total": total}, lambda batch: (float(total[0]), 1.0)
        return time_to_quality.Side(1, 0.0, update, evaluate, state, restore)

    monkeypatch.setattr(time_to_quality, "_make", make_sum)
    flags = [f"--cache={cache}", "--minutes=0.1", "--evaluations=3", "--seconds_per_step=1"]
    flags += ["--batch_size=4", f"--vocab_size={VOCAB_SIZE}", "--sides", "t5_tiny"]
    kept = [*flags, f"--keep={tmp_path / 'kept'}", f"--output={tmp_path / 'stopped'}"]
    with pytest.raises(KeyboardInterrupt):
        time_to_quality.main(kept)
    with pytest.raises(UserError, match=r"batch_size=2, but .* is of a side of batch_size=4; give"):
        time_to_quality.main([*kept, "--batch_size=2"])
    time_to_quality.main(kept)
    # The update after the last evaluation is made again.
    stopped = [*seen[:4], *seen[5:]]
    assert seen[4] == seen[5]
    seen.clear(), stops.clear()
    time_to_quality.main([*flags, f"--output={tmp_path / 'whole'}"])
    assert stopped == seen
    files = [tmp_path / name / "time_to_quality.jsonl" for name in ("stopped", "whole")]
    stopped, whole = ([json.loads(x) for x in f.read_text().splitlines()] for f in files)
    assert stopped == whole
    assert [(r["number"], r["steps"]) for r in whole] == [(1, 2), (2, 4), (3, 6)]


@pytest.mark.nightly
def test_sides_are_trained_once_and_told_and_drawn(cache, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.md"
    page.write_text("Above\n<!-- time_to_quality -->\nold\n<!-- end -->\nbelow\n")
    flags = [f"--cache={cache}", f"--output={tmp_path}", "--minutes=0.001", "--evaluations=2"]
    flags += ["--batch_size=4", f"--vocab_size={VOCAB_SIZE}"]
    file = tmp_path / "time_to_quality.jsonl"
    time_to_quality.main([*flags, "--sides", "dynamic_tiny"])
    first = file.read_text()
    # A side that was killed is trained again, and what it left is not told.
    cut = json.loads(first.splitlines()[0]) | {"side": T5X, "loss": -1.0}
    file.write_text(first + json.dumps(cut) + "\n")
    time_to_quality.main([*flags, "--sides", T5X, "dynamic_tiny", "--t5x=here", f"--page={page}"])
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["side"], r["number"]) for r in records] == [
        *[("dynamic_tiny", 1), ("dynamic_tiny", 2)],
        *[(T5X, 1), (T5X, 1), (T5X, 2)],
    ]
    assert all(r["seconds"] >= 0.06 * r["number"] / 2 for r in records)
    told = page.read_text()
    assert "| `dynamic_tiny` |" in told
    assert "| T5X " in told
    assert "old" not in told
    assert (tmp_path / "time_to_quality.png").stat().st_size > 10_000
    capsys.readouterr()
    time_to_quality.main([f"--output={tmp_path}", "--report_only"])
    assert capsys.readouterr().out.strip() in told


def test_counted_updates_are_marked_and_not_mixed_with_measured_ones(cache, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    about = {"minutes": 1.0, "evaluations": 1, "number": 1, "seconds": 60, "steps": 80, "loss": 3}
    about |= {"num_parameters": 9, "compile_seconds": 1, "machine": {"device": "H100"}}
    lines = [about | {"side": "t5_tiny"}, about | {"side": T5X, "seconds_per_step": 0.75}]
    file = tmp_path / "time_to_quality.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [f"--output={tmp_path}", f"--cache={cache}", "--minutes=1", "--batch_size=4"]
    flags += ["--t5x=here", "--sides", T5X]
    time_to_quality.main([*flags, "--seconds_per_step=0.75"])  # Both are finished.
    told = capsys.readouterr().out
    assert "| T5X * " in told
    assert "| `t5_tiny` |" in told
    assert told.count(r"\* T5X: compiled and updated on H100; an update counts as 0.75 s") == 1
    with pytest.raises(UserError, match=r"holds 1 minutes of t5x with 0\.75; give other --sides"):
        time_to_quality.main([*flags, "--seconds_per_step=0.5"])
    with pytest.raises(UserError, match="holds 1 minutes of t5_tiny with measured times"):
        time_to_quality.main([*flags, "t5_tiny", "--seconds_per_step=0.75"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--cache is missing"),
        (["--cache=c", "--minutes=0"], r"--minutes=0\.0 must be above 0"),
        (["--cache=c", "--seconds_per_step=0"], r"--seconds_per_step=0\.0 must be above 0"),
        (["--cache=c", "--sides", "t5x"], "--sides=t5x is not present; give --t5x=CHECKOUT"),
        (["--report_only", "--output=nowhere"], "nowhere holds no finished side"),
        (["--report_only", "--page=nowhere"], "--page=nowhere cannot be read"),
    ],
)
def test_wrong_flags_are_told(flags, message):
    with pytest.raises(UserError, match=message):
        time_to_quality.main(flags)


def test_sides_of_other_settings_are_not_mixed(cache, tmp_path):
    lines = [
        {"minutes": 1, "side": side, "number": 1, "evaluations": 1, **about}
        for side, about in {"t5_tiny": {}, T5X: {"batch_size": 8, "vocab_size": 64}}.items()
    ]
    file = tmp_path / "time_to_quality.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = [f"--cache={cache}", f"--output={tmp_path}", "--batch_size=4", "--vocab_size=64"]
    with pytest.raises(
        UserError, match=r"batch_size=4, but .* holds sides of batch_size=8"
    ) as told:
        time_to_quality.main(flags)
    assert "vocab_size" not in str(told.value)
    lines[1] |= {"batch_size": 4, "rows": 0}
    file.write_text(json.dumps(lines[1]) + "\n")
    with pytest.raises(UserError, match=r"rows=[1-9]\d+, but .* holds sides of rows=0; give the"):
        time_to_quality.main(flags)


def test_other_files_are_no_records(tmp_path):
    (tmp_path / "time_to_quality.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"time_to_quality\.jsonl holds no records of this tool"):
        time_to_quality.main(["--report_only", f"--output={tmp_path}"])
