"""A cache in shards has the same rows whoever makes them, wherever they lie."""

import contextlib
import json
import os
import pathlib
import re
import socket
import sys

import commands
import numpy as np
import pytest
from convt5.tasks import vocabularies  # pyright: ignore[reportMissingImports]

from convt5 import cache, errors
from convt5.configuration import command_line
from convt5.data import cache_shards, cached_data, stored_rows
from convt5.data.cached_data import CachedDataConfig
from convt5.data.counts import Counts
from convt5.runtime import object_stores

SHARDS = 3


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(f"text number {i * i} of some that differ\n" for i in range(600)))
    return [
        "--gin_file=gin/runs/pretrain_text.gin",
        f"--gin.TEXT={file}",
        "--gin.VOCABULARY=unused",
        "--gin.pretraining.text_span_corruption.vocabulary=@vocabularies.characters()",
        "--gin.data.DataConfig.batch_size=8",
        "--gin.data.DataConfig.encoder_length=64",
        "--gin.trainer.train.eval_num_batches=2",
    ]


@pytest.fixture(scope="module")
def local(settings, tmp_path_factory):
    """A cache that one process has made."""
    folder = tmp_path_factory.mktemp("local") / "cache"
    cache.main([*settings, f"--shards={SHARDS}", f"--output_dir={folder}"])
    return folder


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def rows(path, split="train"):
    config = CachedDataConfig(
        path=str(path), split=split, batch_size=4, shuffle=False, num_epochs=1
    )
    batches = list(config.build(process_index=0, process_count=1))
    found = np.concatenate([batch["encoder_input_tokens"] for batch in batches])
    return found[found.any(axis=1)]


@pytest.fixture
def user_cache(tmp_path, monkeypatch):
    """The folder in which rows wait that are to be in an object store."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return tmp_path / "user" / "convt5" / "rows"


def rows_of(index):
    """The encoder's rows of a shard."""
    return np.random.default_rng(index).integers(1, 300, (10, 6), dtype=np.int32)


def begin(folder, index, identity=None):
    """Writes the rows of a shard beside others, as a worker does, but does not finish it."""
    writer = cached_data.Writer(folder, identity=identity)
    vocabulary = vocabularies.characters()
    writer.vocabulary(vocabulary, vocabularies.token_bytes(vocabulary))
    tokens = rows_of(index)
    batch = {"encoder_input_tokens": tokens, "decoder_input_tokens": tokens[:, :4]}
    counted = {"texts": Counts(10 + index, 1, 0, 0)}
    for split in ("train", "validation")[: 1 if index else 2]:
        list(writer.write(split, [batch], get_counts=lambda: counted))
    return writer


def make(folder, index):
    """Makes a shard of ten rows; returns the encoder's rows."""
    begin(folder, index).finish(made_from={})
    return rows_of(index)


@pytest.fixture(params=["local", "memory"])
def joined(request, tmp_path):
    """A cache of three shards, in a folder or an object store, and its rows."""
    path = f"memory://{tmp_path}" if request.param == "memory" else str(tmp_path / "cache")
    whole = cache_shards.ShardedCache(path, SHARDS, "some text")
    made = [make(whole.shard(i), i) for i in whole.missing()]
    assert whole.missing() == []
    whole.join()
    return path, np.concatenate(made)


def test_a_cache_of_shards_has_the_rows_of_each_after_the_other(joined):
    path, expected = joined
    np.testing.assert_array_equal(rows(path), expected)
    np.testing.assert_array_equal(rows(path, "validation"), expected[:10])
    about = cached_data.read_about(path)
    train = about["splits"]["train"]
    assert train["shards"] == [10, 10, 10]
    assert train["counts"] == {"texts": [33, 3, 0, 0]}
    assert train["tokens"] == {"encoder_input_tokens": 180}
    config = CachedDataConfig(path=path, batch_size=4, seed=3)
    assert config.vocabulary == vocabularies.characters()
    batches = config.build(process_index=0, process_count=1)
    for _ in range(9):
        next(batches)
    state = batches.get_state()
    resumed = config.build(process_index=0, process_count=1)
    resumed.set_state(state)
    expected_batch, batch = next(batches), next(resumed)
    for name, values in expected_batch.items():
        np.testing.assert_array_equal(batch[name], values)


