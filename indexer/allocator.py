"""How the C library keeps freed memory: by default it keeps what a burst of messages took, in an arena per thread.

One arena is enough for an event loop, its ZMQ thread and the store's, and the only one whose end is given back: of
others, as much as the trim threshold stayed, 13 to 20 MB after a burst. Arrays of some megabytes (tables that have
grown, columns that were flushed) are given back the moment they are freed. glibc only; elsewhere nothing happens.

No huge pages: numpy asks for them in arrays of 4 MB and more, and then whoever touches such a page first waits until
2 MB are cleared, 9 ms on a virtual machine. A table that grows touches one after the other. With usual pages no batch
takes longer than 2 ms, all of them together a quarter less, and look-ups as long as before.
"""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD, TRIM_THRESHOLD, ARENA_MAX = -3, -1, -8  # from malloc.h
PR_SET_THP_DISABLE = 41  # from linux/prctl.h
LARGE_BYTES = 4 << 20  # above what one query or one batch works in: to map and unmap those anew would cost more
ARENAS = 1


def tune_allocator() -> None:
    """Once, before there are threads. Processes that are started later have no huge pages, either."""
    library = ctypes.CDLL(None)
    if hasattr(library, "prctl"):
        library.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    if hasattr(library, "mallopt"):
        library.mallopt(MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(TRIM_THRESHOLD, 16 * LARGE_BYTES)  # `give_memory_back` goes below that
        library.mallopt(ARENA_MAX, ARENAS)


def give_memory_back() -> None:
    """Return what is free inside the arena, too. Cost: milliseconds, in which other threads may wait for memory."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
