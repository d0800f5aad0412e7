"""Reports say what a run was, what to do next, and escape what nodes said."""

from __future__ import annotations

import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from bringup import confirm, progress, report, runs, webpage
from bringup.errors import Exit, Locked
from bringup.events import Change, Doing, Failure, HostOutcome, Outcome, RoleOutcome, Tally

NASTY = "<script>alert(1)</script> [red]100% $HOME[/] \u00fc"
ROLES = {
    "preflight": RoleOutcome(ok=2, begin_s=0.0, end_s=1.0),
    "files": RoleOutcome(ok=3, changed=1, begin_s=1.0, end_s=4.0),
}


def record(tmp_path: Path, code: Exit = Exit.DONE, **more: object) -> runs.RunRecord:
    outcome = Outcome(
        hosts={
            "one": HostOutcome(ok=5, changed=1, roles=ROLES, sealed=("engine_env", "model_store")),
            "two": HostOutcome(ok=2, failed=1, roles={"preflight": RoleOutcome(ok=2, failed=1, end_s=1.0)}),
            "gone": HostOutcome(unreachable=True),
        },
        changes=(Change("one", "files", f"Write {NASTY}", f"--- a\n+++ b\n-old\n+{NASTY}"),),
        failures=(
            Failure("two", "preflight", "Refuse", f"disk too small {NASTY}"),
            Failure("gone", "preflight", "Look", "no route", "unreachable"),
        ),
    )
    begun = runs.begin(
        "provision", "lab", {"inventory": "lab", "playbook": "provision", **more}, folder=tmp_path
    )
    answer = {
        "host": "one",
        "service": "chat",
        "address": "http://10.0.0.1:8000/v1",
        "model": "m",
        "text": "Hi\nyou",
    }
    return runs.finish(
        begun, code, outcome, folder=tmp_path, answers=({**answer, "tokens": 3, "seconds": 0.25},)
    )


def shown(one: runs.RunRecord) -> str:
    out = io.StringIO()
    report.show(one, Console(file=out, width=200, highlight=False))
    return out.getvalue()


def test_the_terminal_report_has_states_failures_answers_and_the_next_command(tmp_path: Path) -> None:
    text = shown(record(tmp_path, Exit.FAILED))
    rows = [line.split() for line in text.splitlines() if line.strip()]
    assert ["one", "changed", "5", "1", "0", "0", "2", "4", "s"] in rows
    assert ["two", "refused", "2", "0", "1", "0", "0", "1", "s"] in rows
    assert any(row[:2] == ["gone", "unreachable"] for row in rows)
    assert f"disk too small {NASTY}" in text
    assert '"Hi you" (3 tokens in 0.25 s)' in text
    assert "Next: invoke logs --inventory lab --limit two,gone, then invoke provision --inventory lab" in text


@pytest.mark.parametrize("code", [code for code in Exit if code is not Exit.DONE])
def test_every_bad_end_has_a_next_command(tmp_path: Path, code: Exit) -> None:
    assert any("invoke " in line for line in report.next_steps(record(tmp_path, code)))


def test_check_mode_says_would_change(tmp_path: Path) -> None:
    text = shown(record(tmp_path, Exit.PENDING, check=True))
    assert "1 would change" in text
    assert "pending" in text


def test_the_json_object_has_integers_a_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = report.show_run(record(tmp_path, Exit.REFUSED), as_json=True)
    data = json.loads(capsys.readouterr().out)
    assert code is Exit.REFUSED
    assert data["schema_version"] == 1
    assert {key: data["hosts"]["one"][key] for key in ("ok", "changed", "failed")} == {
        "ok": 5,
        "changed": 1,
        "failed": 0,
    }
    assert data["hosts"]["one"]["roles"]["files"]["changed"] == 1