@pytest.mark.slow
def test_every_text_is_in_one_shard(local, settings, tmp_path):
    cache.main([*settings, f"--output_dir={tmp_path}/one"])
    one, many = (
        cached_data.read_about(str(folder))["splits"]["train"]
        for folder in (tmp_path / "one", local)
    )
    # Each shard has a block that ends with a row that is not full.
    assert 0 <= many["rows"] - one["rows"] < 2 * SHARDS
    special = 3
    texts = [rows(folder) for folder in (tmp_path / "one", local)]
    counts = [np.bincount(t[(t >= special) & (t < 259)], minlength=259) for t in texts]
    # What is corrupted, and so among the targets, differs.
    np.testing.assert_allclose(counts[0].sum(), counts[1].sum(), rtol=0.02)


@pytest.mark.slow
def test_shards_that_exist_are_kept_and_others_made(local, settings, tmp_path, capsys, monkeypatch):
    made = []
    make = cache._make

    def note(run, flags, argv, shard):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(shard.index)
        return make(run, flags, argv, shard)

    monkeypatch.setattr(cache, "_make", note)
    argv = [*settings, f"--shards={SHARDS}", f"--output_dir={tmp_path}/cache"]
    with pytest.raises(KeyboardInterrupt):
        cache.main(argv)
    assert not (tmp_path / "cache").exists()
    made.clear()
    cache.main(argv)
    assert made == [SHARDS - 1]
    assert contents(tmp_path / "cache") == contents(local)
    with pytest.raises(errors.UserError, match=r"output_dir=.*cache exists"):
        cache.main(argv)


def test_shards_of_other_data_are_made_again(tmp_path):
    first = cache_shards.ShardedCache(str(tmp_path / "cache"), 2, "one text")
    pathlib.Path(first.shard(0)).mkdir()
    pathlib.Path(first.shard(0), "cache.json").write_text("{}")
    with pytest.raises(errors.UserError, match="is being made by another process"):
        cache_shards.ShardedCache(str(tmp_path / "cache"), 2, "one text")
    assert first.missing() == [1]
    del first
    assert cache_shards.ShardedCache(str(tmp_path / "cache"), 2, "one text").missing() == [1]
    assert cache_shards.ShardedCache(str(tmp_path / "cache"), 2, "another").missing() == [0, 1]


@pytest.mark.slow
def test_an_object_store_has_the_same_files_and_rows(local, settings):
    url = "memory://bucket/cache"
    cache.main([*settings, f"--shards={SHARDS}", f"--output_dir={url}"])
    store = object_stores.Store(url)
    for name, content in contents(local).items():
        assert store.read(name) == content, name
    np.testing.assert_array_equal(rows(url), rows(local))
    with pytest.raises(errors.UserError, match="exists"):
        cache.main([*settings, f"--shards={SHARDS}", f"--output_dir={url}"])


@pytest.mark.slow
def test_a_whole_cache_can_be_in_an_object_store(settings, tmp_path):
    cache.main([*settings, "--rows=20", "--output_dir=memory://bucket/whole"])
    cache.main([*settings, "--rows=20", f"--output_dir={tmp_path}/whole"])
    store = object_stores.Store("memory://bucket/whole")
    assert {name: store.read(name) for name in contents(tmp_path / "whole")} == contents(
        tmp_path / "whole"
    )


def test_many_shards_keep_few_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr(stored_rows, "_MOST_OPEN", 2)
    path = str(tmp_path / "cache")
    whole = cache_shards.ShardedCache(path, 5, "some text")
    made = [make(whole.shard(i), i) for i in range(5)]
    whole.join()
    np.testing.assert_array_equal(rows(path), np.concatenate(made))
    config = CachedDataConfig(path=path, batch_size=50, num_epochs=1)
    batches = config.build(process_index=0, process_count=1)
    assert len(next(batches)["encoder_input_tokens"]) == 50
    assert [len(s._open_files) for s in batches._features.values()] == [2, 2]


@pytest.mark.parametrize("joined", ["memory"], indirect=True)
def test_a_file_that_left_an_object_store_is_named(joined):
    path, _ = joined
    store = object_stores.Store(path)
    name = f"{cached_data.shard_name(1, SHARDS)}/train/encoder_input_tokens.bin"
    store.write(name, (store.read(name) or b"")[:7])
    with pytest.raises(errors.TrainingError, match=f"{path}/{name} cannot be read"):
        rows(path)


def test_a_cache_may_be_the_working_directory(tmp_path, monkeypatch):
    expected = make(tmp_path / "cache", 0)
    monkeypatch.chdir(tmp_path / "cache")
    np.testing.assert_array_equal(rows("."), expected)


def test_a_url_may_end_as_that_of_a_folder(tmp_path):
    url = f"memory://{tmp_path}/cache"
    expected = make(url, 0)
    np.testing.assert_array_equal(rows(f"{url}/"), expected)


