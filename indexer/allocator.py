"""How the C library keeps freed memory: by default it keeps what a burst of messages took, in an arena per thread.

Two arenas are enough for one event loop, its ZMQ thread and the store's; arrays of some megabytes (tables that have
grown, columns that were flushed) are given back the moment they are freed. glibc only; elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes

MMAP_THRESHOLD, TRIM_THRESHOLD, ARENA_MAX = -3, -1, -8  # from malloc.h
LARGE_BYTES = 4 << 20  # above what one query or one batch works in: to map and unmap those anew would cost more
ARENAS = 2


def tune_allocator() -> None:
    """Once, before there are threads."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(MMAP_THRESHOLD, LARGE_BYTES)
        library.mallopt(TRIM_THRESHOLD, 16 * LARGE_BYTES)  # `give_memory_back` goes below that
        library.mallopt(ARENA_MAX, ARENAS)


def give_memory_back() -> None:
    """Return what is free inside the arenas, too. Cost: milliseconds, in which other threads may wait for memory."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)
