"""Commands on a processor keep the memory they free; nobody else's malloc is touched."""

import os
import pathlib
import platform
import sys

import commands
import pytest

from convt5.runtime import host_memory

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")

SETTINGS = [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]

STEPS = """
import resource, sys
from convt5.runtime import host_memory
assert host_memory.keep_freed() == (sys.argv[1] == "keeps")
import jax, jax.numpy as jnp
step = jax.jit(lambda x: jnp.sum((x[:, None] * x) @ x))
x = jnp.arange(3000, dtype=jnp.float32)
faults = []
for _ in range(60):
    step(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[-31])
"""


def page_faults(mode: str, **environment: str) -> int:
    kept = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    done = commands.run(
        [sys.executable, "-c", STEPS, mode],
        env=kept | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | environment,
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


LARGE_PAGES = """
import re, sys
from convt5.runtime import host_memory
assert host_memory.keep_freed()
before = open("/proc/self/statm").read().split()[1]
held = bytearray(b"1") * 2**28
with open("/proc/self/smaps_rollup") as file:
    print(re.search(r"AnonHugePages: +([0-9]+) kB", file.read())[1], before)
"""


def _has_large_pages() -> bool:
    file = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return file.exists() and "[never]" not in file.read_text()


@pytest.mark.slow
@glibc
@pytest.mark.skipif(not _has_large_pages(), reason="this system has no transparent huge pages")
def test_the_heap_is_of_large_pages_and_takes_no_memory_before_it_is_used():
    kept = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    done = commands.run(
        [sys.executable, "-c", LARGE_PAGES],
        env=kept | {"JAX_PLATFORMS": "cpu"},
        check=True,
    )
    large_kib, resident_pages = map(int, done.stdout.split())
    # The system may not find many pieces of that size; without being asked it looks for none.
    assert large_kib > 2**28 / 1024 / 8
    assert resident_pages * os.sysconf("SC_PAGE_SIZE") < 2**27


class Library:
    """Stands in for the C library: records which of its functions are called."""

    def __init__(self):
        self.called: list[str] = []

    def __getattr__(self, name):
        def function(*arguments):
            self.called.append(name)
            return 1

        setattr(self, name, function)
        return function


@glibc
@pytest.mark.parametrize(("policy", "asks"), [("0\n", True), ("1\n", True), ("2\n", False)])
def test_memory_is_not_taken_from_others_where_it_counts_untouched(
    monkeypatch, tmp_path, policy, asks
):
    for name in SETTINGS:
        monkeypatch.delenv(name)
    (tmp_path / "policy").write_text(policy)
    library = Library()
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(host_memory, "_OVERCOMMIT", tmp_path / "policy")
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: library)
    assert host_memory.keep_freed()
    assert library.called == ["mallopt"] * 3 + ["malloc", "madvise", "free"] * asks


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
    for name in SETTINGS:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    library = Library()
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: library)
    assert host_memory.keep_freed() == keeps
    assert library.called.count("mallopt") == len(library.called[:3]) == (3 if keeps else 0)
