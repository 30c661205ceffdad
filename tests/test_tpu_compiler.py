"""The training step compiled by the real TPU compiler, for chips that are not here."""

import dataclasses
import importlib.util
import json
import math
import pathlib
import sys
import types

import commands
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from quick import quick

from convt5 import inspect
from convt5.analysis import compiled_step, inspect_command, topology
from convt5.analysis import gpu_target as target
from convt5.analysis.collectives import Traffic
from convt5.errors import UserError
from convt5.ops import attend

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = "gin/models/dynamic_tiny.gin"


def inspected(*flags: str) -> dict:
    """What the command says, as JSON."""
    done = commands.run(
        [sys.executable, "-m", "convt5.inspect", "--json", *flags],
        cwd=ROOT,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def report(libtpu) -> dict:
    """What it says of a preset with one layer in each stack, on a data x fsdp mesh."""
    return inspected(
        *(f"--gin_file={MODEL}", "--topology=v5e:2x2", "--gin.sharding.MeshConfig.fsdp=2"),
        *("--batch_size=16", "--encoder_length=64", "--decoder_length=32"),
        "--gin.architecture.StackConfig.num_layers=1",
    )


def payload(report: dict, axis: str, *kinds: str) -> float:
    collectives = report["compiled_step"]["collectives"]
    return sum(c["payload_bytes"] for c in collectives if c["kind"] in kinds and axis in c["axes"])


@pytest.mark.tpu
def test_parameters_of_a_device_are_what_the_shardings_give_it(report):
    step = report["compiled_step"]
    assert step["mesh"] == {"data": 2, "fsdp": 2, "sequence": 1, "tensor": 1}
    assert step["devices"] == 4
    held = 4 * sum(math.prod(parameter["device_shape"]) for parameter in report["sharding"])
    memory = step["memory_bytes"]
    assert memory["parameters"] == held < 0.51 * 4 * report["parameters"]
    # Layouts pad; the batch is small beside the state.
    assert held + memory["optimizer"] <= memory["arguments"] < 1.2 * (held + memory["optimizer"])


@pytest.mark.tpu
def test_memory_adds_up_and_fits(report):
    memory = report["compiled_step"]["memory_bytes"]
    parts = ("arguments", "results", "temporaries", "code")
    assert memory["total"] == sum(memory[part] for part in parts)
    assert 0 < memory["left"] == memory["available"] - memory["total"]
    # The state is updated in place.
    assert memory["results"] < 0.01 * memory["arguments"]


@pytest.mark.tpu
def test_split_parameters_are_gathered_over_fsdp_alone(report):
    split = [p for p in report["sharding"] if "fsdp" in str(p["spec"])]
    count = sum(math.prod(parameter["shape"]) for parameter in split)
    # At least once in bfloat16; at most once in each pass, in float32.
    assert 2 * count <= payload(report, "fsdp", "all-gather") <= 8 * count
    assert payload(report, "data", "all-gather") == 0


@pytest.mark.tpu
def test_gradients_are_summed_over_data(report):
    summed = payload(report, "data", "all-reduce", "reduce-scatter")
    # Every gradient once, in bfloat16 or float32; that of the shared embedding has two parts.
    assert 2 * report["parameters"] <= summed <= 8 * report["parameters"]
    axes = {axis for c in report["compiled_step"]["collectives"] for axis in c["axes"]}
    assert axes == {"data", "fsdp"}


@pytest.mark.tpu
def test_gradients_of_layers_are_left_in_parts_before_they_are_summed_over_data(report):
    split = [p for p in report["sharding"] if "fsdp" in str(p["spec"]) and "layers" in p["name"]]
    count = sum(math.prod(parameter["shape"]) for parameter in split)
    assert 2 * count <= payload(report, "fsdp", "reduce-scatter") <= 5 * count
    over_data = [c for c in report["compiled_step"]["collectives"] if c["axes"] == ["data"]]
    # Half of them: the part of a device.
    assert count <= sum(c["payload_bytes"] for c in over_data) <= 2.5 * count


@pytest.mark.tpu
def test_gradients_of_layers_over_fsdp_alone_are_scattered_and_not_sent_round(compiler, capsys):
    """The compiler takes products of this size apart to send their pieces round in a ring."""
    flags = (
        *("--gin_file=gin/models/dynamic_base.gin", "--topology=v5e:2x4", "--json"),
        *("--gin.sharding.MeshConfig.data=1", "--gin.sharding.MeshConfig.fsdp=8"),
        *("--batch_size=64", "--encoder_length=512", "--decoder_length=16"),
        "--gin.architecture.StackConfig.num_layers=1",
        "--gin.architecture.ConvT5Config.vocab_size=256",
    )
    assert inspect.main(flags) == 0
    report = json.loads(capsys.readouterr().out)
    layers = [p for p in report["sharding"] if "layers" in p["name"] and "fsdp" in str(p["spec"])]
    count = sum(math.prod(parameter["shape"]) for parameter in layers)
    assert payload(report, "fsdp", "collective-permute") == 0
    # In bfloat16; the predictors of taps are small enough to be summed whole.
    assert 1.99 * count <= payload(report, "fsdp", "reduce-scatter") <= 2.2 * count


@pytest.mark.tpu
def test_operations_are_those_of_the_closed_form_and_little_more(report):
    step = report["compiled_step"]
    assert step["model_flops"] == report["training_flops_per_step"] / 4
    # No logit leaves the chip: the backward pass computes them again.
    table = max(math.prod(parameter["shape"]) for parameter in report["sharding"])
    logits = 2 * table * report["batch_size"] * report["decoder_length"] / 4
    # Elementwise work and the update come on top; they are small beside the output layer.
    assert 1.0 < step["flops"] / (step["model_flops"] + logits) < 1.1
    assert step["bytes_accessed"] > step["memory_bytes"]["arguments"]


@pytest.mark.tpu
def test_a_step_takes_at_least_what_its_tightest_limit_says(report):
    seconds = report["compiled_step"]["roofline_seconds"]
    limits = {name: seconds[name] for name in ("compute", "memory", "communication")}
    assert seconds["step"] == limits[seconds["bound_by"]] == max(limits.values()) > 0


@pytest.mark.tpu
@pytest.mark.nightly
def test_scanned_layers_cost_what_they_cost_one_by_one(compiler):
    def cost(scan_layers):
        update, name = inspect_command.read_step(
            [str(ROOT / MODEL)],
            [
                # Loops of two layers are unrolled.
                "architecture.StackConfig.num_layers=3",
                "architecture.ConvT5Config.vocab_size=256",
                f"architecture.ConvT5Config.scan_layers={scan_layers}",
            ],
        )
        flags = {"devices": 1, "batch_size": 4, "encoder_length": 64, "decoder_length": 32}
        step = compiled_step.Step(inspect_command.make_subject(name, update, flags))
        report = compiled_step.make_report(step, topology.load("v5e:1x1"))
        assert report.loops_counted
        return report.flops, report.bytes_accessed

    scanned, unrolled = cost(True), cost(False)
    assert scanned == pytest.approx(unrolled, rel=0.02)


FROZEN = {
    "none": (),
    "one part of all": ("/layers/.*/mlp/",),
    "each layer by its number": tuple(f"^encoder/layers/{i}/" for i in range(4)),
    "two of four": ("encoder/layers/[23]/",),
    "the last": ("^token_embedder", "encoder/layers/3/"),
}


def scanned_step(frozen) -> compiled_step.Step:
    update, name = inspect_command.read_step(
        [str(ROOT / MODEL)],
        ["architecture.StackConfig.num_layers=4", "architecture.ConvT5Config.scan_layers=True"],
    )
    flags = {"devices": 1, "batch_size": 4, "encoder_length": 64, "decoder_length": 32}
    update = dataclasses.replace(update, frozen=frozen)
    return compiled_step.Step(inspect_command.make_subject(name, update, flags))


@pytest.mark.parametrize("name", FROZEN)
def test_layers_are_counted_by_one_and_two_where_all_are_frozen_alike(name, monkeypatch):
    step = scanned_step(FROZEN[name])
    compiled = []

    def compile_few(step, plan, topology, waiting):
        compiled.append(
            (step.config.model.encoder.num_layers, plan.num_parameters() - plan.num_trained())
        )

    monkeypatch.setattr(compiled_step, "_compile", compile_few)
    monkeypatch.setattr(compiled_step, "_cost", lambda _: np.array([10.0, 10.0]) * len(compiled))
    here = types.SimpleNamespace(devices=jax.devices()[:1])
    cost = compiled_step._cost_of_all_layers(step, here)
    if name in ("two of four", "the last"):
        assert cost is None
        return
    assert cost == pytest.approx(40.0)
    plan = step.subject.plan(here.devices)
    held = plan.num_parameters() - plan.num_trained()
    assert compiled == [(1, held / 4), (2, held / 2)]


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--gin.sharding.MeshConfig.fsdp=3"],
            "needs a number of devices that is a multiple of 3.*there are 4",
        ),
        (["--batch_size=6"], "batch_size=6 must be a multiple of data"),
    ],
)
def test_what_does_not_divide_is_refused_before_compiling(compiler, argv, message):
    with pytest.raises(UserError, match=message):
        inspect.main([f"--gin_file={ROOT / MODEL}", "--topology=v5e:2x2", *argv])


