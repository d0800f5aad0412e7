"""Every bench answers `--help` before it does anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bringup import ROOT

LIMIT_S = 120
RUNNABLE = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "bench").rglob("*.py")
    if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
)


def test_there_are_benches() -> None:
    assert len(RUNNABLE) > 10


@pytest.mark.parametrize("path", RUNNABLE, ids=str)
def test_a_bench_says_what_it_does_and_how_it_is_called(path: object) -> None:
    module = str(path).removesuffix(".py").replace("/", ".").removesuffix(".__main__")
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    shown = done.stdout + done.stderr
    assert "Traceback" not in shown
    assert len(shown) > 40
    assert done.returncode == 0, shown
