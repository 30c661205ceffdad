"""Runs that are trained as one program are those that the trainer makes, one at a time."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import runs_together
from convt5.tasks import vocabularies  # pyright: ignore[reportMissingImports]

import convt5
from convt5.data import cached_data
from convt5.modeling.tree_paths import named_leaves
from convt5.sweeps import reading, running
from convt5.training.run_log import read_records

STEPS = 4
STUDY = """
from __gin__ import dynamic_registration
from convt5 import sweeps
sweeps.Study.output_dir = 'runs'
sweeps.Study.gin_files = ['gin/runs/finetune_cached.gin']
sweeps.Study.bindings = {
    'CACHE': 'cache',
    'INIT_FROM': 'first',
    'NUM_STEPS': 4,
    'cached_data.CachedDataConfig.batch_size': 8,
    'architecture.ConvT5Config.vocab_size': 384,
    'architecture.ConvT5Config.emb_dim': 8,
    'architecture.ConvT5Config.mlp_dim': 8,
    'architecture.ConvT5Config.num_heads': 1,
    'architecture.ConvT5Config.head_dim': 4,
    'architecture.ConvT5Config.dropout_rate': 0.1,
    'architecture.StackConfig.num_layers': 1,
    'trainer.train.eval_every_steps': None,
    'trainer.train.eval_num_batches': None,
    'trainer.train.eval_data': None,
    'trainer.train.log_every_steps': 1,
}
sweeps.Study.grids = [@sweeps.Grid()]
sweeps.Grid.axes = {
    'task': {'one': {}},
    'start': {'scratch': {'trainer.train.init_from': None}, 'pre-trained': {}},
    'schedule.Constant.rate': [0.01, 0.1],
}
sweeps.Study.seeds = [0, 1]
sweeps.Study.seed_name = 'SEED'
sweeps.Study.rows = ['start']
sweeps.Study.metric = 'task/accuracy'
sweeps.Study.perfect = 100.0
"""


@pytest.fixture
def study(tmp_path, monkeypatch):
    rows = np.random.default_rng(0).integers(2, 32, (12, 8), dtype=np.int32)
    writer = cached_data.Writer(tmp_path / "cache")
    vocabulary = vocabularies.characters()
    writer.vocabulary(vocabulary, vocabularies.token_bytes(vocabulary))
    names = ("encoder_input_tokens", "decoder_input_tokens", "decoder_target_tokens")
    made = {name: rows for name in names} | {"decoder_loss_weights": np.ones_like(rows)}
    for split in ("train", "validation"):
        list(writer.write(split, [made]))
    writer.finish(made_from={})
    file = tmp_path / "study.gin"
    file.write_text(
        STUDY.replace("'cache'", repr(str(tmp_path / "cache")))
        .replace("'first'", repr(str(tmp_path / "first")))
        .replace("'runs'", repr(str(tmp_path / "runs")))
    )
    return reading.read([str(file)], [], ())


def test_runs_of_one_shape_are_one_group(study):
    found = runs_together.groups(runs_together.members(study))
    assert [len(group) for group in found] == [8]
    longer = [
        m._replace(run=dataclasses.replace(m.run, num_steps=5)) if i % 2 else m
        for i, m in enumerate(found[0])
    ]
    assert [len(group) for group in runs_together.groups(longer)] == [4, 4]


@pytest.mark.nightly
def test_each_run_is_the_one_that_the_trainer_makes(study, tmp_path):
    group = runs_together.members(study)
    convt5.save_model(group[0].run.model.build(jax.random.key(9)), tmp_path / "first")
    *_, (losses, states) = runs_together.train(group)
    models = list(runs_together.models(states))
    # Both starts, rates and seeds are among the first and the last.
    for i in (0, len(group) - 1):
        alone = dataclasses.replace(group[i].run, run_dir=str(tmp_path / f"alone{i}"))
        alone.train()
        expected = [r["loss"] for r in read_records(tmp_path / f"alone{i}" / "metrics.jsonl")]
        assert len(expected) == STEPS
        assert losses[i] == pytest.approx(np.mean(expected), rel=1e-5)
        trained = dict(named_leaves(convt5.load_model(alone.run_dir)))
        for name, array in named_leaves(models[i]):
            np.testing.assert_allclose(array, trained[name], rtol=2e-4, atol=2e-5)


def test_measured_runs_become_results_of_the_study(study, tmp_path):
    names = [point.name for point in study.points()]
    (tmp_path / "made").mkdir()
    made = [{"run": name, "steps": STEPS, "loss": [3.0, 2.0]} for name in names[:2]]
    answers = [{"run": names[0], "file": "one-test.json", "scores": []}]
    text = "".join(json.dumps(each) + "\n" for each in [*made, *answers])
    (tmp_path / "made" / "group.jsonl").write_text(text)
    measured = [
        {"run": names[0], "split": "test", "accuracy": 50.0},
        {"run": names[0], "split": "validation", "accuracy": 40.0},
        {"run": names[5], "split": "test", "accuracy": 60.0},
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(each) + "\n" for each in measured))
    assert runs_together.write_results(study, tmp_path / "made", metrics) == 1
    first, *others = running.runs(study)
    assert first.status == "finished"
    assert {run.status for run in others} == {None}
    (record,) = read_records(first.folder / "metrics.jsonl")
    expected = {"step": 4, "loss": 2.0, "task/accuracy": 50.0, "validation/accuracy": 40.0}
    assert record == expected
