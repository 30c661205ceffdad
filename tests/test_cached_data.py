"""Caches: the same rows as were made, in an order that can be resumed, and damage that is named."""

import dataclasses
import errno
import functools
import gc
import itertools
import json
import os
import pathlib
import signal
import sys

import commands
import numpy as np
import pytest
import seqio
from convt5.tasks import vocabularies  # pyright: ignore[reportMissingImports]

from convt5 import cache, data, errors
from convt5.analysis import inspect_command
from convt5.data import block_workers, cache_shards, cached_data
from convt5.data.block_workers import BlockWorkers
from convt5.data.cached_data import CachedDataConfig
from convt5.data.counts import Counts
from convt5.data.mixing import BlockPlace
from convt5.data.row_order import RowOrder
from convt5.data.rows import Examples, Ragged, RowLayout
from convt5.runtime import foreign_files
from convt5.text import task_format
from convt5.training.trainer import TrainRun

ROWS, LENGTH = 10, 6
FEATURE = {"dtype": "<u2", "length": 4}
SPLIT = {"rows": 3, "fingerprint": "a", "features": {"encoder_input_tokens": FEATURE}}
SPLIT["features"]["decoder_input_tokens"] = FEATURE


def made(seed=0, rows=ROWS):
    """Rows under the names of a converter; none is empty."""
    tokens = np.random.default_rng(seed).integers(1, 300, (rows, LENGTH), dtype=np.int32)
    return {
        "encoder_input_tokens": tokens,
        "decoder_input_tokens": tokens[:, :4],
        "decoder_target_tokens": tokens[:, 1:5],
        "decoder_loss_weights": np.ones((rows, 4), np.int32),
    }


@pytest.fixture
def folder(tmp_path):
    writer = cached_data.Writer(tmp_path / "cache")
    vocabulary = vocabularies.characters()
    writer.vocabulary(vocabulary, vocabularies.token_bytes(vocabulary))
    rows = made()
    empty = {name: np.zeros_like(values[:2]) for name, values in rows.items()}
    halves = [
        {name: values[part] for name, values in rows.items()} for part in (slice(4), slice(4, ROWS))
    ]
    read = {"texts": Counts(12, 3, 1, 0)}
    tokens = list(writer.write("train", [*halves, empty], get_counts=lambda: read))
    assert tokens == [4 * 10, 6 * 10, 0]
    list(writer.write("validation", [made(seed=1, rows=3)]))
    writer.finish(made_from={}, described={"train": "data train\n  texts: 12 documents"})
    return tmp_path / "cache"


def begin(folder):
    """Returns the writer of a cache of characters, which goes on with what another one began."""
    writer = cached_data.Writer(folder / "cache", identity="same")
    writer.vocabulary(vocabularies.characters(), None)
    return writer


def config(folder, **changes):
    return CachedDataConfig(**{"path": str(folder), "batch_size": 4} | changes)


def built(folder, *, hosts=(0, 1), **changes):
    return config(folder, **changes).build(process_index=hosts[0], process_count=hosts[1])


def test_rows_come_back_as_they_were_written_and_the_last_batch_is_filled_up(folder):
    batches = list(built(folder, num_epochs=1, shuffle=False))
    assert len(batches) == 3
    for name, values in made().items():
        found = np.concatenate([batch[name] for batch in batches])
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found[:ROWS], values)
        np.testing.assert_array_equal(found[ROWS:], 0)


def test_every_pass_has_each_row_once_in_an_order_of_its_own(folder):
    batches = built(folder, batch_size=5)
    passes = [
        np.concatenate([next(batches)["encoder_input_tokens"] for _ in range(2)]) for _ in range(3)
    ]
    expected = np.sort(made()["encoder_input_tokens"], axis=0)
    for rows in passes:
        np.testing.assert_array_equal(np.sort(rows, axis=0), expected)
    assert not np.array_equal(passes[0], passes[1])
    other = built(folder, batch_size=10, seed=1)
    assert not np.array_equal(next(other)["encoder_input_tokens"], passes[0])


