"""Benchmarks: sides run in turns, records are complete, and what is asked for is what is run."""

import functools
import importlib.util
import json
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick

from convt5 import bench, errors
from convt5.benchmarks import (
    formulations,
    models,
    operators,
    peers,
    report,
    timing,
    torch_operators,
)
from convt5.configuration import command_line
from convt5.modeling.mixers import KINDS
from convt5.ops import depthwise_conv, dynamic_conv, lightweight_conv
from convt5.ops.geometry import Taps

TINY = [
    "--gin.architecture.ConvT5Config.emb_dim=16",
    "--gin.architecture.ConvT5Config.mlp_dim=16",
    "--gin.architecture.ConvT5Config.head_dim=4",
    "--gin.architecture.ConvT5Config.vocab_size=32",
    "--gin.architecture.StackConfig.num_layers=1",
]


def test_sides_run_in_turns_after_one_run_that_does_not_count():
    order = []
    sides = {name: lambda name=name: order.append(name) for name in "ab"}
    taken = timing.in_turns(sides, repeats=3)
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]
    assert all(found.repeats == 3 and found.seconds >= 0 for found in taken.values())


@pytest.mark.parametrize(
    ("num", "dropped"), [(2, 0), (5, 0), (8, 0), (9, 1), (11, 1), (12, 2), (15, 3)]
)
def test_the_interval_of_a_median_drops_what_chance_seldom_passes(num, dropped):
    values = list(np.random.default_rng(num).permutation(num).astype(float))
    assert timing.median_interval(values) == (dropped, num - 1 - dropped)
    if num >= 6:
        # How often the interval of normal values holds zero, their median.
        drawn = np.random.default_rng(0).normal(size=(4000, num))
        low, high = np.array([timing.median_interval(row) for row in drawn]).T
        assert np.mean((low < 0) & (high > 0)) > 0.94


def test_short_programs_are_queued_and_only_the_last_is_waited_for():
    events = []

    class Result:
        def block_until_ready(self):
            events.append("wait")

    def call():
        events.append("call")
        return Result()

    timing.in_turns({"a": call}, repeats=2, calls=3)
    one_round = ["call"] * 3 + ["wait"]
    assert events == ["call", "wait", *one_round, *one_round]


