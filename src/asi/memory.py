"""How the process keeps its memory: the C library's default costs a tenth of a training step and more."""

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's mallopt
GENEROUS = 2**31 - 1  # the largest value that it takes
PAD = 2**26


def keep_freed_memory() -> None:
    """Let the process reuse memory that it frees instead of giving it back, where the C library can be told so.

    Training allocates and frees blocks of megabytes all the time. By default each is mapped anew, and the first touch
    of each of its pages costs.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library has another way, or needs none
        return
    for setting, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, GENEROUS), (M_TOP_PAD, PAD)):
        mallopt(ctypes.c_int(setting), ctypes.c_int(value))
