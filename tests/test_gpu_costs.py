"""Operators by the compiler of GPUs, where JAX's plugin for CUDA is installed."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

from convt5.errors import UserError
from convt5.gpu import operator_costs, target

ROOT = pathlib.Path(__file__).resolve().parents[1]
has_plugin = importlib.util.find_spec("jax_plugins") is not None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--taps", "3", "0"], "--taps=0 must be at least 1"),
        (["--gpu=h10"], "gpu='h10' is none of a100, h100. Did you mean h100"),
    ],
)
def test_wrong_flags_are_told(flags, message):
    with pytest.raises(UserError, match=message):
        operator_costs.main(flags)


def test_without_the_plugin_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="add the extra gpu"):
        target.load("h100")


@pytest.mark.slow
@pytest.mark.skipif(not has_plugin, reason="needs the extra gpu: JAX's plugin for CUDA")
@pytest.mark.parametrize("gpu", target.NAMES)
def test_no_products_of_taps_are_written(gpu):
    """In a process of its own, which computes on the CPU from then on."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "convt5.gpu.operator_costs", f"--gpu={gpu}"),
            *("--taps", "7", "--dilations", "1"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    header, _, *lines = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()
    )
    found = [dict(zip(header, line, strict=True)) for line in lines]
    assert [row["operator"] for row in found] == [kind for kind, _ in operator_costs.KINDS]
    for row in found:
        # The least is 1, or 1.5 where inputs are read again for the gradients. Slopes of a kernel
        # per channel are as large as the input.
        per_channel = row["operator"] == "dynamic" and row["H"] == "768"
        assert float(row["forward"]) < 1.5
        assert float(row["both"]) < (3 if per_channel else 2)