@pytest.mark.tpu
@pytest.mark.parametrize(
    "name", ["v3:2x2", "v4:2x2x2", "v5e:4x4", "v5p:1x1x1", "v5e:1x1", "v6e:2x4", "tpu7x:2x2x1"]
)
def test_every_generation_has_devices_of_known_speed(compiler, name):
    found = topology.load(name)
    chips = math.prod(topology.parse(name).shape)
    assert len(found.devices) == chips * found.chip.cores_per_chip
    assert found.peak_flops is not None


@pytest.mark.tpu
@pytest.mark.parametrize("name", ["v4:2x2x1", "v5e:1x1", "v6e:1x1", "tpu7x:1x1x1"])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_kernels_compile_and_write_no_logits(compiler, name, biased):
    place = jax.sharding.SingleDeviceSharding(topology.load(name).devices[0])

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    target, source, heads = 512, 1024, 12

    def loss(query, key, value, bias, target_ids, source_ids):
        split = [a.reshape(*a.shape[:2], heads, -1) for a in (query, key, value)]
        return attend(*split, target_ids, source_ids, distance_bias=bias).astype(jnp.float32).sum()

    arrays = [array(1, target, 768), array(1, source, 768), array(1, source, 768)]
    bias = array(heads, target + source - 1, dtype=jnp.float32) if biased else None
    ids = [array(1, length, dtype=jnp.int32) for length in (target, source)]
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*arrays, bias, *ids).compile()
    assert compiled.as_text().count("tpu_custom_call") >= 1
    logits = 4 * heads * target * source
    assert compiled.memory_analysis().temp_size_in_bytes < logits / 4