def test_a_damaged_description_in_an_object_store_is_named(tmp_path):
    url = f"memory://{tmp_path}/damaged"
    for content, fault in ((b"{", "cannot be read"), (b"{}", "does not describe a cache")):
        object_stores.Store(url).write("cache.json", content)
        cached_data._copies.pop(url, None)
        with pytest.raises(errors.UserError, match=rf"{url}/cache\.json {fault}"):
            cached_data.read_about(url)


def test_a_url_without_store_is_refused():
    with pytest.raises(errors.UserError, match=r"foo://bucket cannot be opened .* gs:// or s3://"):
        object_stores.Store("foo://bucket")


def test_a_store_that_refuses_is_told_with_its_reason_and_the_remedy(tmp_path):
    (tmp_path / "train").touch()  # Where a folder is needed.
    store = object_stores.Store(f"file://{tmp_path}")
    with pytest.raises(
        errors.TrainingError, match=r"train/a cannot be used .*Not a directory.*; c"
    ):
        store.write("train/a", b"")
    with pytest.raises(errors.TrainingError, match=r"train/ cannot be used \(Invalid key"):
        store.read("train/")


def test_a_bucket_that_cannot_be_written_is_told_before_any_work(settings, monkeypatch):
    monkeypatch.setattr(cache, "_make", lambda *_: pytest.fail("rows were made"))
    with pytest.raises(errors.TrainingError, match=r"file:///proc/refused/cache/.* cannot be used"):
        cache.main([*settings, "--output_dir=file:///proc/refused/cache"])


@pytest.mark.slow
def test_a_bucket_that_can_be_written_is_left_as_it_was(settings, monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "_make", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        cache.main([*settings, f"--output_dir=file://{tmp_path}"])
    assert not contents(tmp_path)


def test_rows_that_cannot_be_uploaded_are_kept_and_uploaded_later(monkeypatch, user_cache):
    def refuse(store, name, content):
        raise errors.of_store(name, ValueError("PERMISSION_DENIED"))

    url = "memory://refusing/cache"
    with monkeypatch.context() as patch, contextlib.closing(begin(url, 0, "text")) as failing:
        patch.setattr(object_stores.Store, "write", refuse)
        with pytest.raises(errors.TrainingError, match="PERMISSION_DENIED") as caught:
            failing.finish(made_from={})
    (folder,) = user_cache.iterdir()
    assert f"its rows are kept in {folder}" in str(caught.value)
    assert len(rows(folder)) == 10
    writer = cached_data.Writer(url, identity="text")
    writer.vocabulary(vocabularies.characters(), None)
    assert writer.written("train").is_complete
    writer.finish(made_from={})
    np.testing.assert_array_equal(rows(url), rows_of(0))
    assert not list(user_cache.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, SHARDS])
def test_a_kill_loses_no_rows_on_their_way_to_a_bucket(
    settings, tmp_path, shards, capsys, user_cache
):
    argv = [*settings, f"--shards={shards}", f"--output_dir=file://{tmp_path}/bucket"]
    code = (
        "from convt5 import cache\n"
        "from convt5.data import cached_data\n"
        "cached_data._SECONDS_BETWEEN_NOTES = 0\n"
        f"cache.main({argv!r})\n"
    )
    process = commands.start([sys.executable, "-c", code])
    commands.wait_until(
        lambda: any(
            '"num_read"' in path.read_text() for path in user_cache.glob("*/progress.json")
        ),
        process,
    )
    process.kill()
    process.wait()
    cache.main(argv)
    assert re.search(r"train( 0/3)?: resumes after \d", capsys.readouterr().out)
    assert not list(user_cache.iterdir())
    cache.main([*argv[:-1], f"--output_dir={tmp_path}/local"])
    found = contents(tmp_path / "bucket")
    found.pop("shards.json", None)
    assert found == contents(tmp_path / "local")


@pytest.mark.parametrize("home", ["/proc/nothing", None])
def test_a_user_without_a_cache_is_told_where_rows_for_a_bucket_are_made(monkeypatch, home):
    monkeypatch.setenv("XDG_CACHE_HOME", home or "~nobody_of_this_name")
    with pytest.raises(errors.UserError, match=r"=memory://a/b .*; set XDG_CACHE_HOME to"):
        cached_data.Writer("memory://a/b")


def test_two_machines_do_not_mix_their_rows_in_a_bucket(monkeypatch, tmp_path, user_cache):
    url = f"memory://{tmp_path}"
    slow = begin(url, 1)
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/of_another")
    make(url, 0)
    with pytest.raises(errors.UserError, match=f"output_dir={url} exists"):
        slow.finish(made_from={})
    np.testing.assert_array_equal(rows(url), rows_of(0))


