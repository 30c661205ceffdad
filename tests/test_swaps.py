"""What is put in the place of files and folders while a command writes them.

Nothing is written through a link, and no success is told of work that is not in its place.
"""

import contextlib
import gc
import os
import pathlib
import shutil
from collections.abc import Callable

import counting_run
import numpy as np
import pytest
from convt5.tasks import vocabularies
from quick import quick

from convt5 import errors
from convt5.checkpoints import checkpoint, reading
from convt5.data import cached_data
from convt5.evaluation.results import Outcome, Results, ResumableLines
from convt5.interchange import converting
from convt5.training import run_log
from convt5.training.trainer import train


def moved_behind_a_link(path: pathlib.Path, victim: pathlib.Path) -> None:
    away = victim / "away"
    path.rename(away)
    path.symlink_to(away)


def linked(path: pathlib.Path, victim: pathlib.Path) -> None:
    removed(path, victim)
    path.symlink_to(victim if path.suffix == "" else victim / "mine")


def copied(path: pathlib.Path, victim: pathlib.Path) -> None:
    """A copy in the place of what is open."""
    copy = path.with_name("copy")
    shutil.copytree(path, copy) if path.is_dir() else shutil.copyfile(path, copy)
    removed(path, victim)
    copy.rename(path)


def emptied(path: pathlib.Path, victim: pathlib.Path) -> None:
    is_folder = path.is_dir()
    removed(path, victim)
    path.mkdir() if is_folder else path.write_bytes(b"")


