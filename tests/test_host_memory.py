"""Commands on a processor keep the memory they free; nobody else's malloc is touched."""

import os
import platform
import subprocess
import sys

import pytest

from convt5.runtime import host_memory

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")

STEPS = """
import resource, sys
from convt5.runtime import host_memory
assert host_memory.keep_freed() == (sys.argv[1] == "keeps")
import jax, jax.numpy as jnp
step = jax.jit(lambda x: jnp.sum(jnp.sin(x[:, None] + jnp.cos(x)) @ x))
x = jnp.arange(3000, dtype=jnp.float32)
faults = []
for _ in range(60):
    step(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[-31])
"""


def page_faults(mode: str, **environment: str) -> int:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", STEPS, mode],
        env=kept | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


@glibc
@pytest.mark.slow
def test_pages_of_temporaries_are_mapped_once():
    # What the user has set stays, and maps the 36 MB of a step each time.
    left = page_faults("leaves", MALLOC_ARENA_TEST="8")
    assert left > 30 * 8000
    # The heap grows while more steps overlap than ever before.
    assert page_faults("keeps") < left / 10


@glibc
@pytest.mark.parametrize(
    ("environment", "keeps"),
    [
        ({"JAX_PLATFORMS": "cpu"}, True),
        ({"JAX_PLATFORMS": "cpu,cuda"}, True),
        ({"JAX_PLATFORMS": "tpu"}, False),
        ({"JAX_PLATFORMS": "tpu,cpu"}, False),
        ({"JAX_PLATFORMS": "cpu", "GLIBC_TUNABLES": "glibc.malloc.check=0"}, False),
        ({"JAX_PLATFORMS": "cpu", "MALLOC_TRIM_THRESHOLD_": "1"}, False),
    ],
)
def test_accelerators_and_settings_of_the_user_are_left_alone(monkeypatch, environment, keeps):
    asked = []

    class Library:
        def mallopt(self, setting, value):
            asked.append((setting, value))
            return 1

    for name in [n for n in os.environ if n.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: Library())
    assert host_memory.keep_freed() == keeps
    assert len(asked) == (3 if keeps else 0)
