"""The CPU computes where JAX could use GPUs or TPUs, but none is there."""

import importlib.metadata
import importlib.util
import os
import types

import jax
import pytest

from convt5.runtime import absent_accelerators

CUDA = ["xla_cuda13"]


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    """Returns what JAX_PLATFORMS is where these plugins, devices and variables are."""

    def call(
        plugins=(), libtpu=False, devices=(), pci=("0x1af4", "0x8086"), bus="pci", **variables
    ):
        for name in devices:
            (tmp_path / name).touch()
        (tmp_path / "pci").mkdir()
        for number, vendor in enumerate(pci):
            (tmp_path / "pci" / str(number)).mkdir()
            (tmp_path / "pci" / str(number) / "vendor").write_text(f"{vendor}\n")
        monkeypatch.setattr(absent_accelerators, "_NVIDIA", (f"{tmp_path}/nvidia0",))
        monkeypatch.setattr(absent_accelerators, "_TPU", (f"{tmp_path}/accel[0-9]*",))
        monkeypatch.setattr(absent_accelerators, "_PCI", f"{tmp_path}/{bus}")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: libtpu or None)
        monkeypatch.setattr(
            importlib.metadata,
            "entry_points",
            lambda group: [types.SimpleNamespace(name=name) for name in plugins],
        )
        kept = {
            k: v
            for k, v in os.environ.items()
            if k not in ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT", "TPU_LIBRARY_PATH")
        }
        monkeypatch.setattr(os, "environ", kept | variables)
        absent_accelerators.leave_out()
        return os.environ.get("JAX_PLATFORMS")

    return call


@pytest.mark.parametrize(
    "found",
    [
        {"plugins": CUDA},
        {"libtpu": True},
        {"plugins": CUDA, "libtpu": True},
        {"libtpu": True, "pci": []},
        {"plugins": CUDA, "pci": ["0x1ae0"]},  # Without libtpu no TPU can be used.
    ],
    ids=str,
)
def test_the_cpu_computes_where_no_accelerator_is(chosen, found):
    assert chosen(**found) == "cpu"


@pytest.mark.parametrize(
    "found",
    [
        {},
        {"plugins": CUDA, "devices": ["nvidia0"]},
        {"plugins": CUDA, "devices": ["nvidia0"], "libtpu": True},
        {"plugins": [*CUDA, "rocm"]},
        {"libtpu": True, "pci": ["0x8086", "0x1ae0"]},
        {"libtpu": True, "plugins": CUDA, "pci": ["0x1ae0"]},
        {"libtpu": True, "devices": ["accel0"]},
        {"libtpu": True, "bus": "missing"},
        {"libtpu": True, "JAX_FORCE_TPU_INIT": "1"},
    ],
    ids=str,
)
def test_jax_decides_where_an_accelerator_may_be(chosen, found):
    assert chosen(**found) is None


def test_what_the_user_has_set_stays(chosen):
    assert chosen(libtpu=True, JAX_PLATFORMS="tpu,cpu") == "tpu,cpu"


def test_jax_is_told_where_it_was_imported_before(chosen, monkeypatch):
    told = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    chosen(libtpu=True)
    assert told == {"jax_platforms": "cpu"}
