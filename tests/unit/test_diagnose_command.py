"""`invoke diagnose` and `invoke failures.add` as they are typed: exit codes, one JSON object, wrong uses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bringup import ROOT, evidence, failures
from bringup.errors import Exit

LIMIT_S = 300
FULL = "OSError: [Errno 28] No space left on device"
KEYS = {"cause", "severity", "confidence", "lines", "meaning", "check", "remedy", "runbook", "sources"}


def _invoke(*words: str, text: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("invoke")), *words],
        cwd=ROOT,
        input=text or b"",
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )


def _bundle() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in (("node/dmesg", b"calm\n"), ("node/server.log", f"start\n{FULL}\n".encode())):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


@pytest.mark.parametrize("words", [("-",), ("--log", "-"), ("--log=-",), ()])
def test_a_bundle_on_standard_input_gives_one_json_object_and_exit_4(words: tuple[str, ...]) -> None:
    done = _invoke("diagnose", *words, "--json", text=_bundle())
    data = json.loads(done.stdout)
    assert done.returncode == Exit.FAILED
    assert data["schema_version"] == 1
    first = data["findings"][0]
    assert first["cause"] == "disk-full"
    assert set(first) >= KEYS
    assert first["lines"] == [{"source": "stdin:node/server.log", "number": 2, "text": FULL}]


def test_a_calm_log_is_exit_0_and_no_finding(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("INFO: Uvicorn running on http://0.0.0.0:8000\n")
    done = _invoke("diagnose", str(log), "--json")
    assert (done.returncode, json.loads(done.stdout)["findings"]) == (Exit.DONE, [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("diagnose", "/nope/server.log"), "/nope/server.log"),
        (("diagnose", "--explain", "disk-fool"), 'Did you mean "disk-full"'),
        (("failures.add", "Bad Name", "--line", "x y z"), "is not a name"),
        (
            ("failures.add", "flux-empty", "--line", "flux capacitor is empty", "--area", "garden"),
            "needs an answer",
        ),
    ],
)
def test_a_wrong_use_is_exit_2_says_what_to_do_and_writes_nothing(words: tuple[str, ...], said: str) -> None:
    before = sorted(path.name for path in failures.FOLDER.iterdir())
    done = _invoke(*words)
    assert done.returncode == Exit.USAGE, done.stderr
    assert said in (done.stderr + done.stdout).decode()
    assert sorted(path.name for path in failures.FOLDER.iterdir()) == before


def _first_line(content: bytes) -> tuple[str, int]:
    reading = evidence.read([("log", io.BytesIO(content))], failures.library())
    hit = next(hits.kept()[0] for pattern, hits in reading.hits.items() if "No space left" in pattern)
    return hit.text, hit.number


def test_journal_export_is_read_with_text_and_binary_fields() -> None:
    head = b"__REALTIME_TIMESTAMP=1\n_SYSTEMD_UNIT=sglang.service\n"
    text, number = _first_line(head + b"MESSAGE=" + FULL.encode() + b"\n\n")
    assert (text, number) == (f"MESSAGE={FULL}", 3)
    message = f"\x1b[31m{FULL}\x1b[0m".encode()
    text, _ = _first_line(head + b"MESSAGE\n" + len(message).to_bytes(8, "little") + message + b"\n\n")
    assert FULL in text


def test_a_log_cut_in_a_character_and_in_a_line_is_read() -> None:
    text, number = _first_line("start \N{EURO SIGN}".encode()[:-1] + b"\n" + FULL.encode()[:-3])
    assert (text, number) == (FULL[:-3], 2)