def test_a_saved_position_goes_on_with_the_same_batches(folder):
    batches = built(folder)
    for _ in range(7):
        next(batches)
    state = batches.get_state()
    expected = [next(batches) for _ in range(4)]
    resumed = built(folder)
    resumed.set_state(state)
    for batch in expected:
        np.testing.assert_array_equal(
            next(resumed)["encoder_input_tokens"], batch["encoder_input_tokens"]
        )


def test_hosts_read_the_rows_of_one_batch_between_them(folder):
    whole = built(folder)
    hosts = [built(folder, hosts=(i, 2)) for i in range(2)]
    for _ in range(6):
        parts = [next(host)["encoder_input_tokens"] for host in hosts]
        np.testing.assert_array_equal(np.concatenate(parts), next(whole)["encoder_input_tokens"])


def test_packed_rows_are_known_as_such_and_refused_where_a_stem_would_mix_them(folder, tmp_path):
    one = made()["encoder_input_tokens"]
    ids = {f"{stack}_segment_ids": np.ones_like(one) for stack in ("encoder", "decoder")}
    writer = cached_data.Writer(tmp_path / "packed")
    writer.vocabulary(vocabularies.characters(), None)
    list(writer.write("train", [made() | ids]))
    writer.finish(made_from={})
    step, name = inspect_command.read_step(["gin/models/stem_dynamic_tiny.gin"], [])
    alone, packed = config(folder), config(tmp_path / "packed")
    alone.check_model(step.model)
    with pytest.raises(errors.UserError, match=r"packed has several .* stride of 4.*rebuild it"):
        packed.check_model(step.model)
    for data_config in (alone, packed):
        settings = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
        run = TrainRun(**settings, train_data=data_config, run_dir="unused", num_steps=1)
        assert inspect_command.make_subject(name, run, {}).packed == (data_config is packed)


def test_rows_that_are_read_once_are_shuffled_too(folder):
    found, in_order = (
        np.concatenate([b["encoder_input_tokens"] for b in built(folder, num_epochs=1, **how)])
        for how in ({}, {"shuffle": False})
    )
    assert not np.array_equal(found, in_order)
    np.testing.assert_array_equal(np.sort(found, axis=0), np.sort(in_order, axis=0))


def test_a_row_of_targets_alone_is_kept(tmp_path):
    rows = made() | {"encoder_input_tokens": np.zeros((ROWS, LENGTH), np.int32)}
    writer = cached_data.Writer(tmp_path / "cache")
    writer.vocabulary(vocabularies.characters(), None)
    assert list(writer.write("train", [rows])) == [ROWS * 4]


def test_a_position_of_other_rows_is_refused(folder, tmp_path):
    state = built(folder).get_state()
    with pytest.raises(errors.UserError, match="seed"):
        built(folder, seed=5).set_state(state)


def test_a_cache_knows_its_lengths_its_vocabulary_and_the_bytes_of_its_ids(folder):
    found = config(folder)
    assert (found.encoder_length, found.decoder_length) == (LENGTH, 4)
    assert found.vocabulary == vocabularies.characters()
    np.testing.assert_array_equal(
        built(folder).token_bytes, vocabularies.token_bytes(vocabularies.characters())
    )


def test_a_start_tells_what_the_rows_are_and_what_was_counted_when_they_were_made(folder):
    assert config(folder).describe().splitlines() == [
        f"data train of the cache {folder}: rows of 6 + 4 tokens",
        "  10 rows; 100 tokens; padding: 0% of inputs, 0% of targets",
        "read when it was made",
        "  texts: 12 examples; cut: 3 (25.0%) of inputs, 1 (8.3%) of targets",
        "made of data train",
        "  texts: 12 documents",
    ]
    # A cache of before has none of it.
    file = folder / "cache.json"
    about = json.loads(file.read_text())
    for split in about["splits"].values():
        for name in ("tokens", "counts", "described"):
            del split[name]
    file.write_text(json.dumps(about))
    assert config(folder).describe().endswith("rows of 6 + 4 tokens\n  10 rows")