def removed(path: pathlib.Path, victim: pathlib.Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def turned(path: pathlib.Path, victim: pathlib.Path) -> None:
    """A file in the place of a folder, or a folder in that of a file."""
    is_folder = path.is_dir()
    removed(path, victim)
    path.write_text("") if is_folder else path.mkdir()


SWAPS = [moved_behind_a_link, linked, copied, emptied, removed, turned]
Swap = Callable[[pathlib.Path, pathlib.Path], None]


@pytest.fixture
def victim(tmp_path):
    """A folder that links lead to; nothing may appear in it, and what is there stays."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "mine").write_text("mine")
    yield folder
    assert (folder / "mine").read_text() == "mine"
    assert {path.name for path in folder.iterdir()} <= {"mine", "away"}


def remove_what_is_in_the_way(path: pathlib.Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()


# Caches


CACHE_PLACES = [
    ".cache.unfinished",
    ".cache.unfinished/train",
    ".cache.unfinished/train/encoder_input_tokens.bin",
    ".cache.unfinished/progress.json",
]
LENGTH = 4


def rows(number: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(number).integers(1, 300, (3, LENGTH), dtype=np.int32)
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    return dict.fromkeys(names, tokens)


def make_cache(folder: pathlib.Path, meddle: Callable[[], object]) -> None:
    """Writes two splits of two batches, and notes its progress after each batch."""
    writer = cached_data.Writer(folder, identity="rows")
    vocabulary = vocabularies.characters()
    writer.vocabulary(vocabulary, vocabularies.token_bytes(vocabulary))

    def batches():
        yield rows(0)
        meddle()
        yield rows(1)

    for split in ("train", "validation"):
        written = writer.written(split)
        if not written.is_complete:
            coming = batches() if not written.num_read else [rows(1)]
            list(writer.write(split, coming, get_state=lambda: b"after one"))
    writer.finish(made_from={})


def assert_is_whole(folder: pathlib.Path) -> None:
    for split in ("train", "validation"):
        config = cached_data.CachedDataConfig(
            path=str(folder), split=split, batch_size=6, shuffle=False, num_epochs=1
        )
        (batch,) = config.build(process_index=0, process_count=1)
        expected = np.concatenate([rows(n)["encoder_input_tokens"] for n in (0, 1)])
        np.testing.assert_array_equal(batch["encoder_input_tokens"], expected)


@pytest.mark.parametrize("place", CACHE_PLACES)
@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("at", [0, 1])
def test_a_cache_is_whole_or_none_whatever_is_put_in_its_way(
    tmp_path, victim, monkeypatch, place, swap, at
):
    monkeypatch.setattr(cached_data, "_SECONDS_BETWEEN_NOTES", -1.0)
    calls = []

    def meddle():
        calls.append(None)
        if len(calls) == at + 1:
            swap(tmp_path / place, victim)

    folder, is_made = tmp_path / "cache", False
    with contextlib.suppress(errors.UserError):
        make_cache(folder, meddle)
        is_made = True
    if not is_made:
        assert not folder.exists()
        remove_what_is_in_the_way(tmp_path / place)
        gc.collect()  # The lock of the first writer.
        make_cache(folder, lambda: None)
    assert_is_whole(folder)


def test_progress_without_its_rows_is_not_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(cached_data, "_SECONDS_BETWEEN_NOTES", -1.0)
    with contextlib.suppress(KeyboardInterrupt):
        make_cache(tmp_path / "cache", interrupt)
        pytest.fail("it was not interrupted")
    gc.collect()
    (file,) = tmp_path.rglob("train/encoder_input_tokens.bin")
    os.truncate(file, 3)
    make_cache(tmp_path / "cache", lambda: None)
    assert_is_whole(tmp_path / "cache")


def interrupt():
    raise KeyboardInterrupt


# Runs


RUN_PLACES = [
    "run",
    "run/checkpoints",
    "run/checkpoints/4",
    "run/metrics.jsonl",
    "run/config.gin",
    "run/tensorboard",
    "run/lock",
]
RUN_SWAPS = [(place, swap) for place in RUN_PLACES for swap in SWAPS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    quick(RUN_SWAPS, chosen=[("run", copied), *((p, linked) for p in RUN_PLACES[1:4])]),
)
def test_a_run_ends_well_or_says_why_whatever_is_put_in_its_way(
    tmp_path, victim, shared_steps, case
):
    place, swap = case
    folder = tmp_path / "run"

    def meddle():
        counting_run.wait_for(folder / "checkpoints" / "4")
        swap(tmp_path / place, victim)

    def call(act=lambda: None):
        settings = {
            "checkpoint": checkpoint.CheckpointConfig(every_steps=4),
            "train_data": counting_run.Meddling(batch_size=8, act=act),
            "config_text": "a = 1\n",
        }
        return train(**counting_run.settings(folder, num_steps=12, log_every_steps=1, **settings))

    with contextlib.suppress(errors.UserError):
        assert call(meddle).step == 12
        assert max(reading.steps_in(folder / "checkpoints")) == 12
    remove_what_is_in_the_way(tmp_path / place)
    with contextlib.suppress(errors.UserError):
        assert call().step == 12
        return
    removed(tmp_path / place, victim)  # What cannot be used is named: here, by the first call.
    assert call().step == 12


# Results


RESULT_PLACES = ["results", "results/reviews", "results/reviews/test", "results/tensorboard"]


def outcome(number: int) -> Outcome:
    return Outcome("reviews", "test", {"loss": 1.0}, {"num_examples": 1}, [{"input": number}])


@pytest.mark.parametrize("place", RESULT_PLACES)
@pytest.mark.parametrize("swap", SWAPS)
def test_results_are_written_in_their_place_or_refused(tmp_path, victim, place, swap):
    results = Results(tmp_path / "results", {})
    results.exists("reviews", "test", 1)
    results.write(outcome(1), 1)
    swap(tmp_path / place, victim)
    refused = None
    try:
        path = results.write(outcome(2), 2)
    except errors.UserError as error:
        refused = error
    else:
        assert pathlib.Path(path).resolve().is_relative_to(tmp_path / "results")
    results.close()
    is_link = (tmp_path / place).is_symlink()
    assert bool(refused) == (is_link or swap is turned), refused


@pytest.mark.parametrize("swap", SWAPS)
def test_an_output_that_is_no_longer_in_its_place_is_no_success(tmp_path, victim, swap):
    path = tmp_path / "out.jsonl"
    with contextlib.closing(ResumableLines(path, {})) as lines:
        lines.write([{"input": "a"}])
        swap(path, victim)
        if swap is moved_behind_a_link:  # Still the same file, where the path leads.
            lines.write([{"input": "b"}])
            return
        with pytest.raises(errors.TrainingError, match=r"out\.jsonl was removed or replaced"):
            lines.write([{"input": "b"}])


def test_a_log_that_is_no_longer_in_its_place_is_told(tmp_path):
    log = run_log.JsonLines(tmp_path / "metrics.jsonl", last_step=0)
    log.write(1, {"loss": 1.0})
    copied(tmp_path / "metrics.jsonl", tmp_path)
    log.write(2, {"loss": 1.0})
    with pytest.raises(OSError, match="put in its place"):
        log.sync()


# Exports


@pytest.mark.parametrize("swap", SWAPS)
def test_an_export_is_put_in_its_place_or_refused(tmp_path, victim, swap):
    refused = None
    try:
        with converting.new_directory(tmp_path / "out") as folder:
            (folder / "model").write_text("whole")
            swap(folder, victim)
    except errors.UserError as error:
        refused = error
    assert refused is not None
    assert "cannot be put in its place" in str(refused)
    assert not (tmp_path / "out").exists()


DESTINATIONS: dict[str, Callable[[pathlib.Path, pathlib.Path], object]] = {
    "file": lambda path, victim: path.write_text("mine"),
    "link": lambda path, victim: path.symlink_to(victim),
    "dangling": lambda path, victim: path.symlink_to("nowhere"),
    "pipe": lambda path, victim: os.mkfifo(path),
    "full": lambda path, victim: shutil.copytree(victim, path),
}


@pytest.mark.parametrize("kind", DESTINATIONS)
def test_what_took_the_place_of_an_export_meanwhile_is_kept(tmp_path, victim, kind):
    def take():
        with converting.new_directory(tmp_path / "out") as folder:
            (folder / "model").write_text("whole")
            DESTINATIONS[kind](tmp_path / "out", victim)

    with pytest.raises(errors.TrainingError, match="cannot be put in its place"):
        take()
    assert not (tmp_path / "out" / "model").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "victim"}


COUNT = len(SWAPS) * (2 * len(CACHE_PLACES) + len(RUN_PLACES) + len(RESULT_PLACES) + 2)
COUNT += len(DESTINATIONS)
