"""What GPUs did during a measurement, from `nvidia-smi --query-gpu=... --format=csv -l 1` as it was recorded.

Columns are found by their names, so any query will do; units in cells ("131724 MiB") are dropped. Lines that
are no samples (a message of the driver, a line cut off at the end) are left out.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bringup.bench import percentile

QUERY = (
    "timestamp,index,utilization.gpu,memory.used,memory.total,power.draw,temperature.gpu,clocks.sm,"
    "clocks_event_reasons.active"
)
"""What to ask for: all that `summarise` knows."""
IDLE_REASON = 0x1
"""The throttle reason that only says the GPU has nothing to do."""

_COLUMNS = {
    "index": "index",
    "utilization.gpu": "utilisation",
    "memory.used": "used_mib",
    "memory.total": "total_mib",
    "power.draw": "power_w",
    "temperature.gpu": "temperature_c",
    "clocks.sm": "clock_mhz",
    "clocks.current.sm": "clock_mhz",
    "clocks_event_reasons.active": "reasons",
    "clocks_throttle_reasons.active": "reasons",
}


@dataclass(frozen=True)
class GpuUse:
    """One GPU over a measurement. None: the column was not asked for. `throttled_percent`: share of samples
    in which something else than idleness held the clocks down; `free_gib`: what was left at the fullest
    moment.
    """

    index: int
    samples: int
    used_gib_most: float | None
    free_gib: float | None
    power_w: float | None
    temperature_c_most: float | None
    clock_mhz_p10: float | None
    throttled_percent: float | None


def parse(text: str) -> list[dict[str, float]]:
    """Samples by our names for their columns."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    names: list[str | None] = []
    samples = []
    for row in rows:
        if any(_plain(cell) in _COLUMNS for cell in row):
            names = [_COLUMNS.get(_plain(cell)) for cell in row]
        elif names and len(row) == len(names) and (sample := _sample(names, row)):
            samples.append(sample)
    return samples


def _plain(cell: str) -> str:
    return cell.partition("[")[0].strip()


def _sample(names: Sequence[str | None], row: Sequence[str]) -> dict[str, float] | None:
    """A line's numbers; None when a cell is none ("[N/A]" is left out, "ERR!" makes a bad line)."""
    sample: dict[str, float] = {}
    for name, cell in zip(names, row, strict=True):
        if name is None or cell.startswith("["):
            continue
        word = cell.split(" ")[0]
        try:
            sample[name] = float(int(word, 16)) if word.startswith("0x") else float(word)
        except ValueError:
            return None
    return sample


def summarise(samples: Iterable[Mapping[str, float]]) -> list[GpuUse]:
    """One summary a GPU, in the order of their indices; a record without an index is one GPU's."""
    by_gpu: dict[int, list[Mapping[str, float]]] = {}
    for sample in samples:
        by_gpu.setdefault(int(sample.get("index", 0)), []).append(sample)
    return [_use(index, found) for index, found in sorted(by_gpu.items())]


def _use(index: int, found: Sequence[Mapping[str, float]]) -> GpuUse:
    def values(name: str) -> list[float]:
        return [sample[name] for sample in found if name in sample]

    used, total, clocks, reasons = (
        values(name) for name in ("used_mib", "total_mib", "clock_mhz", "reasons")
    )
    held = [reason for reason in reasons if int(reason) & ~IDLE_REASON]
    return GpuUse(
        index=index,
        samples=len(found),
        used_gib_most=max(used) / 1024 if used else None,
        free_gib=(max(total) - max(used)) / 1024 if used and total else None,
        power_w=statistics.fmean(power) if (power := values("power_w")) else None,
        temperature_c_most=max(values("temperature_c"), default=None),
        clock_mhz_p10=percentile(clocks, 0.1) if clocks else None,
        throttled_percent=100 * len(held) / len(reasons) if reasons else None,
    )