def test_a_long_description_is_cut(tmp_path):
    writer = cached_data.Writer(tmp_path / "cache")
    writer.vocabulary(vocabularies.characters(), None)
    list(writer.write("train", [made()]))
    writer.finish(made_from={}, described={"train": "task " * 10**5})
    assert "made of task task" in config(tmp_path / "cache").describe()


def test_a_cache_knows_whether_inputs_end(tmp_path):
    writer = cached_data.Writer(tmp_path / "cache")
    writer.vocabulary(vocabularies.characters(), None)
    list(writer.write("train", [made()]))
    writer.finish(made_from={}, tasks=[task_format.plain("task", without_end=("inputs",))])
    assert not config(tmp_path / "cache").kept_text().add_eos


def test_damage_and_mistakes_are_named(folder, tmp_path):
    with pytest.raises(errors.UserError, match=r"holds no cache.*convt5\.cache"):
        built(tmp_path)
    with pytest.raises(
        errors.UserError, match=r"split='test' is none of \['train', 'validation'\]"
    ):
        built(folder, split="test")
    with pytest.raises(errors.UserError, match="batch_size=0"):
        config(folder, batch_size=0)
    with pytest.raises(errors.UserError, match="exists; remove it"):
        cached_data.Writer(folder)
    file = folder / "train" / "encoder_input_tokens.bin"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(errors.UserError, match=r"has 119 bytes, and cache\.json says 120"):
        built(folder)
    about = json.loads((folder / "cache.json").read_text())
    (folder / "cache.json").write_text(json.dumps(about | {"version": 9}))
    with pytest.raises(errors.UserError, match="is of version 9"):
        built(folder)


def test_a_file_that_is_cut_while_it_is_read_is_named(folder):
    batches = built(folder)
    next(batches)
    file = folder / "train" / "decoder_target_tokens.bin"
    file.write_bytes(file.read_bytes()[:-1])
    message = rf"{file} ends within row {ROWS - 1},.*the run resumes"
    with pytest.raises(errors.TrainingError, match=message):
        list(itertools.islice(batches, ROWS))


@pytest.mark.parametrize("value", [2**16 - 1, 402, "position"])
def test_ids_beyond_the_vocabulary_and_positions_beyond_the_row_are_refused(folder, value):
    name = "decoder_loss_weights" if value == "position" else "decoder_target_tokens"
    feature = cached_data.read_about(str(folder))["splits"]["train"]["features"][name]
    path = folder / "train" / f"{name}.bin"
    stored = np.fromfile(path, feature["dtype"]).reshape(-1, feature["length"])
    stored[7, 2] = 5 if value == "position" else value
    stored.tofile(path)
    batches = built(folder, num_epochs=1, shuffle=False)
    next(batches)
    with pytest.raises(errors.UserError, match=rf"{name}\.bin has {stored[7, 2]} in row 7"):
        next(batches)


@pytest.mark.parametrize("name", [*made(), "checksums"])
def test_every_changed_byte_is_noticed(folder, name):
    path = folder / "train" / f"{name}.bin"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
        row = place * ROWS // len(whole)
        with pytest.raises(errors.UserError, match=rf"row {row}\b.* damaged: rebuild it"):
            list(built(folder, num_epochs=1, shuffle=False))
    path.write_bytes(whole)
    assert len(list(built(folder, num_epochs=1))) == 3


def test_caches_of_earlier_versions_have_no_checksums(folder):
    expected = list(built(folder, num_epochs=1))
    (folder / "train" / "checksums.bin").unlink()
    about = json.loads((folder / "cache.json").read_text())
    assert about["splits"]["train"].pop("checksums")
    (folder / "cache.json").write_text(json.dumps(about))
    for batch, before in zip(built(folder, num_epochs=1), expected, strict=True):
        for name, values in before.items():
            np.testing.assert_array_equal(batch[name], values)


