"""How the C library keeps memory that was freed, where the processor computes.

Nothing heavy is imported here.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import pathlib
import platform

# Of glibc's malloc.h, and of Linux's mman.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_MADV_HUGEPAGE = 14
_OWN_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_")
_OVERCOMMIT = pathlib.Path("/proc/sys/vm/overcommit_memory")


def keep_freed() -> bool:
    """Has this process keep what it frees, in large pages; returns whether it keeps it.

    A step allocates its temporaries as a whole, hundreds of MB for a tiny model. By default glibc
    returns them to the system after each step, which maps and clears every page anew: a fifth
    of the processor time. Afterwards the process keeps the most memory that it ever held. In pages
    of 4 KiB, what reads a matrix against its order misses a page at each element: another fifth.

    Nothing changes with an accelerator, with another C library, or where environment variables
    set malloc up. It must be called before JAX starts its threads.
    """
    set_up = any(name.startswith(_OWN_SETTINGS) for name in os.environ)
    if set_up or platform.libc_ver()[0] != "glibc" or not _processor_computes():
        return False
    library = ctypes.CDLL(None)
    # One arena, as the others cannot hold more than 64 MB; no mapping for a single piece; and
    # never a return of the end of the heap.
    settings = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1))
    kept = all(library.mallopt(*setting) == 1 for setting in settings)
    if kept and not _counts_untouched_memory():
        _ask_for_large_pages(library)
    return kept


def _counts_untouched_memory() -> bool:
    """Whether the system takes what is asked for from what others can have, before it is used."""
    return _OVERCOMMIT.exists() and _OVERCOMMIT.read_text().strip() == "2"


def _ask_for_large_pages(library: ctypes.CDLL) -> None:
    """Has the system use pages of 2 MiB, or what it calls huge, for the heap that is to come.

    glibc asks for them only if an environment variable said so when the process began. Here the
    heap grows at once by half of the machine's memory, none of which is touched, and shrinks no
    more. Where the system has no such pages, or grants no such heap, it stays as it is.
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
