"""Hardware queries: instruction sets, GPU properties, memory and native dtypes; nothing else asks the hardware.

Nothing is asked at import; what was measured once in a process is kept.
"""

from ..machine import cpu_name, fingerprint, has_bfloat16, has_vnni, isa, versions, why_no_amx
from .device_choice import resolve, use_tf32, why_slow
from .measured_speed import bandwidth_for, busy_factor, last_level_cache, peak_flops, read_bandwidth, sync
from .memory import memory_available, mmap_large_blocks, peak_rss, reset_peak, resident_split, rss
from .processors import cpu_quota, fit_threads

__all__ = [
    "bandwidth_for",
    "busy_factor",
    "cpu_name",
    "cpu_quota",
    "fingerprint",
    "fit_threads",
    "has_bfloat16",
    "has_vnni",
    "isa",
    "last_level_cache",
    "memory_available",
    "mmap_large_blocks",
    "peak_flops",
    "peak_rss",
    "read_bandwidth",
    "reset_peak",
    "resident_split",
    "resolve",
    "rss",
    "sync",
    "use_tf32",
    "versions",
    "why_no_amx",
    "why_slow",
]