class Page(HTMLParser):
    """Tags that are open, and what the page would load or run."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_is_well_formed_and_runs_nothing(tmp_path: Path) -> None:
    path = webpage.write(record(tmp_path, Exit.FAILED), tmp_path)
    text = path.read_text()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert "script" not in page.seen
    assert page.loads == ["data:,"]
    assert "&lt;script&gt;alert(1)" in text
    assert 'content="width=device-width' in text
    assert path.stat().st_mode & 0o077 == 0


def test_the_page_shows_a_bar_for_each_role_within_the_whole(tmp_path: Path) -> None:
    text = webpage.render(record(tmp_path))
    assert 'class="bar changed" style="left:25.0%;width:75.0%"' in text
    assert 'class="bar failed" style="left:0.0%;width:25.0%"' in text


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (59.9, "59 s"), (125, "2 m 05 s"), (3720, "1 h 02 m"), (90061, "25 h 01 m")],
)
def test_times_are_short(seconds: float, said: str) -> None:
    assert progress.elapsed(seconds) == said


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 B"), (1536, "2 KiB"), (3_650_722_201, "3.4 GiB"), (5 * 1024**5, "5120 TiB")]
)
def test_sizes_are_short(count: int, said: str) -> None:
    assert report.size(count) == said


def test_plain_progress_is_quiet_at_first_and_then_tells_what_is_waited_for_every_ten_seconds() -> None:
    clock = iter([0.0, 1.0, 2.5, 5.0, 13.0])
    out = io.StringIO()
    view = progress.Plain(out, clock=lambda: next(clock))
    tally = Tally()
    for name in ("n1", "n2", "n3", "n4", "n5"):
        tally.doing[name] = Doing("engine_service", "Wait for a real token", -3.0)
    for _ in range(4):
        view.update(tally)
    assert out.getvalue().splitlines() == [
        "    2 s  n1, n2, n3, n4 and 1 more  engine_service: Wait for a real token (5 s)",
        "   13 s  n1, n2, n3, n4 and 1 more  engine_service: Wait for a real token (16 s)",
    ]


def test_no_colour_is_written_where_there_is_no_terminal(tmp_path: Path) -> None:
    out = io.StringIO()
    report.show(record(tmp_path, Exit.FAILED), Console(file=out, width=120))
    assert "\x1b" not in out.getvalue()
    assert isinstance(progress.choose(io.StringIO()), progress.Plain)


@pytest.mark.parametrize(
    ("hosts", "said", "agreed"),
    [
        (["a", "b"], "lab", True),
        (["a", "b"], "y", False),
        (["a", "b"], "LAB", False),
        (["a"], "y", True),
        (["a"], "", False),
        (["a"], "lab", False),
    ],
)
def test_many_hosts_need_the_name_of_the_inventory_typed(hosts: list[str], said: str, agreed: bool) -> None:
    if agreed:
        confirm.disruptive("restart", "lab", hosts, ask=lambda _: said)
    else:
        with pytest.raises(Locked, match="not confirmed"):
            confirm.disruptive("restart", "lab", hosts, ask=lambda _: said)


def test_scripts_agree_beforehand_and_nobody_is_asked() -> None:
    asked: list[str] = []

    def ask(question: str) -> str:
        asked.append(question)
        return "lab"

    confirm.disruptive("restart", "lab", ["a", "b"], yes=True, ask=ask)
    assert asked == []


def test_what_a_command_said_is_shown_once_whole_and_marked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    same = {"reached": True, "code": 0, "out": "x" * 90 + "\n", "err": "old\n"}
    rows = [{"host": f"n-{n:02}", **same} for n in range(1, 7)]
    rows += [{"host": "n-07", "reached": True, "code": 3, "out": "", "err": ""}]
    rows += [{"host": "n-08", "reached": False, "code": 255, "out": "", "err": "nothing listens"}]
    assert report.show_executed(rows) is Exit.UNREACHABLE
    assert capsys.readouterr().out.splitlines() == [
        "n-01..n-06 (6 hosts)",
        "    " + "x" * 90,
        "  ! old",
        "n-07  (exit 3)",
        "    (nothing)",
        "n-08  (not reached)",
        "  ! nothing listens",
    ]
    assert report.show_executed(rows[:-1]) is Exit.FAILED
    assert report.show_executed(rows[:-2]) is Exit.DONE


def test_a_warning_of_a_start_that_counts_stands_below_its_server() -> None:
    row = {"host": "gpu-01", "service": "chat", "state": "active", "healthy": True}
    out = io.StringIO()
    Console(file=out, width=160).print(
        report.status_table([{**row, "warnings": ["ACCEPT_LOW: a step yields 1.00 tokens"]}, row])
    )
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert [line for line in lines if line.startswith("ACCEPT_LOW: a step yields")] != []
    assert sum("ACCEPT_LOW" in line for line in lines) == 1
