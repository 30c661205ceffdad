"""Tasks can be cached by seqio's own tool, and the cache is read."""

import inspect
import sys

import commands
import numpy as np
import pytest
import seqio
from convt5.tasks import formats, pretraining

from convt5 import data
from convt5.data import row_ends
from convt5.evaluation import task_data

NAMES = sorted(
    name
    for name in seqio.TaskRegistry.names()
    if str(getattr(seqio.TaskRegistry.get(name).source, "__module__", "")).startswith("convt5.")
)
MODULE = """
import seqio
from convt5.tasks import classification, pretraining, vocabularies

text = pretraining.text_span_corruption(
    {text!r}, vocabularies.characters(), validation_fraction=0.1, name="local_text"
)
labelled = classification.text_classification(
    {rows!r}, ["no", "yes"], vocabulary=vocabularies.characters(), name="local_labels"
)
for task in (text, labelled):
    if task.name not in seqio.TaskRegistry.names():
        seqio.TaskRegistry.add_provider(task.name, task)
"""


@pytest.mark.parametrize("name", NAMES)
def test_tasks_are_cached_before_what_depends_on_lengths_and_chance(name):
    task = seqio.TaskRegistry.get(name)
    assert task.supports_caching
    assert not task.requires_caching
    places = [isinstance(step, seqio.CacheDatasetPlaceholder) for step in task.preprocessors]
    before = task.preprocessors[: places.index(True)]
    assert getattr(before[-1], "func", before[-1]) is seqio.preprocessors.tokenize
    for step in before:
        assert not {"sequence_length", "seed", "seeds"} & set(inspect.signature(step).parameters)


def take(task, **settings):
    config = data.DataConfig(
        mixture=task, batch_size=4, encoder_length=64, decoder_length=20, **settings
    )
    batches = config.build(process_index=0, process_count=1)
    return [next(batches) for _ in range(3)]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        for name, values in other.items():
            np.testing.assert_array_equal(one[name], values)


@pytest.mark.slow
def test_a_placeholder_changes_no_random_number_of_training_or_evaluation():
    task = pretraining.pydoc_span_corruption()
    steps = [s for s in task.preprocessors if not isinstance(s, seqio.CacheDatasetPlaceholder)]
    plain = task.replace(preprocessors=steps)
    assert len(steps) == len(task.preprocessors) - 1
    assert_equal(take(task), take(plain))
    read = [
        task_data.read_examples(
            each, "validation", lengths={"inputs": 64, "targets": 20}, num_examples=3
        )
        for each in (task, plain)
    ]
    for one, other in zip(*read, strict=True):
        np.testing.assert_array_equal(one["inputs"], other["inputs"])


def test_a_placeholder_does_not_hide_how_a_task_writes_its_inputs():
    task = pretraining.pydoc_span_corruption()
    assert formats.of(task) == formats.of(row_ends.without_cache(task))
    assert not formats.of(task)[0].unknown
    answers = seqio.TaskRegistry.get("sst2")
    assert formats.of(answers) == formats.of(row_ends.without_cache(answers))


@pytest.fixture
def no_caches():
    yield
    seqio.set_global_cache_dirs([])


@pytest.mark.slow
@pytest.mark.usefixtures("no_caches")
def test_seqios_own_tool_caches_local_tasks(tmp_path, monkeypatch):
    pytest.importorskip("apache_beam")
    (tmp_path / "text.txt").write_text(
        "".join(f"text number {i * i} of some that differ\n" for i in range(300))
    )
    rows = "".join(f"row {i} says {'yes' if i % 3 else 'no'}\t{i % 2}\n" for i in range(50))
    (tmp_path / "train.tsv").write_text(
        "text\tlabel\n" + rows.replace("\t0", "\tno").replace("\t1", "\tyes")
    )
    module = MODULE.format(text=str(tmp_path / "text.txt"), rows=str(tmp_path / "train.tsv"))
    (tmp_path / "my_cached_tasks.py").write_text(module)
    environment = commands.os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    commands.run(
        [
            *(sys.executable, "-m", "seqio.scripts.cache_tasks_main", "--tasks=local_.*"),
            *(f"--output_cache_dir={tmp_path}/cached", "--module_import=my_cached_tasks"),
            "--min_shards=2",
        ],
        env=environment,
        check=True,
    )
    for name in ("local_text", "local_labels"):
        assert (tmp_path / "cached" / name / "COMPLETED").exists()
    monkeypatch.syspath_prepend(str(tmp_path))
    import my_cached_tasks

    for task in (my_cached_tasks.text, my_cached_tasks.labelled):
        cached = {"use_cached": True, "cache_dirs": [str(tmp_path / "cached")], "num_epochs": 1}
        settings = {"num_epochs": 1, "shuffle": False}
        read, made = (
            np.concatenate([b["encoder_input_tokens"] for b in _all(task, **each)])
            for each in (settings | cached, settings)
        )
        if task is my_cached_tasks.labelled:
            assert sorted(map(tuple, read.tolist())) == sorted(map(tuple, made.tolist()))
        else:  # In another order, so that other parts are corrupted.
            assert read.shape == made.shape
            assert abs(int((read != 0).sum()) - int((made != 0).sum())) < 100


def _all(task, **settings):
    config = data.DataConfig(
        mixture=task, batch_size=4, encoder_length=64, decoder_length=20, **settings
    )
    return list(config.build(process_index=0, process_count=1))
