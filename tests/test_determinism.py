"""`train --deterministic` asks XLA for programs that repeat on GPUs, before JAX starts."""

import os
import sys

import commands
import pytest

from convt5 import errors, train
from convt5.runtime import determinism

BOTH = "--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", BOTH),
        ("--xla_dump_to=/tmp/x", f"--xla_dump_to=/tmp/x {BOTH}"),
        (BOTH, BOTH),
        (
            "--xla_gpu_deterministic_ops",
            "--xla_gpu_deterministic_ops --xla_gpu_autotune_level=0",
        ),
    ],
)
def test_flags_are_added_to_those_that_are_there(given, expected):
    environ = {"XLA_FLAGS": given}
    determinism.require(environ)
    assert environ["XLA_FLAGS"] == expected
    assert determinism.is_required(environ)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--xla_gpu_deterministic_ops=false", "XLA_FLAGS has --xla_gpu_deterministic_ops=false"),
        ("--xla_gpu_autotune_level=4", "needs --xla_gpu_autotune_level=0"),
        ("/etc/xla.flags", "names a file"),
    ],
)
def test_flags_that_say_the_opposite_are_refused(given, message):
    environ = {"XLA_FLAGS": given}
    with pytest.raises(errors.UserError, match=message):
        determinism.require(environ)
    assert environ == {"XLA_FLAGS": given}


def test_the_run_records_and_tells_it():
    plain, exact = {}, {"XLA_FLAGS": BOTH}
    assert determinism.record("A = 1\n", plain) == "A = 1\n"
    assert determinism.record("A = 1\n", exact) == "# --xla_gpu_deterministic_ops\nA = 1\n"
    assert "without --deterministic" in (determinism.describe("gpu", plain) or "")
    assert "bit for bit" in (determinism.describe("gpu", exact) or "")
    assert determinism.describe("cpu", plain) is determinism.describe("tpu", exact) is None


def test_the_flag_reaches_xla_before_any_host_is_joined(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")

    def joined(flags):
        assert flags.deterministic
        assert os.environ["XLA_FLAGS"] == BOTH
        raise errors.UserError("far enough")

    monkeypatch.setattr(train.multi_host, "join", joined)
    with pytest.raises(errors.UserError, match="far enough"):
        train.main(["--deterministic", "--gin_file=gin/runs/quickstart.gin"])


@pytest.mark.slow
def test_the_compiler_knows_the_flags():
    """XLA ends a process whose XLA_FLAGS it does not know."""
    code = "import jax.numpy as jnp; print(float(jnp.ones(2).sum()))"
    environ = {**os.environ, "XLA_FLAGS": BOTH, "JAX_PLATFORMS": "cpu"}
    done = commands.run([sys.executable, "-c", code], env=environ, timeout=120)
    assert done.stdout == "2.0\n", done.stderr
