"""Every rule finds its own fault and leaves the others' alone, on samples, public cases and whole logs."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from bringup import ROOT, diagnose, failuredocs, failures, logtext
from bringup.verdicts import Context

CASES = ROOT / "tests" / "cases" / "failures"
LOGS = ROOT / "tests" / "cases" / "logs"
CAUSES = failures.load()

FAILED_LOGS = {
    "f1-unknown-flag.log": "engine-flag-unknown",
    "f2-kv-e5m2.log": "fp8-kv-cache-unsupported",
    "f3-no-topk.log": "engine-flag-combination",
    "f4-port-in-use.log": "port-in-use",
    "f4a-deepgemm-full-warmup.log": "deepgemm-jit-warmup",
    "f5-mem-too-small.log": "kv-cache-too-small",
    "f7-mtp-weights-missing.log": "mtp-weights-missing",
    "f8-term-at-startup.log": None,  # ended by SIGTERM while importing: nothing was logged
    "f9-oom.log": "gpu-memory-already-used",
    "f10-kill-scheduler.log": "host-oom-suspected",
    "libcuda.txt": "libcuda-dev-link-missing",
    "link-no-libgcc.log": "host-compiler-missing",  # composed of the messages of such a start on an H200
    "h200-no-ninja.log": "jit-ninja-missing",  # the environment's ninja was not on the unit's PATH
    "h200-device-of-root.log": "gpu-count-mismatch",  # /dev/nvidia1 with mode 0644
    "r5-final-4-1-6.log": "engine-flag-combination",
}


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _first(text: str) -> str | None:
    first = diagnose.of_text(text).first
    return first.cause if first else None


def _text(row: dict[str, Any]) -> str:
    return "\n".join(row["evidence"])


def _read(kind: str, name: str) -> str:
    return gzip.decompress((LOGS / kind / f"{name}.gz").read_bytes()).decode("utf-8", "replace")


@pytest.mark.parametrize("cause", CAUSES)
def test_a_rule_finds_its_samples_and_no_other_rule_claims_them(cause: str) -> None:
    for sample in CAUSES[cause].samples:
        names = [finding.cause for finding in diagnose.of_text(sample).findings]
        allowed = {cause, *CAUSES[cause].explains}
        follow_ups = {name for name in names if CAUSES[name].kind == "follow-up"}
        notes = {name for name in names if CAUSES[name].severity == "note"}
        assert names[:1] == [cause], sample
        assert not set(names) - allowed - follow_ups - notes, sample


@pytest.mark.parametrize("cause", CAUSES)
def test_a_rule_says_what_to_do_and_where_that_is_known_from(cause: str) -> None:
    failure = CAUSES[cause]
    for text in (failure.meaning, failure.check, failure.remedy):
        assert (len(text) > 4 and text.endswith((".", ")"))) or len(text) > 15, text
    assert all(source.startswith("https://") for source in failure.sources)
    if failure.runbook:
        assert failures.runbook_exists(failure.runbook), f"{cause}: no runbook {failure.runbook}"


def test_every_area_has_its_place_in_the_order() -> None:
    assert {failure.area for failure in CAUSES.values()} <= set(failures.AREAS)


def test_public_cases_get_their_cause_first() -> None:
    rows = [row for row in _rows(CASES / "cases-open.jsonl") if row["cause"] != "benign"]
    verdicts = {row["id"]: (row["cause"], _first(_text(row))) for row in rows}
    wrong = {key: pair for key, pair in verdicts.items() if pair[1] not in (pair[0], None)}
    right = [key for key, (want, got) in verdicts.items() if want == got]
    assert len(right) >= 0.97 * len(rows), {k: v for k, v in verdicts.items() if v[0] != v[1]}
    assert len(wrong) <= 0.02 * len(rows), wrong


def test_harmless_public_lines_raise_no_alarm() -> None:
    alarms = {
        row["id"]: _first(_text(row)) for row in _rows(CASES / "cases-open.jsonl") if row["cause"] == "benign"
    }
    assert len(alarms) == 16
    assert not {key: cause for key, cause in alarms.items() if cause}


def test_collected_wordings_keep_their_cause() -> None:
    """Short lines of public reports; how many were found at first sight is in docs/diagnose.md."""
    rows = _rows(CASES / "wordings.jsonl")
    verdicts = {row["id"]: (row["cause"], _first(_text(row))) for row in rows}
    missed = {
        key: pair for key, pair in verdicts.items() if pair[1] != (None if pair[0] == "benign" else pair[0])
    }
    wrong = {key: pair for key, pair in missed.items() if pair[1] is not None}
    assert len(rows) >= 870
    assert len({row["cause"] for row in rows}) >= 110
    assert len(missed) <= 0.05 * len(rows), missed
    assert len(wrong) <= 0.02 * len(rows), wrong


def test_every_collected_wording_is_a_known_cause_with_a_source() -> None:
    rows = _rows(CASES / "wordings.jsonl")
    assert len({row["id"] for row in rows}) == len(rows)
    assert {row["cause"] for row in rows} - {"benign"} <= set(CAUSES)
    assert all(row["source"].startswith("https://") and row["evidence"] for row in rows)


@pytest.mark.parametrize("line", (CASES / "harmless-lines.txt").read_text(encoding="utf-8").splitlines())
def test_lines_of_healthy_machines_raise_no_alarm(line: str) -> None:
    assert _first(line) is None


@pytest.mark.parametrize("name", sorted(path.stem for path in (LOGS / "healthy").glob("*.gz")))
def test_whole_logs_of_healthy_servers_raise_no_alarm(name: str) -> None:
    diagnosis = diagnose.of_text(_read("healthy", name))
    assert diagnosis.first is None, diagnosis.first
    assert int(diagnosis.exit) == 0


@pytest.mark.parametrize("name", FAILED_LOGS)
def test_whole_logs_of_failed_servers_give_the_true_cause_first(name: str) -> None:
    assert _first(_read("failed", name)) == FAILED_LOGS[name]


SELF_KILLED = """\
[2026-11-29 20:01:36] Received sigquit from a child process. It usually means the child failed.
Killed
systemd[1]: llm@glm.service: Main process exited, code=killed, status=9/KILL
server exited with code 137
"""
KERNEL_KILLED = "kernel: Out of memory: Killed process 4242 (python3) total-vm:123456kB, anon-rss:99kB"


def test_a_server_that_killed_itself_after_a_child_is_no_lack_of_memory_unless_the_kernel_says_so() -> None:
    causes = {finding.cause for finding in diagnose.of_text(SELF_KILLED).findings}
    assert causes == {"engine-child-died"}
    assert _first(SELF_KILLED + KERNEL_KILLED) == "host-oom-killed"


@pytest.mark.parametrize(
    "line",
    [
        "/usr/bin/ld: cannot find -lgcc: No such file or directory",
        "/usr/bin/ld: cannot find Scrt1.o: No such file or directory",
        "ld: cannot find crtbeginS.o: No such file or directory",
        "collect2: error: ld returned 1 exit status",
        "ninja: build stopped: subcommand failed.",
    ],
)
def test_a_compile_that_failed_comes_before_the_kill_that_follows_it(line: str) -> None:
    killed = "systemd[1]: llm@glm.service: Main process exited, code=killed, status=9/KILL"
    names = [finding.cause for finding in diagnose.of_text(f"{line}\n{killed}").findings]
    assert names[0] in {"host-compiler-missing", "jit-compile-failed"}
    assert "host-oom-suspected" in names[1:]


def test_every_failed_log_has_a_known_truth() -> None:
    assert {path.stem for path in (LOGS / "failed").glob("*.gz")} == set(FAILED_LOGS)


def _pairs() -> list[tuple[str, str]]:
    """A root and a follow-up that it explains, each once."""
    return [
        (cause, other)
        for cause, failure in CAUSES.items()
        for other in failure.explains
        if failure.kind == "root" and failure.severity != "note" and CAUSES[other].severity != "note"
    ]


def test_of_a_root_and_what_follows_from_it_the_root_is_first() -> None:
    pairs = _pairs()
    right = 0
    for root, other in pairs:
        samples = (CAUSES[root].samples[0], CAUSES[other].samples[0])
        orders = [_first("\n".join(order)) for order in itertools.permutations(samples)]
        right += orders == [root, root]
    assert len(pairs) > 150
    assert right >= 0.9 * len(pairs)


def test_a_follow_up_comes_after_any_root_in_a_long_log() -> None:
    filler = "\n".join(f"INFO step {number} done" for number in range(500))
    text = "\n".join(
        [
            "RuntimeError: NCCL error: unhandled system error",
            filler,
            "OSError: [Errno 28] No space left on device",
            filler,
            "RuntimeError: Engine core initialization failed. See root cause above.",
        ]
    )
    names = [finding.cause for finding in diagnose.of_text(text).findings]
    assert names[0] == "disk-full"
    assert set(names) == {"disk-full", "nccl-error", "engine-child-died"}


def test_the_machine_decides_what_a_fabric_manager_without_work_means() -> None:
    line = "query of NVSwitch devices failed with error:WARNING Nothing to do [NV_WARN_NOTHING_TO_DO]"
    with_switches = diagnose.of_text(line, Context(nvswitch=True)).first
    assert diagnose.of_text(line, Context(nvswitch=False)).first is None
    assert with_switches is not None
    assert with_switches.cause == "nvswitch-missing"


def test_the_page_of_all_causes_is_up_to_date() -> None:
    page = Path(ROOT / "docs" / "failures.md").read_text(encoding="utf-8")
    assert page == failuredocs.page(CAUSES), "run: python -m bringup.failuredocs"


@pytest.mark.parametrize(
    "text",
    [
        "usage: serve [-h]",
        "  [--watchdog-timeout WATCHDOG_TIMEOUT]",
        "server_args=ServerArgs(x=1)",
        "+TasksMax=65536",
        "2026-11-30 07:35:25 install nvidia-fabricmanager-580:amd64 <none> 580.159.04-0",
    ],
)
def test_repeated_settings_are_no_evidence(text: str) -> None:
    assert logtext.is_echo(text)