@pytest.mark.parametrize("kind", operators.KINDS)
def test_the_naive_sum_computes_the_same(kind):
    rng = np.random.default_rng(0)
    taps, length, embed = 5, 12, operators.EMBED
    shape = {
        "depthwise": (taps, embed),
        "lightweight": (taps, operators.HEADS),
        "dynamic": (2, length, taps, operators.HEADS),
    }[kind]
    x = jnp.asarray(rng.normal(size=(2, length, embed)), jnp.float32)
    kernel = jnp.asarray(rng.normal(size=shape), jnp.float32)
    ours = {"depthwise": depthwise_conv, "lightweight": lightweight_conv, "dynamic": dynamic_conv}
    np.testing.assert_allclose(
        operators._naive(kind, x, kernel), ours[kind](x, kernel), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("taps", [3, 4, 7])
def test_the_convolution_of_pytorch_is_the_same(taps):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, kernel = (rng.normal(size=size).astype(np.float32) for size in ((2, 12, 6), (taps, 6)))
    of_torch = torch_operators._conv1d(taps)(
        torch.from_numpy(x.swapaxes(1, 2).copy()), torch.from_numpy(kernel.T.copy())
    )
    padding = (taps // 2, (taps - 1) // 2)
    expected = depthwise_conv(jnp.asarray(x), jnp.asarray(kernel), padding=padding)
    np.testing.assert_allclose(of_torch.numpy().swapaxes(1, 2), expected, rtol=1e-4, atol=1e-5)


def test_operators_are_timed_at_the_sizes_that_are_asked_for(monkeypatch):
    monkeypatch.setattr(operators, "KERNEL_SIZES", (3,))
    sizes = {"batch_size": 2, "channels": 8, "repeats": 1, "copy_bytes_per_second": 1e9}
    records = list(operators.suite([16], **sizes, with_torch=True))
    assert [r["case"] for r in records] == ["depthwise K=3", "lightweight K=3", "dynamic K=3"]
    has_torch = importlib.util.find_spec("torch") is not None
    for record, elements in zip(records, (3 * 8, 3 * 2, 2 * 16 * 3 * 2), strict=True):
        assert record["least_bytes"] == 4 * (4 * 2 * 16 * 8 + 2 * elements)
        assert (record["batch_size"], record["channels"]) == (2, 8)
        is_compared = has_torch and record["kind"] == "depthwise"
        assert (record["torch_seconds"] is not None) == is_compared
        assert record["causal_conv1d_seconds"] is None  # It runs on GPUs alone.


def test_a_dry_run_checks_and_lists_without_measuring(tmp_path, capsys):
    flags = ["--suites=train_step,start", "--gin_file=gin/models/depthwise_tiny.gin", "--dry_run"]
    output = tmp_path / "bench"
    bench.main([*flags, "--lengths=16,8", f"--output={output}"])
    assert capsys.readouterr().out.splitlines() == [
        "train_step: depthwise_tiny, at 8, 16",
        "start: its own cases",
    ]
    with pytest.raises(errors.UserError, match="lengths='x'"):
        bench.main([*flags, "--lengths=x"])
    assert not output.exists()


@pytest.mark.nightly
def test_a_run_writes_a_record_for_each_length_and_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("convt5.benchmarks.machine._COPY_ELEMENTS", 2**10)
    monkeypatch.setattr("convt5.benchmarks.machine._MATRIX", 16)
    output = tmp_path / "bench"
    bench.main(
        [
            *("--suites=train_step,decode", "--lengths=8,16", "--repeats=1", "--batch_size=2"),
            *("--gin_file=gin/models/depthwise_tiny.gin", f"--output={output}", *TINY),
            "--only_ours",
        ]
    )
    records = [json.loads(line) for line in (output / "records.jsonl").read_text().splitlines()]
    assert [(r["suite"], r.get("length")) for r in records] == [
        ("machine", None),
        *(("train_step", 8), ("train_step", 16)),
        *(("decode", 8), ("decode", 16)),
    ]
    assert {r["case"] for r in records[1:]} == {"depthwise_tiny"}
    short, long = records[1:3]
    assert short["flops"] < long["flops"] < 2.5 * short["flops"]
    assert records[3]["state_bytes"] > 0
    assert (output / "train_step.png").stat().st_size > 10_000
    assert "depthwise_tiny" in cells(capsys.readouterr().out)


@pytest.mark.nightly
def test_models_that_take_too_long_are_left_out_at_greater_lengths():
    named = bench._models(["gin/models/depthwise_tiny.gin"], [flag[6:] for flag in TINY])
    sides = {name: functools.partial(models.train_step, config) for name, config in named.items()}
    settings = {"batch_size": 1, "repeats": 1, "longest_seconds": 0.0}
    found = models.by_length("train_step", sides, (8, 16), **settings)
    assert [record["length"] for record in found] == [8]


def test_records_and_tables_tell_the_rows_of_a_batch():
    settings = {"batch_size": 3, "repeats": 1, "longest_seconds": 9.0}
    (record,) = models.by_length("decode", {"a": lambda *_: (lambda: 0, {})}, [8], **settings)
    assert record["batch_size"] == 3
    machine = {
        **{"suite": "machine", "device": "cpu", "processor": "p", "platform": "cpu", "jax": "1"},
        **{"processors": 2, "copy_bytes_per_second": 1e9, "matmul_flops": 1e11},
    }
    assert "\n### decode, batches of 3\n" in report.text([machine, record])


def cells(text: str) -> list[str]:
    """The cells of the first row of a table, below its header and rule."""
    _, _, row, *_ = (line for line in text.splitlines() if line.startswith("|"))
    return [cell.strip() for cell in row.split("|")[1:-1]]


def test_tables_show_large_numbers_shortly():
    machine = {
        **{"suite": "machine", "device": "cpu", "processor": "p", "platform": "cpu", "jax": "1"},
        **{"processors": 2, "copy_bytes_per_second": 1e9, "matmul_flops": 1e11},
    }
    row = {"suite": "decode", "case": "a", "length": 8, "seconds": 0.12345}
    row |= {"tokens_per_second": 12345.0, "state_bytes": 999}
    assert cells(report.text([machine, row])) == ["8", "a", "0.123", "12.3k", "999"]


def test_cases_are_compared_with_the_first_at_each_length():
    machine = {
        **{"suite": "machine", "device": "cpu", "processor": "p", "platform": "cpu", "jax": "1"},
        **{"processors": 2, "copy_bytes_per_second": 1e9, "matmul_flops": 1e11},
    }
    times = {("a", 8): 1.0, ("b", 8): 4.0, ("a", 16): 2.0, ("b", 16): 16.0, ("a", 32): 4.0}
    rows = [
        {"suite": "train_step", "case": case, "length": length, "seconds": seconds}
        for (case, length), seconds in times.items()
    ]
    text = report.text([machine, *rows])
    assert "- 8: b is 0.25 times as fast as a" in text
    assert "- 16: b is 0.12 times as fast as a" in text
    assert "- a: from 8 to 32 time grows like length^1.00" in text
    assert "- b: from 8 to 16 time grows like length^2.00" in text
    assert cells(text) == ["8", "a", "1", "-", "-", "-", "-"]


def test_peers_are_sides_where_they_are(tmp_path, monkeypatch):
    config = bench._models(["gin/models/t5_tiny.gin"], [flag[6:] for flag in TINY])["t5_tiny"]
    with pytest.raises(errors.UserError, match=r"holds no t5x/examples/t5/network\.py"):
        peers.find_peers("decode", config, tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert peers.find_peers("train_step", config, None) == {}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert list(peers.find_peers("train_step", config, None)) == ["Hugging Face"]
    # It would run on the CPU beside a GPU.
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    assert peers.find_peers("train_step", config, None) == {}


@pytest.mark.parametrize(("backend", "has_cuda"), [("gpu", False), ("tpu", False), ("cpu", True)])
def test_pytorch_is_no_side_on_another_device_than_ours(monkeypatch, backend, has_cuda):
    cuda = types.SimpleNamespace(is_available=lambda: has_cuda, synchronize=None)
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("jax.default_backend", lambda: backend)
    assert torch_operators.find_sides(*np.ones((3, 1, 4, 4))) == {}


@pytest.mark.parametrize("suite", ["train_step", "decode"])
def test_hugging_faces_t5_is_measured_where_it_is_installed(suite):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    config = bench._models(["gin/models/t5_tiny.gin"], [flag[6:] for flag in TINY])["t5_tiny"]
    run, known = peers.find_peers(suite, config, None)["Hugging Face"](8, 2)
    if suite == "train_step":
        losses = [run() for _ in range(3)]
        assert losses[2] < losses[0] == pytest.approx(np.log(32), abs=1.0)
    else:
        assert run().shape == (2, 1 + 8)  # The start and as many as asked for, none ending early.
        # Keys and values of 8 outputs and 2 inputs, in float32.
        assert known["state_bytes"] == 2 * 2 * (8 + 2) * config.num_heads * config.head_dim * 4


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--suites=ops,decod", r"holds 'decod', which is none of .* Did you mean decode"),
        ("--lengths=128,x", r"lengths='128,x' must be integers of at least 4"),
        ("--lengths=2", r"lengths='2' must be integers of at least 4"),
        ("--gin_file=gin/models/dynmic_tiny.gin", r"dynamic_tiny"),
        ("--gin_file=gin/models/vit_c_tiny.gin", r"bench measures text models, .* a ViTConfig"),
        ("--repeats=0", "--repeats=0 must be at least 1"),
        ("--batch_size=0", "--batch_size=0 must be at least 1"),
        ("--channels=7", "--channels=7 must be an even number"),
        ("--longest_seconds=0", "--longest_seconds=0.0 must be a positive number"),
    ],
)
def test_faulty_arguments_are_explained(tmp_path, argument, message):
    with pytest.raises(errors.UserError, match=message):
        bench.main(["--suites=decode", argument, f"--output={tmp_path}"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--suites=ops", "--t5x=t5x"], "--t5x=t5x applies to the suites train_step and decode"),
        (
            ["--suites=data", "--gin_file=gin/models/t5_tiny.gin"],
            "t5_tiny.gin applies to the suites",
        ),
        (["--suites=start", "--lengths=8"], "--lengths does not apply to the suite start"),
        (
            ["--suites=data,start", "--batch_size=8"],
            "--batch_size=8 applies to the suites ops",
        ),
        (["--suites=decode", "--channels=8"], "--channels=8 applies to the suite ops; add it"),
        (["--suites=ops", "--longest_seconds=9"], "--longest_seconds=9.0 applies to the suites t"),
        (
            ["--suites=formulations", "--only_ours"],
            "--only_ours applies to the suites ops",
        ),
        (["--t5x=nowhere"], "t5x=nowhere holds no t5x/examples/t5/network.py"),
    ],
)
def test_what_no_suite_would_heed_is_refused_before_anything_is_measured(
    flags, message, tmp_path, monkeypatch
):
    monkeypatch.setattr("convt5.benchmarks.machine.describe", lambda: pytest.fail("measured"))
    with pytest.raises(errors.UserError, match=message):
        bench.main([*flags, f"--output={tmp_path}"])


@pytest.mark.parametrize("suite", ["train_step", "decode"])
def test_lengths_beyond_learned_positions_are_refused_before_anything_is_measured(suite, tmp_path):
    model = "--gin_file=gin/models/released/lconv_small.gin"
    flags = [model, f"--suites={suite}", f"--output={tmp_path}/bench"]
    with pytest.raises(errors.UserError, match=f"{suite} of lconv_small at 516 .*up to 512"):
        bench.main([*flags, "--lengths=8,516"])
    assert not (tmp_path / "bench").exists()


def test_lengths_are_measured_ascending_and_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = command_line.parse(bench.COMMAND, ["--lengths=512,8,512", "--output=~/bench"]).flags
    assert bench._lengths("ops", flags) == [8, 512]
    assert flags.output == tmp_path / "bench"


def test_models_of_files_of_one_name_stay_apart(tmp_path):
    files = [f"{tmp_path}/{name}/model.gin" for name in "ab"]
    for file, layers in zip(files, (1, 2), strict=True):
        pathlib.Path(file).parent.mkdir()
        pathlib.Path(file).write_text(
            "include 'gin/models/depthwise_tiny.gin'\n"
            "from __gin__ import dynamic_registration\nfrom convt5.modeling import architecture\n"
            f"architecture.StackConfig.num_layers = {layers}\n"
        )
    found = bench._models(files, [])
    assert {name: m.encoder.num_layers for name, m in found.items()} == {"a/model": 1, "b/model": 2}


def test_every_mixing_kind_is_measured_unless_models_are_named():
    models = bench._models([], [])
    assert {layer.kind for m in models.values() for layer in m.encoder_layers} == set(KINDS)
    assert any(layer.canon for m in models.values() for layer in m.encoder_layers)


def test_without_matplotlib_the_tables_are_written(tmp_path, monkeypatch, capsys):
    def measured(suite, lengths, *_):
        for length in lengths:
            yield {"suite": suite, "case": "a", "length": length, "seconds": 1.0}

    machine = {"suite": "machine", "device": "cpu", "processor": "p", "platform": "cpu"}
    machine |= {"jax": "1", "processors": 2, "copy_bytes_per_second": 1e9, "matmul_flops": 1e11}
    monkeypatch.setattr("convt5.benchmarks.machine.describe", lambda: machine)
    monkeypatch.setattr(bench, "_run", measured)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not bench.main(["--suites=train_step", "--lengths=8,16", f"--output={tmp_path}"])
    written = capsys.readouterr()
    assert "pip install 'convt5[plot]'" in written.err
    assert written.out.endswith(f"wrote {tmp_path}/records.jsonl, {tmp_path}/bench.md\n")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("size", quick([3, 17], chosen=[17]))
@pytest.mark.parametrize("sizes", quick([(50, 8), (600, 256)], chosen=[(600, 256)]), ids=str)
def test_every_formulation_of_a_gradient_gives_the_same(kind, size, sizes):
    length, embed = sizes
    taps = Taps(size, 2, size - 1, size - 1, cross_segments=False)
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.normal(size=(2, length, embed)), jnp.float32) for _ in range(2))
    parts = [length // 2 - 5, length - length // 2, 5]
    ids = jnp.asarray(np.repeat([[1, 2, 0]], 2, axis=0).repeat(parts, axis=1))
    served, given = {
        "static": (formulations._STATIC, {}),
        "dynamic": (formulations._DYNAMIC, {"num_kernels": 2}),
    }[kind]
    found = {
        name: jax.jit(functools.partial(gradient, taps, segment_ids=ids, **given))(x, y)
        for name, gradient in served.items()
    }
    for name, value in found.items():
        # Float32 sums in another order: of one position, or of up to 1,200.
        atol = 1e-5 if kind == "dynamic" else 1e-6 * float(jnp.abs(found["whole"]).max())
        np.testing.assert_allclose(value, found["whole"], rtol=1e-5, atol=atol, err_msg=name)


def test_the_chosen_formulation_is_measured_beside_the_others(monkeypatch):
    for name, value in {"KERNEL_SIZES": (3,), "NUM_KERNELS": (2,), "DILATIONS": (1,)}.items():
        monkeypatch.setattr(formulations, name, value)
    static, dynamic = formulations.suite([16], repeats=1)
    assert (static["case"], dynamic["case"]) == ("static K=3 d=1", "dynamic K=3 d=1 H=2")
    assert static["best"] in formulations._STATIC
    for record in (static, dynamic):
        assert record["times_best"] == record["seconds"] / record["best_seconds"]


def test_operators_are_drawn_under_the_machines_roofs(tmp_path):
    pytest.importorskip("matplotlib")
    machine = {"suite": "machine", "copy_bytes_per_second": 2e10, "matmul_flops": 1e11}
    ops = [
        {"suite": "ops", "case": f"{kind} K={taps}", "kind": kind, "length": 8}
        | {"flops": 1e6 * taps, "least_bytes": 1e6, "seconds": 1e-3, "naive_seconds": 2e-3}
        for kind in operators.KINDS
        for taps in operators.KERNEL_SIZES
    ]
    (picture,) = report.plot([machine, *ops], tmp_path)
    assert picture.name == "roofline.png"
    assert picture.stat().st_size > 10_000
