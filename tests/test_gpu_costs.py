"""Operators by the compiler of GPUs, where JAX's plugin for CUDA is installed."""

import importlib.util
import json
import math
import pathlib
import sys

import commands
import gpu_operator_costs as operator_costs
import pytest

from convt5.analysis import gpu_target as target
from convt5.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[1]
needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None,
    reason="needs the extra gpu: JAX's plugin for CUDA",
)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--taps", "3", "0"], "--taps=0 must be at least 1"),
        (
            ["--topology=h10:1"],
            "topology='h10:1' is not known. GPUs are a100 or h100, and how many",
        ),
        (["--topology=h100:3"], "topology='h100:3' is not known"),
    ],
)
def test_wrong_flags_are_told(flags, message):
    with pytest.raises(UserError, match=message):
        operator_costs.main(flags)


def test_without_the_plugin_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="add the extra gpu"):
        target.load("h100:1")


def told(*command: str) -> str:
    """Returns what a command prints, in a process of its own, which then computes on the CPU."""
    done = commands.run(
        [sys.executable, *command],
        cwd=ROOT,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@needs_plugin
def test_parameters_in_parts_are_gathered_and_gradients_scattered():
    report = json.loads(
        told(
            *("-m", "convt5.inspect"),
            "--gin_file=gin/models/dynamic_tiny.gin",
            *("--topology=h100:4", "--json", "--gin.sharding.MeshConfig.fsdp=4"),
            *("--batch_size=16", "--encoder_length=64", "--decoder_length=32"),
        )
    )
    step = report["compiled_step"]
    assert (step["devices"], step["topology"]) == (4, "h100:4")
    split = [p for p in report["sharding"] if "fsdp" in str(p["spec"])]
    count = sum(math.prod(parameter["shape"]) for parameter in split)
    moved = {c["kind"]: c["payload_bytes"] for c in step["collectives"] if c["axes"] == ["fsdp"]}
    # At least once in bfloat16; at most once in each pass, in float32.
    assert 2 * count <= moved["all-gather"] <= 8 * count
    assert moved["reduce-scatter"] > 0
    assert 0.8 < step["flops"] / step["model_flops"] < 1.5


@pytest.mark.slow
@needs_plugin
@pytest.mark.parametrize("gpu", list(target.CHIPS))
def test_no_products_of_taps_are_written(gpu):
    flags = (f"--topology={gpu}:1", "--taps", "7", "--dilations", "1")
    header, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in told("docs/tools/gpu_operator_costs.py", *flags).splitlines()
    )
    found = [dict(zip(header, line, strict=True)) for line in lines]
    assert [row["operator"] for row in found] == [kind for kind, _ in operator_costs.KINDS]
    for row in found:
        # The least is 1, or 1.5 where inputs are read again for the gradients. Slopes of a kernel
        # per channel are as large as the input.
        per_channel = row["operator"] == "dynamic" and row["H"] == "768"
        assert float(row["forward"]) < 1.5
        assert float(row["both"]) < (3 if per_channel else 2)