MOST_KEYS = [
    ("v4:1x1x1", jnp.bfloat16, 16, 4096, 64),
    ("v5e:1x1", jnp.bfloat16, 128, 4096, 64),
    ("v5e:1x1", jnp.bfloat16, 16, 2560, 32),
    ("v4:1x1x1", jnp.bfloat16, 20, 2560, 16),
    ("v5e:1x1", jnp.float32, 60, 1280, 128),
]


@pytest.mark.tpu
@pytest.mark.parametrize("case", quick(MOST_KEYS, chosen=[MOST_KEYS[1], MOST_KEYS[4]]))
def test_the_most_keys_of_attention_kernels_fit_the_chip(compiler, case):
    name, dtype, target, source, head_dim = case
    place = jax.sharding.SingleDeviceSharding(topology.load(name).devices[0])

    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    rows = [array(1, length, 128 // head_dim, head_dim) for length in (target, source, source)]
    ids = [array(1, length, dtype=jnp.int32) for length in (target, source)]

    program = jax.jit(jax.grad(lambda *arrays: attend(*arrays).astype(jnp.float32).sum()))
    text = program.lower(*rows, *ids).compile().as_text()
    assert "tpu_custom_call" in text
    # One block of keys more and plain JAX computes them.
    rows[1:] = [array(1, source + 128, 128 // head_dim, head_dim)] * 2
    ids[1] = array(1, source + 128, dtype=jnp.int32)
    assert "tpu_custom_call" not in program.lower(*rows, *ids).as_text()


@pytest.mark.parametrize("name", ["v5e", "v5e:", "v9:2x2", "5e:2x2", "v5e:2x2 ", "v5e:2*2"])
def test_unknown_names_are_answered_with_those_that_are_valid(name):
    with pytest.raises(UserError, match=r"is not known\. .*v3:32x32.*v5p:16x16x24.*v5e:4x4"):
        topology.parse(name)


@pytest.mark.parametrize("name", ["v5e:3x3", "v5e:2x2x2", "v5p:2x2", "v5e:32x32", "v4:0x2x2"])
def test_shapes_that_no_slice_has_are_refused(name):
    with pytest.raises(UserError, match="is not a slice of"):
        topology.parse(name)


def test_without_libtpu_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"libtpu is not installed; add the extra tpu"):
        topology.load("v5e:2x2")


def example_report(**memory: int) -> compiled_step.StepReport:
    update, name = inspect_command.read_step([str(ROOT / MODEL)], [])
    devices = (types.SimpleNamespace(device_kind="TPU v5 lite"),) * 4
    parts = {"arguments": 7, "results": 1, "temporaries": 3, "code": 2, "available": 16}
    return compiled_step.StepReport(
        step=compiled_step.Step(inspect_command.make_subject(name, update, {"devices": 4})),
        topology=topology.Topology("v5e:2x2", topology.CHIPS["v5e"], devices),
        mesh={"data": 4, "fsdp": 1, "tensor": 1},
        flops=394e12,
        bytes_accessed=819e9,
        memory=compiled_step.Memory(parameters=4, optimizer=2, average=0, **(parts | memory)),
        traffic=(
            Traffic(kind="all-reduce", axes=("data",), count=3, payload_bytes=6e9, sent_bytes=9e9),
        ),
        compile_seconds=12.3,
        num_parameters=100,
    )


def test_text_names_the_limit_of_the_step_and_what_is_left_of_memory():
    text = example_report().as_text()
    assert "compute        2,000 ms  at 197 TFLOP/s in bfloat16, the bottleneck" in text
    assert "communication     45 ms  at 200 GB/s over all links" in text
    assert "of 16 B: fits, 3 B to spare" in text
    assert "all-reduce  data           3     6 GB              9 GB" in text
    assert "of scanned layers" not in text
    # The compiler has compiled it.
    reused = example_report(temporaries=10)
    assert "20 B  of 16 B: fits, because not all of it is live at the same time" in reused.as_text()
    assert reused.as_json()["memory_bytes"]["left"] == 0


def test_what_gpus_cannot_hold_is_refused_where_their_compiler_lets_it_pass():
    report = example_report()
    gpus = topology.Topology("h100:4", target.CHIPS["h100"], report.topology.devices)
    memory = types.SimpleNamespace(
        argument_size_in_bytes=40 * 2**30,
        output_size_in_bytes=41 * 2**30,
        alias_size_in_bytes=40 * 2**30,
        temp_size_in_bytes=19 * 2**30,
    )
    compiled_step._check_fits(memory, report.step, gpus)
    memory.temp_size_in_bytes *= 2
    compiled_step._check_fits(memory, report.step, report.topology)  # Its own compiler refuses.
    with pytest.raises(compiled_step.DoesNotFit, match=r"of h100:4: it needs 84.8 GB of 64"):
        compiled_step._check_fits(memory, report.step, gpus)


def test_text_says_where_the_compiler_counts_too_little():
    report = dataclasses.replace(example_report(), loops_counted=False)
    assert "each loop of scanned layers is counted as one layer" in report.as_text()


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.00G of 15.75G hbm.",
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (20.00G) exceeds available HBM (15.75G).",
    ],
)
def test_a_step_that_does_not_fit_is_said_to_by_how_much(message):
    report = example_report()
    error = compiled_step._explain(RuntimeError(message), report.step, report.topology)
    assert isinstance(error, UserError)
    assert "needs 21.5 GB of 16.9 GB, 4.56 GB too much; lower batch_size=128" in str(error)


def test_a_kernel_that_does_not_fit_the_chip_is_no_step_that_does_not():
    report = example_report()
    error = RuntimeError(
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack for "
        "%custom-call.1. Scoped allocation with size 16.06M and limit 16.00M exceeded."
    )
    assert compiled_step._explain(error, report.step, report.topology) is error
