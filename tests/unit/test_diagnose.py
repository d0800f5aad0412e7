"""From text to findings: formats, ranks, bursts, order, and what the answer looks like."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import tarfile
from pathlib import Path

import pytest
from rich.console import Console

from bringup import diagnose, evidence, failures, report, verdicts
from bringup.errors import UsageError
from bringup.verdicts import Context

FULL = "OSError: [Errno 28] No space left on device"


def _causes(text: str, context: Context | None = None) -> list[str]:
    return [finding.cause for finding in diagnose.of_text(text, context).findings]


@pytest.mark.parametrize(
    "text",
    [
        FULL,
        f"\x1b[31m{FULL}\x1b[0m",
        f" 10%|#   | 1/10 [00:01<00:09]\r 20%|##  | 2/10\r{FULL}\r",
        json.dumps({"level": "error", "msg": FULL}),
        json.dumps({"__REALTIME_TIMESTAMP": "1", "MESSAGE": FULL}),
        json.dumps({"MESSAGE": list(f"\x1b[31m{FULL}\x1b[0m".encode())}),
        'fatal: [n1]: FAILED! => {"msg": "Traceback:\\n  x\\n' + FULL + '"}',
        f"(Worker_TP3 pid=4211) ERROR 11-29 10:00:00 [core.py:1] {FULL}",
        FULL + "\r\nnext\r\n",
    ],
)
def test_a_line_is_found_in_whatever_it_is_wrapped(text: str) -> None:
    assert _causes(text) == ["disk-full"]


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\xfa broken utf-8 \xe2\x82", b"", b"\x00\x00", b"a" * 3_000_000]
)
def test_damaged_bytes_hide_nothing(damage: bytes, tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"start\n" + damage + b"\n" + FULL.encode() + b"\n" + damage)
    first = diagnose.of_paths([str(path)]).first
    assert first is not None
    assert first.cause == "disk-full"
    assert first.lines[0].number == 3


def test_a_log_from_a_windows_shell_is_read(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_bytes(b"\xff\xfe" + f"start\n{FULL}\n".encode("utf-16-le"))
    assert [item.cause for item in diagnose.of_paths([str(path)]).findings] == ["disk-full"]


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_compressed_logs_are_read(pack: object, tmp_path: Path) -> None:
    path = tmp_path / "server.log.x"
    path.write_bytes(pack(f"start\n{FULL}\n".encode()))  # type: ignore[operator]
    assert [item.cause for item in diagnose.of_paths([str(path)]).findings] == ["disk-full"]


def test_the_members_of_a_support_bundle_are_read_and_named(tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, data in (("node/ok.log", b"all well\n"), ("node/bad.log.gz", gzip.compress(FULL.encode()))):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    first = diagnose.of_paths([str(path)]).first
    assert first is not None
    assert first.cause == "disk-full"
    assert first.lines[0].source.endswith("bundle.tar.gz:node/bad.log.gz")


def test_what_cannot_be_read_is_said_for_all_paths_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        diagnose.of_paths([str(tmp_path / "a"), str(tmp_path / "b")])
    assert len(caught.value.problems) == 2
    assert int(caught.value.code) == 2


def test_a_damaged_archive_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "x.log.gz"
    path.write_bytes(gzip.compress(b"line\n" * 10_000)[:-30])
    with pytest.raises(UsageError, match=r"x\.log\.gz"):
        diagnose.of_paths([str(path)])


def test_line_numbers_hold_over_chunks(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    filler = "INFO nothing to see here, move along now\n" * 60_000
    path.write_text(filler + FULL + "\n")
    first = diagnose.of_paths([str(path)]).first
    assert first is not None
    assert first.lines[0].number == 60_001


def test_a_burst_is_one_line_with_its_count() -> None:
    text = "\n".join(
        f"NVRM: Xid (PCI:0000:38:00): 13, pid=7, name=x, Graphics Exception: ESR 0x{n:x}=0x1"
        for n in range(5_000)
    )
    first = diagnose.of_text(text).first
    assert first is not None
    assert first.cause == "gpu-app-fault"
    assert first.count == 5_000
    assert len(first.lines) == 1


def test_one_gpu_that_faults_under_many_programs_is_suspected() -> None:
    line = "NVRM: Xid (PCI:0000:38:00): 31, pid={}, name=python3, Ch 00000008, MMU Fault"
    one = diagnose.of_text("\n".join(line.format(7) for _ in range(9))).first
    many = diagnose.of_text("\n".join(line.format(pid) for pid in (7, 8, 9))).first
    assert one is not None
    assert many is not None
    assert not one.hardware_suspect
    assert many.hardware_suspect
    assert "suspect the GPU" in many.check


def test_repeated_words_of_the_command_line_are_no_evidence() -> None:
    text = "non-default args: {'watchdog_timeout': 300, 'x': 'Watchdog timeout'}"
    assert _causes(text) == []


def test_the_engine_is_guessed_from_the_log_and_the_context_wins() -> None:
    assert verdicts._with_engine(Context(), "vllm serve x\nvllm engine").engine == "vllm"
    assert verdicts._with_engine(Context(engine="sglang"), "vllm serve").engine == "sglang"
    assert verdicts._with_engine(Context(), "nothing").engine is None


def test_nothing_known_shows_what_is_unusual() -> None:
    diagnosis = diagnose.of_text(
        "INFO ok\nFATAL the flux capacitor exploded 1\nFATAL the flux capacitor exploded 2\n"
    )
    assert diagnosis.findings == ()
    assert int(diagnosis.exit) == 0
    assert [line.text for line in diagnosis.unusual] == ["FATAL the flux capacitor exploded 2"]


def test_notes_alone_are_nothing_found() -> None:
    diagnosis = diagnose.of_text("`torch_dtype` is deprecated! Use `dtype` instead!")
    assert [finding.severity for finding in diagnosis.findings] == ["note"]
    assert diagnosis.first is None
    assert int(diagnosis.exit) == 0


def test_json_has_a_schema_version_and_all_an_operator_needs() -> None:
    data = json.loads(json.dumps(diagnose.of_sources({"journal": FULL, "dmesg": ""}).as_json()))
    assert data["schema_version"] == 1
    assert set(data) == {"schema_version", "findings", "unusual", "read"}
    finding = data["findings"][0]
    assert {
        "cause",
        "severity",
        "confidence",
        "lines",
        "meaning",
        "check",
        "remedy",
        "runbook",
        "sources",
    } <= set(finding)
    assert finding["lines"] == [{"source": "journal", "number": 1, "text": FULL}]
    assert data["read"]["sources"] == ["journal", "dmesg"]
    assert int(diagnose.of_text(FULL).exit) == 4


def test_what_no_rule_knows_is_shown_as_it_is_and_no_cause() -> None:
    diagnosis = diagnose.of_text("INFO all is well\nFATAL error: the flux capacitor could not be charged")
    assert (diagnosis.findings, int(diagnosis.exit)) == ((), 0)
    assert [(line.number, line.text) for line in diagnosis.unusual] == [
        (2, "FATAL error: the flux capacitor could not be charged")
    ]


def test_live_nodes_give_the_findings_of_all_services_the_first_of_each_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        {
            "host": host,
            "service": "glm",
            "when": 0.0,
            "journal": [],
            "log": log,
            "error": error,
            "kernel": kernel,
        }
        for host, log, error, kernel in (
            ("n1", [FULL, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"], "", []),
            ("n2", [], "no service glm on this node", ["NVRM: Xid (PCI:0000:07:00): 79, pid=3, GPU lost"]),
        )
    ]
    code, found = report.show_crashes(rows, as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert (int(code), found) == (4, True)
    assert data["schema_version"] == 1
    assert [(item["host"], item["cause"]) for item in data["findings"]] == [
        ("n1", "disk-full"),
        ("n2", "gpu-fell-off-bus"),
        ("n1", "gpu-oom"),
    ]
    report.show_crashes(rows)
    assert "gpu-fell-off-bus" in capsys.readouterr().out


def test_explain_knows_every_cause_and_suggests_for_a_misspelt_one() -> None:
    assert diagnose.explain("disk-full").remedy
    with pytest.raises(UsageError, match='Did you mean "disk-full"'):
        diagnose.explain("disk-fool")


def test_the_terminal_shows_cause_lines_and_what_to_do() -> None:
    console = Console(file=io.StringIO(), width=200, no_color=True)
    diagnose.show(diagnose.of_text(f"[red]{FULL}[/red]\n`torch_dtype` is deprecated!"), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("disk-full", "text:1", "[red]", "Means", "Check", "Do", "Source", "Harmless: benign-noise"):
        assert part in shown


def test_hits_keep_the_first_and_last_lines_only() -> None:
    hits = evidence.Hits()
    for number in range(1_000):
        hits.add(evidence.Hit("s", number, number, "x"))
    kept = [hit.number for hit in hits.kept()]
    assert hits.count == 1_000
    assert kept[:2] == [0, 1]
    assert kept[-1] == 999
    assert len(kept) == evidence.FIRST_KEPT + evidence.LAST_KEPT


def _library(**parts: object) -> failures.Library:
    entry = {
        "title": "x",
        "area": "system",
        "meaning": "m",
        "check": "c",
        "remedy": "r",
        "samples": ["x"],
        "sources": ["https://example.org"],
    } | parts
    return failures.compile_library({"x": failures.Failure.model_validate(entry)})


def _found(library: failures.Library, text: str, context: Context | None = None) -> bool:
    reading = evidence.read([evidence.of_text("t", text)], library)
    return bool(verdicts.judge(reading, library, context or Context()))


def test_patterns_together_must_be_near_and_of_one_rank() -> None:
    library = _library(match=[{"all": ["alpha", "beta"], "within": 2, "same": "rank"}])
    assert _found(library, "[rank1] alpha\n[rank1] beta")
    assert not _found(library, "[rank1] alpha\n[rank2] beta")
    assert not _found(library, "[rank1] alpha\n\n\n\n[rank1] beta")


def test_a_line_can_rule_a_clause_out_near_it_or_anywhere() -> None:
    near = _library(match=[{"line": "alpha", "none": ["gamma"], "within": 1}])
    anywhere = _library(match=[{"line": "alpha", "none": ["gamma"]}])
    text = "alpha\n1\n2\n3\ngamma"
    assert _found(near, text)
    assert not _found(anywhere, text)
    assert not _found(near, "alpha gamma")


def test_a_look_alike_line_is_no_evidence() -> None:
    library = _library(match=[{"line": "alpha"}], benign=["alpha but fine"])
    assert not _found(library, "alpha but fine")
    assert _found(library, "alpha but fine\nalpha")


def test_a_clause_may_need_repetition() -> None:
    library = _library(match=[{"line": "alpha", "times": 3}])
    assert not _found(library, "alpha\nalpha")
    assert _found(library, "alpha\nalpha\nalpha")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("flux capacitor: cannot be charged", True),
        ("error while charging the flux capacitor", True),
        ("flux capacitor charged", False),
        ("INFO flux capacitor failed over, nothing to do", False),
        ("flux capacitor is missing, falling back to coal", False),
    ],
)
def test_a_subject_beside_a_word_of_trouble_is_evidence_and_a_notice_is_not(line: str, found: bool) -> None:
    assert _found(_library(match=[{"trouble": "flux capacitor", "confidence": 0.6}]), line) is found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("the flux capacitor lost its plutonium", True),
        ("no plutonium for the flux capacitor", True),
        ("the flux capacitor is fine", False),
        ("flux capacitor" + " and" * 60 + " plutonium", False),
        ("INFO plutonium for the flux capacitor", False),
    ],
)
def test_two_expressions_of_a_sentence_are_found_in_either_order(line: str, found: bool) -> None:
    assert _found(_library(match=[{"both": ["flux capacitor", "plutonium"]}]), line) is found


def test_a_guess_about_a_line_that_a_surer_cause_accounts_for_is_left_out() -> None:
    text = "python3[7]: OSError: [Errno 28] No space left on device: '/dev/shm/nccl-1' by nvme0n1"
    assert _causes(text) == ["shm-too-small"]
    guess = "nvme0n1: something unexpected went wrong"
    assert _causes(guess) == ["disk-io-error"]
    assert _causes(f"{text}\n{guess}") == ["shm-too-small", "disk-io-error"]


def test_engine_versions_and_facts_of_the_context_count() -> None:
    library = _library(match=[{"line": "alpha", "engine": ["sglang"], "versions": ">=0.5.13"}])
    assert _found(library, "alpha")
    assert _found(library, "alpha", Context(engine="sglang", engine_version="0.5.15.post1"))
    assert not _found(library, "alpha", Context(engine="sglang", engine_version="0.5.11"))
    assert not _found(library, "alpha", Context(engine="vllm"))
    needing = _library(match=[{"line": "alpha", "needs": {"nvswitch": True}}])
    assert not _found(needing, "alpha")
    assert _found(needing, "alpha", Context(nvswitch=True))
    assert _found(needing, "alpha", Context(facts={"nvswitch": True}))