def test_a_cache_begun_without_checksums_is_finished_without_them(tmp_path):
    begun = begin(tmp_path)
    list(begun.write("train", [made()], get_state=lambda: b""))
    file = begun._unfinished / cached_data._PROGRESS_FILE
    del begun
    gc.collect()
    progress = json.loads(file.read_text())
    train = progress["splits"]["train"]
    del train["features"]["checksums"]
    train |= {"is_complete": False, "state": "AA=="}
    file.write_text(json.dumps(progress))
    resumed = begin(tmp_path)
    list(resumed.write("train", [made(seed=1)]))
    about = resumed.finish(made_from={})
    assert about["splits"]["train"]["checksums"] is False
    rows = list(built(tmp_path / "cache", batch_size=ROWS, num_epochs=1, shuffle=False))
    for batch, seed in zip(rows, (0, 1), strict=True):
        for name, values in made(seed=seed).items():
            np.testing.assert_array_equal(batch[name], values)


def test_an_unfinished_cache_is_none(tmp_path):
    writer = cached_data.Writer(tmp_path / "cache")
    list(writer.write("train", [made()]))
    with pytest.raises(errors.UserError, match="holds no cache"):
        built(tmp_path / "cache")
    # A second attempt starts anew, when the first is gone.
    with pytest.raises(errors.UserError, match=r"cache is being made by another process"):
        cached_data.Writer(tmp_path / "cache")
    del writer
    writer = cached_data.Writer(tmp_path / "cache")
    writer.vocabulary(vocabularies.characters(), None)
    list(writer.write("train", [made()]))
    writer.finish(made_from={})
    assert built(tmp_path / "cache").token_bytes is None


def test_a_cache_that_a_killed_process_began_is_gone_on_with(tmp_path, monkeypatch, caplog):
    rows = made(rows=20)
    parts = [{name: values[i : i + 4] for name, values in rows.items()} for i in range(0, 20, 4)]

    def write(to, identity="same", *, stop_after=9):
        writer = cached_data.Writer(tmp_path / to, identity=identity)
        writer.vocabulary(vocabularies.characters(), None)
        there = writer.written("train")
        first = there.num_read // 4
        taken = iter(range(first + 1, 6))
        state = {"now": b""}

        def batches():
            for number in taken:
                state["now"] = bytes([number])
                yield parts[number - 1]

        writing = writer.write("train", batches(), get_state=lambda: state["now"])
        for _ in zip(range(stop_after), writing, strict=False):
            pass
        return writer, there

    monkeypatch.setattr(cached_data, "_SECONDS_BETWEEN_NOTES", 0.0)
    whole, _ = write("whole")
    about = whole.finish(made_from={})
    # Killed after the third batch was written and the second was noted.
    writer, _ = write("cache", stop_after=3)
    del writer
    gc.collect()
    writer, there = write("cache")
    assert (there.num_read, there.state, there.is_complete) == (8, bytes([2]), False)
    assert writer.written("train").is_complete
    assert writer.finish(made_from={}) == about
    for name in rows:
        found, expected = (
            (tmp_path / cache / "train" / f"{name}.bin").read_bytes()
            for cache in ("cache", "whole")
        )
        assert found == expected
    assert not (tmp_path / "cache" / "progress.json").exists()
    # What was begun of other data is begun anew.
    for identity in ("same", "other"):
        assert "unfinished cache of other data" not in caplog.text
        writer, there = write("third", identity, stop_after=3)
        assert there.num_read == 0
        del writer
        gc.collect()
    assert "third.unfinished: an unfinished cache of other data or settings" in caplog.text


def test_what_a_kill_left_half_written_is_no_part_of_a_cache(tmp_path):
    writer = begin(tmp_path)
    list(writer.write("train", [made()]))
    (tmp_path / ".cache.unfinished" / f".{'0' * 16}.partial").write_text("half")
    del writer
    gc.collect()
    writer = begin(tmp_path)
    assert writer.written("train").is_complete
    writer.finish(made_from={})
    assert sorted(os.listdir(tmp_path / "cache")) == ["cache.json", "train"]


