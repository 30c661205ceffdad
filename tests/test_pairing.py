"""Pairing: the widths it finds have the cost of the reference, and are the nearest that have."""

import dataclasses
import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quick import quick

from convt5 import sweeps
from convt5.analysis import costs, pairing
from convt5.analysis.pairing import pair
from convt5.configuration import gin_config
from convt5.errors import UserError
from convt5.modeling.architecture import ConvT5Config, StackConfig
from convt5.sweeps import analysis, equal_cost, profile, running
from convt5.sweeps.study import Point
from convt5.vision import costs as vision_costs

LENGTHS = {"encoder_length": 96, "decoder_length": 12}


def config(stack: StackConfig, **changes) -> ConvT5Config:
    known = {
        "vocab_size": 384,
        "emb_dim": 64,
        "mlp_dim": 128,
        "num_heads": 4,
        "head_dim": 16,
        "encoder": stack,
        "decoder": stack,
    }
    return ConvT5Config(**known | changes)


T5 = config(StackConfig(num_layers=2, mixing="attention"), positions="relative")
DYNAMIC = config(StackConfig(num_layers=2, mixing="dynamic", num_kernels=2))
WAVENET = config(StackConfig(num_layers=2, mixing="depthwise", kernel_size=2, dilation=(1, 2)))


def cost(model, by):
    if by == "parameters":
        return costs.num_parameters(costs.parameter_shapes(model))
    return costs.forward_flops(model, **LENGTHS)


@pytest.mark.parametrize("by", ["parameters", "flops"])
@pytest.mark.parametrize("model", [DYNAMIC, WAVENET], ids=["dynamic", "wavenet"])
def test_costs_agree_and_only_widths_change(model, by):
    found = pair(model, T5, by=by, **LENGTHS)
    assert found.cost == cost(found.config, by)
    assert found.wanted == cost(T5, by)
    assert abs(found.cost / found.wanted - 1) <= 0.01
    assert dataclasses.replace(found.config, **{"emb_dim": 64, "mlp_dim": 128}) == model


widths = given(
    emb_dim=st.sampled_from([32, 48, 64]),
    mlp_dim=st.sampled_from([64, 96, 160]),
    by=st.sampled_from(["parameters", "flops"]),
    multiple=st.sampled_from([4, 8]),
)


@settings(max_examples=2, deadline=None)
@widths
@pytest.mark.slow
def test_no_width_at_the_same_residual_stream_is_nearer(**drawn):
    _check_nearest(**drawn)


@pytest.mark.nightly
@settings(max_examples=20, deadline=None)
@widths
def test_no_width_of_many_at_the_same_residual_stream_is_nearer(**drawn):
    _check_nearest(**drawn)


