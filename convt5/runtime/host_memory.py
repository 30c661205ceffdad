"""What the C library does with memory that was freed, where the processor computes.

Nothing heavy is imported here.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_OWN_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_")


def keep_freed() -> bool:
    """Has this process keep what it frees; returns whether it does so.

    A step allocates its temporaries as a whole, hundreds of MB for a tiny model. By default glibc
    returns them to the system after each step, which maps and clears every page anew: a fifth
    of the processor time. Afterwards the process keeps the most memory that it ever held.

    Nothing changes with an accelerator, with another C library, or where environment variables
    set malloc up. It must be called before JAX starts its threads.
    """
    set_up = any(name.startswith(_OWN_SETTINGS) for name in os.environ)
    if set_up or platform.libc_ver()[0] != "glibc" or not _processor_computes():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    # One arena, as the others cannot hold more than 64 MB; no mapping for a single piece; and no
    # return of the end of the heap.
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1))
    return all(mallopt(*setting) == 1 for setting in settings)


def _processor_computes() -> bool:
    """Whether JAX will find no accelerator, without importing it."""
    chosen = os.environ.get("JAX_PLATFORMS")
    if chosen:
        return chosen.split(",")[0] == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and importlib.util.find_spec("libtpu") is None
