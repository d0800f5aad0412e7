"""What GPUs did during a measurement is read from the driver's own listing."""

from __future__ import annotations

from pathlib import Path

import pytest

from bringup import gpusamples

CASES = Path(__file__).parents[1] / "cases" / "gpusamples"


def test_a_real_record_is_read() -> None:
    samples = gpusamples.parse((CASES / "h200-two-servers.csv").read_text())
    (use,) = gpusamples.summarise(samples)
    assert use.samples == 30
    assert use.used_gib_most == pytest.approx(128.6, abs=0.1)
    assert use.power_w == pytest.approx(150, abs=3)
    assert use.clock_mhz_p10 == 1980
    assert (use.free_gib, use.throttled_percent) == (None, None), "the record does not have these columns"


COMPOSED = """\
index, memory.used [MiB], memory.total [MiB], power.draw [W], temperature.gpu, clocks_event_reasons.active
0, 90000 MiB, 143771 MiB, 500.00 W, 70, 0x0000000000000001
1, 91000 MiB, 143771 MiB, [N/A], 71, 0x0000000000000008
Unable to determine the device handle for GPU1: Unknown Error
1, 131483 MiB, 143771 MiB, 520.00 W, 82, 0x0000000000000000
1, 131483 MiB, 143771 MiB, ERR!, 82, 0x0
0, 9
"""


def test_gpus_are_told_apart_and_bad_lines_left_out() -> None:
    first, second = gpusamples.summarise(gpusamples.parse(COMPOSED))
    assert (first.index, first.samples, first.throttled_percent) == (0, 1, 0)
    assert (second.index, second.samples, second.throttled_percent) == (1, 2, 50)
    assert second.free_gib == pytest.approx(12.0)
    assert (second.power_w, second.temperature_c_most) == (520, 82)


@pytest.mark.parametrize("text", ["", "no header\n1, 2\n", "index\n"])
def test_no_record_is_no_gpu(text: str) -> None:
    assert gpusamples.summarise(gpusamples.parse(text)) == []


def test_what_to_ask_for_is_what_is_known() -> None:
    asked = [name for name in gpusamples.QUERY.split(",") if name != "timestamp"]
    header = ", ".join(asked) + "\n" + ", ".join("0" for _ in asked) + "\n"
    (sample,) = gpusamples.parse(header)
    assert len(sample) == len(asked)