def _check_nearest(emb_dim, mlp_dim, by, multiple):
    own = dataclasses.replace(DYNAMIC, emb_dim=emb_dim, mlp_dim=mlp_dim)
    found = pair(own, T5, by=by, multiple=multiple, tolerance=0.05, **LENGTHS)
    assert found.config.emb_dim % multiple == found.config.mlp_dim % multiple == 0
    # Costs grow by the same amount with each channel, so that three tell those of all.
    first, second, last = (
        cost(dataclasses.replace(found.config, mlp_dim=width), by)
        for width in (multiple, 2 * multiple, 4 * mlp_dim)
    )
    step = second - first
    assert last == first + step * (4 * mlp_dim // multiple - 1)
    nearest = min(
        abs((first + step * (width // multiple - 1)) / found.wanted - 1)
        for width in range(multiple, 4 * mlp_dim + 1, multiple)
        if width * 4 >= mlp_dim
    )
    assert abs(found.difference) == nearest


def test_a_model_is_its_own_pair():
    found = pair(T5, T5, by="flops", **LENGTHS)
    assert found.config == T5
    assert found.difference == 0
    assert found.changed(T5) == {}


@pytest.mark.slow
def test_the_residual_stream_changes_where_the_feed_forward_layers_cannot_make_up():
    small = dataclasses.replace(WAVENET, emb_dim=32, mlp_dim=32)
    found = pair(small, T5, by="parameters", **LENGTHS)
    assert abs(found.difference) <= 0.01
    assert 32 < found.config.emb_dim <= 128
    assert found.changed(small)["emb_dim"] == found.config.emb_dim


def test_the_impossible_names_what_comes_nearest():
    one = dataclasses.replace(
        WAVENET, encoder=StackConfig(num_layers=1), decoder=StackConfig(num_layers=1), emb_dim=8
    )
    with pytest.raises(UserError, match=r"1 \+ 1 layers give [\d,]+ parameters within 1.0%; the"):
        pair(one, T5, by="parameters", largest_change=1.5, **LENGTHS)
    with pytest.raises(UserError, match="lower multiple=512"):
        pair(DYNAMIC, T5, by="flops", multiple=512, **LENGTHS)


@pytest.mark.parametrize(
    ("by", "changes", "nearest"),
    [
        ("parameters", {"vocab_size": 2**20}, "emb_dim=256, mlp_dim=512 with"),
        ("flops", {"emb_dim": 4, "num_heads": 1, "head_dim": 4}, "emb_dim=16, mlp_dim=32 with"),
    ],
)
def test_the_hopeless_is_told_without_trying_every_width(by, changes, nearest, monkeypatch):
    computed = []
    whole = pairing._cost
    monkeypatch.setattr(pairing, "_cost", lambda *given: computed.append(1) or whole(*given))
    other = dataclasses.replace(T5, **changes)
    with pytest.raises(UserError, match=f"the nearest are {nearest}"):
        pair(DYNAMIC, other, by=by, **LENGTHS)
    assert len(computed) <= 25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"by": "seconds"}, "by='seconds' must be one of parameters, flops"),
        ({"by": "flops", "tolerance": 0}, "tolerance=0 must be above 0"),
        ({"by": "flops", "multiple": 0}, "multiple=0 must be at least 1"),
        ({"by": "flops", "largest_change": 0.5}, "largest_change=0.5 must be at least 1"),
    ],
)
def test_wrong_settings_are_named(change, message):
    with pytest.raises(UserError, match=message):
        pair(DYNAMIC, T5, **LENGTHS, **change)


VARIANTS = ("dynamic", "dilated", "wavenet", "hybrid")
BASE = [(variant, by) for by in ("parameters", "flops") for variant in VARIANTS]


@pytest.mark.parametrize(
    "case", quick(BASE, chosen=[("dynamic", "flops"), ("hybrid", "parameters")]), ids="-".join
)
def test_base_presets_can_be_paired_with_t5(case):
    variant, by = case

    def load(name):
        return gin_config.load([f"gin/models/{name}_base.gin"], roots=["%MODEL"]).macro("MODEL")

    found = pair(
        load(variant), load("t5"), by=by, encoder_length=512, decoder_length=114, multiple=128
    )
    assert abs(found.difference) <= 0.01


VIT = gin_config.load(["gin/models/vit_c_tiny.gin"], roots=["%MODEL"]).macro("MODEL")


@pytest.mark.parametrize("models", [(VIT, T5), (T5, VIT)])
def test_models_of_images_are_not_paired(models):
    with pytest.raises(UserError, match="ViTConfig is not a ConvT5Config"):
        pair(*models, by="flops", **LENGTHS)


def vision_study(folder, **changes) -> sweeps.Study:
    """Two models at two peaks of the rate."""
    models = {name: f"gin/models/vit_{name}_tiny.gin" for name in "pc"}
    known = {
        "output_dir": str(folder),
        "gin_files": ["gin/runs/digits.gin"],
        "grids": [
            sweeps.Grid(axes={"model": models, "schedule.Cosine.peak": [0.001, 0.003]}),
        ],
        "metric": "validation/accuracy",
        "perfect": 1.0,
        "rows": ["model"],
        "over": "schedule.Cosine.peak",
    }
    return sweeps.Study(**known | changes)