def test_a_cache_in_a_bucket_is_written_and_read_in_files_that_fit_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(cached_data, "_FILE_BYTES", 40)  # Three rows of the longest feature.
    written = {}
    write = object_stores.Store.write

    def note(store, name, content):
        written[f"{store._url}/{name}"] = len(content)
        write(store, name, content)

    monkeypatch.setattr(object_stores.Store, "write", note)
    url = f"memory://{tmp_path}"
    whole = cache_shards.ShardedCache(url, SHARDS, "some text")
    made = [make(whole.shard(i), i) for i in whole.missing()]
    whole.join()
    lengths = [size for name, size in written.items() if name.endswith(".bin")]
    assert max(lengths) <= 40
    assert len(lengths) == 4 * 3 * (1 + SHARDS)
    copy = tmp_path / "copy"
    for name in (os.path.relpath(each, url) for each in written):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes(object_stores.Store(url).read(name) or b"")
    for path in (url, copy):
        np.testing.assert_array_equal(rows(path), np.concatenate(made))
        np.testing.assert_array_equal(rows(path, "validation"), made[0])


@pytest.mark.parametrize("shards", [[3], [5, 5], [3, 3, 3], ["3", 3]])
@pytest.mark.parametrize("joined", ["local"], indirect=True)
def test_shards_that_do_not_have_the_rows_are_damage(joined, tmp_path, shards):
    about = json.loads(pathlib.Path(joined[0], "cache.json").read_text())
    about["splits"]["train"] |= {"rows": 6, "shards": shards}
    about["num_shards"] = 2
    (tmp_path / "cache.json").write_text(json.dumps(about))
    with pytest.raises(errors.UserError, match=r"cache\.json does not describe a cache"):
        cached_data.read_about(str(tmp_path))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--shards=0"], "shards=0 must be at least 1"),
        (["--shards=100000"], "shards=100000 must be at most 99999"),
        (["--shards=4", "--rows=3"], "rows=3 is fewer than shards=4"),
        (["--", "--direct_num_workers=2"], "'--direct_num_workers=2' after -- is an option for"),
        (["--runner=DirectRunner", "--processes=2"], "processes=2 does not apply to --runner"),
    ],
)
def test_faulty_flags_are_explained(settings, tmp_path, flags, message):
    with pytest.raises(errors.UserError, match=message):
        cache.main([*settings, f"--output_dir={tmp_path}/cache", *flags])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Pipeline options for workers in processes of their own, behind a job server of Beam's."""
    pytest.importorskip("apache_beam")
    folder = tmp_path_factory.mktemp("cluster")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        pool = free.getsockname()[1]
    log = folder / "log"
    # The pool starts workers as `python`.
    paths = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with log.open("w") as file:
        started = [
            commands.start(
                [sys.executable, "-m", f"apache_beam.runners.{module}", *flags],
                env=os.environ | {"PATH": paths},
                cwd=folder,
                stdout=file,
                stderr=file,
            )
            for module, flags in {
                "portability.local_job_service_main": ["--port=0"],
                "worker.worker_pool_main": [f"--service_port={pool}"],
            }.items()
        ]
    listening = re.compile(r"Listening for beam jobs on port (\d+)")
    commands.wait_until(
        lambda: listening.search(log.read_text()) and "Started worker pool" in log.read_text(),
        *started,
    )
    yield [
        f"--job_endpoint=localhost:{listening.search(log.read_text()).group(1)}",
        "--environment_type=EXTERNAL",
        f"--environment_config=localhost:{pool}",
    ]
    for process in started:
        process.terminate()
        process.wait()