@pytest.mark.parametrize("begun", ["cache", "shards"])
def test_rows_are_not_made_again_because_their_progress_cannot_be_read(
    tmp_path, monkeypatch, begun
):
    def fail(path, most):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    def begin_again():
        if begun == "cache":
            return begin(tmp_path)
        return cache_shards.ShardedCache(str(tmp_path / "cache"), 2, "same")

    begin_again()
    gc.collect()
    if begun == "cache":
        list(begin(tmp_path).write("train", [made()]))
        gc.collect()
    (unfinished := tmp_path / ".cache.unfinished" / "made").write_text("rows")
    with monkeypatch.context() as patch:
        patch.setattr(foreign_files, "read_bytes", fail)
        with pytest.raises(errors.UserError, match="Input/output error"):
            begin_again()
    gc.collect()
    begin_again()
    assert unfinished.read_text() == "rows"


def test_a_cache_that_another_has_made_meanwhile_is_kept(tmp_path):
    writer = cached_data.Writer(tmp_path / "cache")
    writer.vocabulary(vocabularies.characters(), None)
    list(writer.write("train", [made()]))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "cache.json").write_text("theirs")
    with pytest.raises(errors.UserError, match=r"cannot be put there .* whole in .*\.unfinished"):
        writer.finish(made_from={})
    assert (tmp_path / "cache" / "cache.json").read_text() == "theirs"


def test_a_whole_cache_that_could_not_be_put_in_its_place_is_not_made_again(tmp_path):
    writer = begin(tmp_path)
    list(writer.write("train", [made()]))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "theirs").touch()
    with pytest.raises(errors.UserError, match="cannot be put there"):
        writer.finish(made_from={})
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    del writer
    gc.collect()
    writer = begin(tmp_path)
    assert writer.written("train").is_complete
    about = writer.finish(made_from={})
    assert about["splits"]["train"]["rows"] == ROWS
    assert sorted(os.listdir(tmp_path / "cache")) == ["cache.json", "train"]


def test_more_examples_than_decoder_tokens_fit_into_a_packed_row(tmp_path):
    lengths = np.ones(ROWS, np.int64), np.array([0] * (ROWS - 1) + [1])
    sides = [Ragged(np.full(each.sum(), 9, np.int32), each) for each in lengths]
    layout = RowLayout(encoder_length=ROWS, decoder_length=4, pack=True)
    rows = layout.batch(Examples(*sides, np.zeros((ROWS, 3), bool)), np.array([ROWS]), 1)
    writer = cached_data.Writer(tmp_path / "cache")
    writer.vocabulary(vocabularies.characters(), None)
    list(writer.write("train", [rows]))
    writer.finish(made_from={})
    read = next(built(tmp_path / "cache", batch_size=1))
    assert read["decoder_segment_ids"].tolist() == [[ROWS, 0, 0, 0]]


def test_a_link_that_leads_nowhere_is_refused_before_a_row_is_made(tmp_path):
    (tmp_path / "cache").symlink_to("nowhere")
    with pytest.raises(errors.UserError, match="cache exists; remove it"):
        cached_data.Writer(tmp_path / "cache")
    with pytest.raises(errors.UserError, match="cache exists; remove it"):
        cache_shards.ShardedCache(str(tmp_path / "cache"), 2, "one text")


