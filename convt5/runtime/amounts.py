"""Formats times and counts for display: 3m 05s, 12.3k, 7.89 GB."""

import math

PREFIXES = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
"""Sizes and names of the prefixes of units, the largest first."""


def duration(seconds: float) -> str:
    """Formats a time: 8s, 3m 05s, 2h 07m, 4d 03h. NaN and infinity become "nan" and "inf"."""
    if not math.isfinite(seconds):
        return str(seconds)
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}m {seconds:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    return f"{hours // 24}d {hours % 24:02d}h"


def short_number(value: float, unit: str = "") -> str:
    """Formats a count: 312, 12.3k, 4.56M; with a unit 7.89 GB."""
    for size, prefix in PREFIXES:
        if abs(value) >= size:
            return f"{value / size:.3g}{' ' * bool(unit)}{prefix}{unit}"
    return f"{value:.3g}{' ' * bool(unit)}{unit}"
