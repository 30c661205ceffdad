"""Steps are compiled once, on the record, and not again by the next process."""

import os
import pwd
import sys
import types

import commands
import jax
import jax.numpy as jnp
import pytest

from convt5.runtime import folders
from convt5.training import compilation

PRINT_CACHE = (
    "import jax; from convt5.training import compilation; compilation.enable_persistent_cache();"
    "print(jax.config.values['jax_compilation_cache_dir'])"
)

UNSET = {"jax_compilation_cache_dir": None, "jax_enable_compilation_cache": True}


class Device:
    def __init__(self, kind):
        self.device_kind = kind


def cache_folder(**environment):
    kept = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    done = commands.run(
        [sys.executable, "-c", PRINT_CACHE],
        env=kept | environment,
        check=True,
    )
    return done.stdout.strip()


def test_a_compiled_step_tells_its_operations():
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    y = jax.ShapeDtypeStruct((16, 4), jnp.float32)
    step = compilation.compile_step(jax.jit(jnp.dot), x, y)
    assert step.flops == 2 * 8 * 16 * 4
    assert step.seconds > 0
    assert step.call(jnp.ones(x.shape), jnp.ones(y.shape))[0, 0] == 16


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v4", 275e12),
        ("TPU7x", 2307e12 / 2),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA H100 NVL", 835e12),
    ],
)
def test_the_peak_is_that_of_all_devices_of_their_kind(kind, peak):
    assert compilation.peak_flops([Device(kind)] * 4) == 4 * peak


def test_the_peak_of_an_unknown_device_is_unknown():
    assert compilation.peak_flops(jax.devices("cpu")) is None
    for kind in ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA L400", "TPU v50"):
        assert compilation.peak_flops([Device(kind)]) is None


def test_compiled_programs_are_kept_in_the_users_cache(tmp_path):
    expected = tmp_path / "convt5" / "compiled"
    assert cache_folder(XDG_CACHE_HOME=str(tmp_path)) == str(expected)
    assert expected.stat().st_mode & 0o777 == 0o700


def test_programs_that_another_user_could_write_are_not_run(tmp_path, monkeypatch):
    folder = tmp_path / "convt5" / "compiled"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jax, "config", types.SimpleNamespace(values=UNSET))
    assert compilation.enable_persistent_cache() is None


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def unknown(number):
        raise KeyError(number)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(jax, "config", types.SimpleNamespace(values=UNSET))
    assert folders.user_cache() is None
    assert compilation.enable_persistent_cache() is None


@pytest.mark.slow
def test_jaxs_own_cache_settings_win(tmp_path):
    own = str(tmp_path / "own")
    assert cache_folder(JAX_COMPILATION_CACHE_DIR=own) == own
    assert cache_folder(JAX_ENABLE_COMPILATION_CACHE="false") == "None"


@pytest.mark.slow
def test_a_cache_that_cannot_be_made_is_done_without(tmp_path):
    (tmp_path / "file").write_text("")
    assert cache_folder(XDG_CACHE_HOME=str(tmp_path / "file")) == "None"
