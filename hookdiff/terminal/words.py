"""Times, speeds and sizes as texts: one spelling for commands, logs, bars, reports and notebooks."""


def duration(seconds: float) -> str:
    """Return a time: "12 s", "5:24" for minutes and seconds, "1:05:24" from an hour on, "12 d" from 100 hours on."""
    if not 0 <= seconds < 1e12:  # a damaged file may hold such a time
        return "unknown"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24:,} d"
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}" if minute else f"{second} s"


def in_words(seconds: float) -> str:
    """Return a rough time, such as a forecast or an age: "45 s", "3 min", "2.5 h" or "12 d"."""
    if not 0 <= seconds < 1e12:
        return "unknown"
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    if seconds < 6000:
        return f"{round(seconds / 60)} min"
    return f"{_short(seconds / 3600)} h" if seconds < 172800 else f"{_short(seconds / 86400)} d"


def rate(per_second: float, unit: str = "img/s") -> str:
    """Return a speed: "1,234 img/s", or with two digits below 10."""
    return f"{_short(per_second)} {unit}"


def byte_size(num_bytes: float) -> str:
    """Return a size in memory or on disk: "1.5 GiB", "512 MiB", "2.4 KiB" or "96 bytes"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            number = num_bytes / size
            return f"{number:,.1f} {unit}" if number < 10 or unit == "GiB" else f"{number:,.0f} {unit}"
    return f"{num_bytes:.0f} bytes"


def step_label(step: int, total: int | None) -> str:
    """Return where a run is: "step 1,680", or with its length "step 1,680/10,000"."""
    return f"step {step:,}" if total is None else f"step {step:,}/{total:,}"


def _short(value: float) -> str:
    return f"{value:.2g}" if value < 9.95 else f"{value:,.0f}"