def test_a_tilde_is_the_home_folder(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    found = built("~/cache", num_epochs=1)
    assert isinstance(found.vocabulary, seqio.ByteVocabulary)
    assert next(found)["encoder_input_tokens"].shape == (4, LENGTH)
    with pytest.raises(errors.UserError, match=f"output_dir={tmp_path}/cache exists"):
        cached_data.Writer(pathlib.Path("~/cache"))


def test_a_split_without_rows_is_refused(tmp_path):
    writer = cached_data.Writer(tmp_path / "cache")
    with pytest.raises(errors.UserError, match="gives no row"):
        list(writer.write("train", []))


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_order_is_the_same_whatever_is_asked_at_once(shuffle):
    whole = RowOrder(7, shuffle, 3).rows(np.arange(40))
    single = RowOrder(7, shuffle, 3)
    np.testing.assert_array_equal([single.rows(np.array([i]))[0] for i in range(40)], whole)
    for start in range(0, 35, 7):
        np.testing.assert_array_equal(np.sort(whole[start : start + 7]), np.arange(7))


@pytest.mark.slow
def test_the_command_keeps_what_the_pipeline_gives(tmp_path, capsys):
    output = tmp_path / "cache"
    settings = ["--gin_file=gin/runs/quickstart.gin", "--gin.trainer.train.eval_num_batches=2"]
    cache.main([*settings, "--rows=64", f"--output_dir={output}"])
    assert "pretrain_cached.gin" in capsys.readouterr().out
    about = json.loads((output / "cache.json").read_text())
    found = CachedDataConfig(path=str(output), batch_size=32, num_epochs=1, shuffle=False)
    assert about["splits"]["train"]["rows"] == 64
    assert isinstance(found.vocabulary, seqio.SentencePieceVocabulary)
    made_from = about["made_from"]["train"]
    pipeline = data.DataConfig(
        **made_from | {"mixture": "pydoc_words", "num_epochs": 1, "shuffle": True}
    ).build(process_index=0, process_count=1)
    batches = found.build(process_index=0, process_count=1)
    expected = next(pipeline)
    rows = [next(batches) for _ in range(2)]
    for name, values in expected.items():
        stored = np.concatenate([batch[name] for batch in rows])
        np.testing.assert_array_equal(stored[: len(values)], values)


@pytest.mark.parametrize("about", ["[]", "null", "3"])
def test_a_description_that_is_none_is_named(folder, about):
    (folder / "cache.json").write_text(about)
    with pytest.raises(errors.UserError, match=r"cache\.json does not describe a cache.*rebuild"):
        built(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"splits": None},
        {"splits": []},
        {"splits": {"train": 3}},
        {"splits": {"train": {"rows": 3, "fingerprint": "a", "features": {}}}},
        {"splits": {"train": SPLIT | {"counts": {"texts": "many"}}}},
        {"splits": {"train": SPLIT | {"counts": {"texts": [1, 2, 3, -4]}}}},
        {"splits": {"train": SPLIT | {"tokens": {"encoder_input_tokens": "many"}}}},
        {"splits": {"train": SPLIT | {"described": 3}}},
        *({"splits": {"train": SPLIT | {"rows_per_file": n}}} for n in (0, 1.5, "2")),
        {"splits": {"train": SPLIT | {"rows": 10**9, "rows_per_file": 1}}},
        {"vocab_size": "many"},
        {"vocabulary": 3},
    ],
)
def test_a_description_that_lacks_something_is_named(folder, changes):
    about = json.loads((folder / "cache.json").read_text())
    (folder / "cache.json").write_text(json.dumps(about | changes))
    with pytest.raises(errors.UserError, match=r"cache\.json does not describe a cache.*rebuild"):
        built(folder)
    (folder / "cache.json").write_text('{"version": 1}')
    with pytest.raises(errors.UserError, match=r"cache\.json does not describe a cache.*rebuild"):
        built(folder)


@pytest.mark.parametrize("seed", [-1, 0.5])
def test_a_seed_that_is_none_is_refused(folder, seed):
    with pytest.raises(errors.UserError, match=rf"CachedDataConfig: seed={seed} must be"):
        config(folder, seed=seed)


def test_each_split_has_lengths_of_its_own(tmp_path):
    writer = cached_data.Writer(tmp_path / "cache")
    writer.vocabulary(vocabularies.characters(), None)
    list(writer.write("train", [made()]))
    list(writer.write("validation", [{n: values[:, :3] for n, values in made().items()}]))
    writer.finish(made_from={})
    for split, lengths in {"train": (LENGTH, 4), "validation": (3, 3)}.items():
        found = config(tmp_path / "cache", split=split)
        assert (found.encoder_length, found.decoder_length) == lengths
        batch = next(found.build(process_index=0, process_count=1))
        assert batch["encoder_input_tokens"].shape == (4, lengths[0])