class TestBeam:
    @pytest.mark.slow
    def test_without_the_extra_one_message_has_the_remedy(self, settings, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "apache_beam", None)
        monkeypatch.delitem(sys.modules, "convt5.data.beam_jobs", raising=False)
        argv = [*settings, "--runner=DirectRunner", f"--output_dir={tmp_path}/cache"]
        with pytest.raises(errors.UserError, match=r"needs Apache Beam.*'convt5\[beam\]'"):
            cache.main(argv)

    def test_one_module_imports_beam_and_only_for_a_runner(self):
        sources = [*pathlib.Path("convt5").rglob("*.py"), *pathlib.Path("tasks").rglob("*.py")]
        importing = {
            path.as_posix(): line.strip()
            for path in sources
            for line in reversed(path.read_text().splitlines())
            if re.match(r"\s*(from|import) .*\b(apache_beam|beam_jobs)\b", line)
        }
        assert importing == {
            "convt5/data/beam_jobs.py": "import apache_beam as beam",
            "convt5/cache.py": "from convt5.data import beam_jobs",
        }

    def test_dashes_end_the_flags(self):
        given = ["--output_dir=a", "--", "--project=b", "--", "c"]
        assert cache._split_at_dashes(given) == (given[:1], given[2:])

    @pytest.mark.slow
    def test_workers_of_the_direct_runner_write_the_same_files(self, local, settings, tmp_path):
        pytest.importorskip("apache_beam")
        command = [sys.executable, "-m", "convt5.cache", *settings, f"--shards={SHARDS}"]
        workers = ["--", "--direct_num_workers=2", "--direct_running_mode=multi_processing"]
        flags = ["--runner=DirectRunner", f"--output_dir={tmp_path}/cache"]
        done = commands.run([*command, *flags, *workers], check=True)
        assert "wrote" in done.stdout
        assert contents(tmp_path / "cache") == contents(local)

    @pytest.mark.slow
    @pytest.mark.parametrize("runner", ["FlinkRunner", "SparkRunner"])
    def test_workers_behind_a_job_server_write_the_same_files(
        self, local, settings, cluster, tmp_path, runner
    ):
        command = [sys.executable, "-m", "convt5.cache", *settings, f"--shards={SHARDS}"]
        flags = [f"--runner={runner}", f"--output_dir={tmp_path}/cache", "--", *cluster]
        commands.run([*command, *flags], check=True)
        assert contents(tmp_path / "cache") == contents(local)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--runner=NoRunner"], "--runner=NoRunner cannot be used with"),
            (
                ["--runner=DirectRunner", "--", "--direct_num_workers=two"],
                "invalid int value: 'two'); correct the options after --",
            ),
            (
                ["--runner=DirectRunner", "--", "--direct_num_worker=2"],
                "(unknown option '--direct_num_worker=2'); correct the options after --",
            ),
        ],
    )
    def test_mistakes_end_in_one_message(self, settings, tmp_path, flags, message):
        pytest.importorskip("apache_beam")
        command = [
            sys.executable,
            "-m",
            "convt5.cache",
            *settings,
            f"--output_dir={tmp_path}/cache",
        ]
        done = commands.run([*command, *flags])
        assert done.returncode == 2
        assert message in done.stderr
        assert f"{flags[0]} cannot be used with" in done.stderr
        assert not re.search("Traceback|usage:", done.stderr)

    @pytest.mark.slow
    @pytest.mark.parametrize("has_server", [False, True])
    def test_what_a_worker_says_is_the_message(self, tmp_path, request, has_server):
        pytest.importorskip("apache_beam")
        (tmp_path / "work.py").write_text(
            "from convt5 import errors\n"
            "def advise(item): raise errors.UserError(f'item={item} is wrong; choose another.')\n"
            "def fail(item): raise ValueError('no such thing')\n"
        )
        runner, options = "DirectRunner", []
        if has_server:
            runner, options = "FlinkRunner", request.getfixturevalue("cluster")[:1]
            options.append("--environment_type=LOOPBACK")
        code = (
            "import work\n"
            "from convt5 import errors\n"
            "from convt5.data import beam_jobs\n"
            "for make in (work.advise, work.fail):\n"
            f"    try: beam_jobs.run(make, [3], runner={runner!r}, options={options})\n"
            "    except errors.UserError as error: print(error)\n"
        )
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        done = commands.run([sys.executable, "-c", code], env=environment, check=True)
        advice, failure = done.stdout.splitlines()
        assert advice == "item=3 is wrong; choose another."
        assert re.fullmatch(rf"--runner={runner} failed \(.*no such thing.\)\.", failure)


@pytest.mark.slow
def test_a_shard_without_text_is_named(settings, tmp_path):
    (tmp_path / "text.txt").write_text("one text\n")
    text = f"--gin.TEXT={tmp_path}/text.txt"
    held_out = f"--gin.pretraining.text_span_corruption.validation_path={tmp_path}/text.txt"
    with pytest.raises(errors.UserError, match=r"fewer examples than there are hosts or shards"):
        cache.main([*settings, text, held_out, "--shards=2", f"--output_dir={tmp_path}/cache"])


def test_examples_of_the_help_have_pipeline_options_after_dashes():
    (example,) = (a.split() for _, a in cache.COMMAND.examples if " -- " in a)
    argv, options = cache._split_at_dashes(example)
    assert command_line.parse(cache.COMMAND, argv).flags.runner == "DataflowRunner"
    assert "--project=mine" in options