def test_a_study_of_models_of_images_over_an_axis_shows_what_they_cost(tmp_path):
    def launch(arguments, log):
        record = {"step": 4, "validation/accuracy": 0.5, "train_seconds": 7.0}
        (pathlib.Path(log).parent / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        return 0

    asked = vision_study(tmp_path)
    assert running.run_all(asked, launch=launch) == 4
    lines = profile.lines(asked, analysis.results(asked))
    table = profile.cost_table(asked, lines)
    found = table[("c",), "0.001"]
    point = Point({}, ("gin/runs/digits.gin", "gin/models/vit_c_tiny.gin"), ())
    total = vision_costs.model_cost(equal_cost.describe(point).model).total
    assert (found.parameters, found.flops) == (total.parameters, 2 * total.multiply_adds)
    assert (found.memory, found.seconds) == (None, 7.0)
    costs = profile.sections(asked, lines, table)[-1]
    rows = [row for row in costs.rows if f"{total.parameters:,}" in row]
    assert [row[-3:] for row in rows] == [["-", "7", "-"]] * 2


def test_costs_are_those_of_the_setting_whose_metric_is_shown(tmp_path):
    def launch(arguments, log):
        is_deep = "num_layers=2" in str(arguments)
        record = {"step": 4, "validation/accuracy": 0.1 + 0.5 * is_deep}
        record |= {"train_seconds": 90.0 if is_deep else 30.0}
        (pathlib.Path(log).parent / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        return 0

    axes = {
        "model": {"p": "gin/models/vit_p_tiny.gin"},
        "schedule.Cosine.peak": [0.001],
        "architecture.ViTConfig.num_layers": [1, 2],
    }
    asked = vision_study(tmp_path, grids=[sweeps.Grid(axes=axes)], seeds=[0, 1])
    assert running.run_all(asked, launch=launch) == 4
    deep = equal_cost.describe(list(asked.points())[1]).model
    lines = profile.lines(asked, analysis.results(asked))
    costs = profile.sections(asked, lines, profile.cost_table(asked, lines))[-1]
    (row,) = (dict(zip(costs.columns, row, strict=True)) for row in costs.rows)
    parameters = f"{vision_costs.model_cost(deep).total.parameters:,}"
    shown = [row[name] for name in (*axes, "parameters", "seconds")]
    assert shown == ["p", "0.001", "2", parameters, "90"]


def test_a_study_is_reported_where_the_data_of_its_runs_is_not(tmp_path):
    asked = sweeps.Study(
        output_dir=str(tmp_path / "study"),
        gin_files=["gin/runs/pretrain_text.gin"],
        bindings={"TEXT": "gone.txt", "VOCABULARY": "gone.model"},
        grids=[sweeps.Grid(axes={"NUM_STEPS": [3], "schedule.InverseSqrt.warmup_steps": [5, 10]})],
        metric="validation/accuracy",
        perfect=1.0,
        rows=["NUM_STEPS"],
        over="schedule.InverseSqrt.warmup_steps",
    )

    def launch(arguments, log):
        record = {"step": 4, "validation/accuracy": 0.5, "train_cpu_seconds": 7.0}
        (pathlib.Path(log).parent / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        return 0

    assert running.run_all(asked, launch=launch) == 2
    lines = profile.lines(asked, analysis.results(asked))
    costs = profile.sections(asked, lines, profile.cost_table(asked, lines))[-1]
    assert costs.rows[0][1:] == ["5", *["-"] * 5, "7"]
    (fault,) = [note for note in costs.notes if note.startswith("Not known here: ")]
    assert "gone.model' names no file" in fault


def test_a_study_does_not_pair_models_of_images(tmp_path):
    pairing = sweeps.Pairing(axis="model", reference="p", by="parameters")
    with pytest.raises(UserError, match="ViTConfig is not a ConvT5Config"):
        list(vision_study(tmp_path, pairing=pairing).points())