@pytest.mark.parametrize(("most", "sizes"), [(None, [4, 4, 2]), (7, [4, 3]), (8, [4, 4])])
def test_batches_are_cut_to_the_rows_that_are_wanted(most, sizes):
    rows, told = made(), []
    batches = ({n: values[i : i + 4] for n, values in rows.items()} for i in (0, 4, 8))
    found = list(cached_data._first_rows(batches, most, told.append))
    assert told == [len(batch["encoder_input_tokens"]) for batch in found] == sizes
    for name, values in rows.items():
        kept = np.concatenate([batch[name] for batch in found])
        np.testing.assert_array_equal(kept, values[:most])


@pytest.mark.slow
def test_any_number_of_processes_makes_the_same_rows_and_goes_on_when_killed(tmp_path, capsys):
    text = "".join(f"text number {i * i} of some that are told apart\n" for i in range(8000))
    (tmp_path / "text.txt").write_text(text)
    settings = [
        "--gin_file=gin/runs/pretrain_text.gin",
        f"--gin.TEXT={tmp_path}/text.txt",
        "--gin.VOCABULARY=unused",
        "--gin.pretraining.text_span_corruption.vocabulary=@vocabularies.characters()",
        "--gin.data.DataConfig.batch_size=8",
        "--gin.data.DataConfig.encoder_length=64",
        "--gin.trainer.train.eval_num_batches=2",
    ]
    cache.main([*settings, f"--output_dir={tmp_path}/one"])
    two = [*settings, "--processes=2", f"--output_dir={tmp_path}/two"]
    code = (
        "from convt5 import cache\n"
        "from convt5.data import cached_data\n"
        "cached_data._SECONDS_BETWEEN_NOTES = 0\n"
        f"cache.main({two!r})\n"
    )
    process = commands.start([sys.executable, "-c", code])
    noted = tmp_path / ".two.unfinished" / "progress.json"
    commands.wait_until(lambda: noted.exists() and '"num_read"' in noted.read_text(), process)
    workers = children_of(process.pid)
    assert len(workers) >= 2
    process.kill()
    process.wait()
    commands.wait_until(lambda: all(map(is_over, workers)), secs=60)
    cache.main(two)
    assert "train: resumes after" in capsys.readouterr().out
    one, two = (json.loads((tmp_path / n / "cache.json").read_text()) for n in ("one", "two"))
    assert one["splits"] == two["splits"]
    assert one["splits"]["train"]["rows"] > 4000


def children_of(pid):
    """Returns the processes that a process has started, as folders of /proc."""
    listed = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return [pathlib.Path("/proc", child) for path in listed for child in path.read_text().split()]


def is_over(process: pathlib.Path) -> bool:
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
def test_a_process_that_makes_blocks_prints_nothing_gets_no_ctrl_c_and_its_end_is_told(capfd):
    # Its modules are imported before what it receives, which would import them loudly.
    load = functools.partial(dict, feature=seqio.Feature)
    with BlockWorkers(1, load) as workers:
        requests = block_workers._Requests(workers._pools, load, "task")
        requests._submit(0, 0).exception()  # It has no such task.
        blocked = workers._pools[0].submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result()
        assert signal.SIGINT in blocked
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
        assert workers.cpu_seconds() > 0
        assert capfd.readouterr().err == ""
        os.kill(workers._pools[0].submit(os.getpid).result(), signal.SIGKILL)
        with pytest.raises(errors.TrainingError, match="one of the 1 processes ended before"):
            workers.maker("task")(BlockPlace())


@pytest.mark.slow
def test_the_command_keeps_no_more_rows_than_asked_for(tmp_path):
    (tmp_path / "text.txt").write_text("".join(f"text number {i}\n" for i in range(200)))
    output = tmp_path / "cache"
    vocabulary = "pretraining.text_span_corruption.vocabulary=@vocabularies.characters()"
    cache.main(
        [
            "--gin_file=gin/runs/pretrain_text.gin",
            f"--gin.TEXT={tmp_path}/text.txt",
            "--gin.VOCABULARY=unused",
            f"--gin.{vocabulary}",
            "--gin.data.DataConfig.batch_size=8",
            "--gin.data.DataConfig.encoder_length=32",
            "--gin.trainer.train.eval_num_batches=2",
            "--rows=10",
            f"--output_dir={output}",
        ]
    )
    splits = json.loads((output / "cache.json").read_text())["splits"]
    assert splits["train"]["rows"] == 10


