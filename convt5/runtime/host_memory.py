"""Makes the C library keep freed memory when JAX computes on the CPU.

Imports nothing heavy.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import pathlib
import platform

# Constants of glibc's malloc.h and Linux's mman.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_MADV_HUGEPAGE = 14
_OWN_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_")
_OVERCOMMIT = pathlib.Path("/proc/sys/vm/overcommit_memory")


def keep_freed() -> bool:
    """Makes this process keep freed memory, in huge pages; returns whether it does.

    A step allocates its temporaries together, hundreds of MB for a tiny model. By default glibc
    returns them to the system after each step, and the next one maps and clears every page anew: a
    fifth of the CPU time. With this, the process keeps the most memory it ever held. With 4 KiB
    pages, strided reads of a matrix miss the TLB at each element: another fifth.

    Nothing changes with an accelerator, with another C library, or if environment variables
    configure malloc. Must be called before JAX starts its threads.
    """
    set_up = any(name.startswith(_OWN_SETTINGS) for name in os.environ)
    if set_up or platform.libc_ver()[0] != "glibc" or not _processor_computes():
        return False
    library = ctypes.CDLL(None)
    # One arena, because others cannot exceed 64 MB; no separate mappings; and never return the end
    # of the heap.
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))
    kept = all(library.mallopt(*setting) == 1 for setting in settings)
    if kept and not _counts_untouched_memory():
        _ask_for_large_pages(library)
    return kept


def _counts_untouched_memory() -> bool:
    """Returns whether the system reserves memory on allocation, before it is touched."""
    return _OVERCOMMIT.exists() and _OVERCOMMIT.read_text().strip() == "2"


def _ask_for_large_pages(library: ctypes.CDLL) -> None:
    """Requests huge pages of 2 MiB for the future heap.

    glibc does so only if an environment variable was set at start. Here the heap grows at once by
    half of the machine's memory, which is not touched, and never shrinks. If the system has no huge
    pages, or refuses such a heap, nothing changes.
    """
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.free.argtypes, library.free.restype = [ctypes.c_void_p], None
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    page = os.sysconf("SC_PAGE_SIZE")
    size = os.sysconf("SC_PHYS_PAGES") // 2 * page
    heap = library.malloc(size)
    if heap is not None:
        start = -(-heap // page) * page
        library.madvise(start, (heap + size - start) // page * page, _MADV_HUGEPAGE)
        library.free(heap)


def _processor_computes() -> bool:
    """Returns whether JAX will find no accelerator, without importing it."""
    chosen = os.environ.get("JAX_PLATFORMS")
    if chosen:
        return chosen.split(",")[0] == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and importlib.util.find_spec("libtpu") is None