def test_evaluation_without_end_is_refused_before_anything_is_made(tmp_path):
    endless = "--gin.eval/data.DataConfig.num_epochs=None"
    with pytest.raises(errors.UserError, match=r"eval_data with num_epochs=None never ends"):
        cache.main(
            [
                "--gin_file=gin/runs/quickstart.gin",
                endless,
                "--gin.trainer.train.eval_num_batches=None",
                f"--output_dir={tmp_path}/cache",
            ]
        )
    assert not list(tmp_path.iterdir())


def test_files_that_a_task_evaluation_measures_are_refused_as_they_are_in_training(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
    (tmp_path / "run.gin").write_text(f"""
        include 'gin/runs/pretrain_text.gin'
        from __gin__ import dynamic_registration
        from convt5 import evaluation
        from convt5.tasks import pretraining
        from convt5.tasks import vocabularies
        from convt5.training import trainer
        pretraining.text_span_corruption.vocabulary = @vocabularies.characters()
        other/pretraining.text_span_corruption.path = '{tmp_path}/c.txt'
        other/pretraining.text_span_corruption.validation_path = '{tmp_path}/b.txt'
        evaluation.TaskEval.task = @other/pretraining.text_span_corruption()
        evaluation.TaskEval.max_input_length = 8
        evaluation.TaskEval.max_length = 8
        trainer.train.task_evals = [@evaluation.TaskEval()]
        VOCABULARY = 'unused'
        TEXT = '{tmp_path}/[ab].txt'
        """)
    with pytest.raises(errors.UserError, match=r"b\.txt' of split='validation' is also among"):
        cache.main([f"--gin_file={tmp_path}/run.gin", f"--output_dir={tmp_path}/cache"])
    assert not (tmp_path / "cache").exists()


def test_positions_of_very_long_rows_are_kept(tmp_path):
    length = 2**16 + 4
    rows = made(rows=1) | {
        "encoder_input_tokens": np.ones((1, length), np.int32),
        "encoder_positions": np.arange(length, dtype=np.int32)[None],
    }
    writer = cached_data.Writer(tmp_path / "cache")
    writer.vocabulary(vocabularies.characters(), None)
    list(writer.write("train", [rows]))
    writer.finish(made_from={})
    found = next(built(tmp_path / "cache", batch_size=1, num_epochs=1))
    np.testing.assert_array_equal(found["encoder_positions"], rows["encoder_positions"])


def test_the_larger_of_two_vocabularies_sets_what_ids_are_kept(tmp_path):
    inputs = seqio.PassThroughVocabulary(size=100_000)
    rows = made() | {"encoder_input_tokens": np.full((ROWS, LENGTH), 99_999, np.int32)}
    writer = cached_data.Writer(tmp_path / "cache")
    writer.vocabulary(vocabularies.characters(), None, of_inputs=inputs)
    list(writer.write("train", [rows]))
    writer.finish(made_from={})
    found = config(tmp_path / "cache")
    assert found.vocab_size == 100_000
    # One vocabulary cannot stand for both, and the wrong one would be taken in silence.
    assert found.vocabulary is None
    with pytest.raises(errors.UserError, match="examples=1 needs a vocabulary"):
        inspect_command.decode_examples(found, 1)
    batch = next(found.build(process_index=0, process_count=1))
    np.testing.assert_array_equal(batch["encoder_input_tokens"], 99_999)


def test_processes_have_shares_of_the_cores_if_there_are_enough(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3, 5, 7}, raising=False)
    assert block_workers._shares_of_cores(2) == [[1, 3, 7], [2, 5]]
    assert block_workers._shares_of_cores(6) == [[]] * 6
