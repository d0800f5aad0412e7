"""Unit texts: systemd takes them, and every nasty word arrives as it was."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bringup import systemd
from bringup.node import drift
from bringup.planned import (
    ApiKey,
    Drift,
    Endpoints,
    HostPlan,
    LogRotation,
    Placement,
    Restart,
    Service,
    WarmUp,
)

NASTY = (
    "100% $HOME",
    "${PATH}",
    'say "no"',
    "it's",
    "back\\slash\\",
    "two\nlines",
    "tab\there",
    "ümlaut 模型",
    ";",
    "",
    " ",
    "%n%%",
    "#x",
)


def service(**changes: object) -> Service:
    made = Service(
        name="words",
        unit="bringup-words",
        profile="cpu-words-llama",
        engine="llama-server",
        engine_version="2026.10",
        model="words",
        served_name="words",
        bind="127.0.0.1",
        port=8000,
        user="bringup-words",
        argv=("/usr/bin/env", "--model", "/srv/models/words/words.gguf"),
        environment={"OMP_NUM_THREADS": "2"},
        env_name="llama",
        endpoints=Endpoints(health="/health", metrics="/metrics"),
        gpus=(),
        placement=Placement(),
        warm_up=(WarmUp(),),
        restart=Restart(calendar="*-*-* 04:00:00", spread_s=600),
        logs=LogRotation(),
        start_timeout_s=60,
        stop_timeout_s=30,
        probe_timeout_s=10,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


HOST = HostPlan(name="n1", groups=(), platform="cpu", arch="x86_64", services=(), models=(), environments=())


def words_of(line: str) -> list[str]:
    """A command line as systemd reads it: an independent reading of systemd.service(5), for these tests."""
    words, position = [], 0
    escapes = {"n": "\n", "t": "\t", "\\": "\\", '"': '"'}
    while position < len(line):
        if line[position] == " ":
            position += 1
            continue
        word, quoted = "", line[position] == '"'
        position += quoted
        while position < len(line) and line[position] != ('"' if quoted else " "):
            if line[position] == "\\":
                following = line[position + 1]
                if following == "x":
                    word += chr(int(line[position + 2 : position + 4], 16))
                    position += 4
                else:
                    word += escapes[following]
                    position += 2
            else:
                word += line[position]
                position += 1
        position += quoted
        words.append(word)
    assert not re.search(r"(?<!\$)(\$\$)*\$(?!\$)", "".join(words))
    return [word.replace("%%", "%").replace("$$", "$") for word in words]


@given(
    st.lists(
        st.one_of(
            st.sampled_from(NASTY),
            st.text(st.characters(codec="utf-8", exclude_characters="\0")),
        )
    )
)
@settings(max_examples=300, deadline=None)
def test_every_word_comes_out_as_it_went_in(words: list[str]) -> None:
    assert words_of(systemd.command(words)) == words


@pytest.mark.parametrize("nasty", NASTY)
def test_systemd_takes_a_unit_with_a_nasty_word(nasty: str, tmp_path: Path) -> None:
    text = systemd.unit_text(
        service(argv=("/usr/bin/env", "--name", nasty), served_name=nasty or "words"), HOST
    )
    assert verify(tmp_path, {"bringup-words.service": text, **log_units(service())}) == ""


def log_units(one: Service) -> dict[str, str]:
    return {
        f"{systemd.log_unit(one)}.socket": systemd.log_socket_text(one),
        f"{systemd.log_unit(one)}.service": systemd.log_unit_text(one),
    }


def verify(folder: Path, units: dict[str, str]) -> str:
    """What the real `systemd-analyze verify` says about these units, which may need each other."""
    for name, text in units.items():
        (folder / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(folder / name) for name in units)],
        capture_output=True,
        text=True,
        env={"SYSTEMD_UNIT_PATH": f"{folder}:", "PATH": "/usr/bin:/bin", "SYSTEMD_LOG_LEVEL": "warning"},
        check=False,
    )
    said = [line for line in done.stderr.splitlines() if str(folder) in line or "bringup-" in line]
    return "\n".join(said) if done.returncode == 0 else done.stderr


VARIANTS = {
    "plain": service(),
    "gpus": service(gpus=(0, 1, 2, 3), memory_gib=512.5, cache_folder="/var/cache/bringup/words"),
    "placed": service(placement=Placement(cpus="0-71", memory_nodes="0")),
    "journal": service(logs=LogRotation(mode="journal")),
    "key": service(api_key=ApiKey("vault_key", "environment", "API_KEY")),
    "home": service(argv=("/home/ann/env/bin/python", "-m", "engine")),
    "writable": service(writable=("/var/cache/with space", "/var/cache/100%")),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_systemd_finds_nothing_wrong_with_any_unit(name: str, tmp_path: Path) -> None:
    one = VARIANTS[name]
    units = {
        f"{one.unit}.service": systemd.unit_text(one, HOST),
        **log_units(one),
        f"{systemd.watch_unit(one)}.service": systemd.watch_unit_text(one),
        f"{systemd.restart_unit(one)}.service": systemd.restart_unit_text(
            one, 3600, f"{systemd.restart_unit(one)}.timer"
        ),
        f"{systemd.restart_unit(one)}.timer": systemd.restart_timer_text(one),
        f"{systemd.drift_unit(one)}.service": systemd.restart_unit_text(
            one, 3600, f"{systemd.drift_unit(one)}.path", "--drift"
        ),
        f"{systemd.drift_unit(one)}.path": systemd.drift_path_text(one),
        "bringup-lease.service": systemd.lease_unit_text(),
    }
    assert verify(tmp_path, units) == ""


def test_systemd_analyze_is_there_to_be_asked() -> None:
    assert shutil.which("systemd-analyze")


@pytest.mark.parametrize("name", ["plain", "gpus", "key", "journal"])
def test_every_unit_that_runs_for_long_is_sandboxed(name: str, tmp_path: Path) -> None:
    one = VARIANTS[name]
    units = {
        f"{one.unit}.service": systemd.unit_text(one, HOST),
        f"{systemd.log_unit(one)}.service": systemd.log_unit_text(one),
        f"{systemd.watch_unit(one)}.service": systemd.watch_unit_text(one),
        f"{systemd.restart_unit(one)}.service": systemd.restart_unit_text(
            one, 3600, f"{systemd.restart_unit(one)}.timer"
        ),
        "bringup-lease.service": systemd.lease_unit_text(),
    }
    for file, text in units.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
        done = subprocess.run(
            [
                "systemd-analyze",
                "security",
                "--offline=yes",
                "--threshold=30",
                "--no-pager",
                str(tmp_path / file),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-600:] + done.stderr


def test_gpus_stay_reachable_in_the_sandbox() -> None:
    text = systemd.unit_text(VARIANTS["gpus"], HOST)
    assert "PrivateDevices=yes" not in text
    assert "DeviceAllow=char-nvidia-uvm rw" in text


def test_no_secret_is_in_a_unit_and_the_key_comes_as_a_credential() -> None:
    text = systemd.unit_text(VARIANTS["key"], HOST)
    assert "LoadCredential=api_key:/etc/bringup/credentials/words/api_key" in text
    assert "vault_key" not in text


def test_the_environment_file_keeps_dollars_quotes_and_percent_signs() -> None:
    text = systemd.environment_text(service(environment={"B": '100% $HOME "x" \\ `y`', "A": "ü"}))
    assert text == 'A="ü"\nB="100% \\$HOME \\"x\\" \\\\ \\`y\\`"\n'


def test_all_failed_starts_fit_into_the_window_of_the_start_limit() -> None:
    one = service(start_timeout_s=1800)
    assert systemd.start_limit_s(one) > systemd.START_LIMIT_BURST * 2 * one.start_timeout_s


def test_only_the_server_itself_is_told_to_end_and_what_it_leaves_is_killed() -> None:
    lines = systemd.unit_text(service(), HOST).splitlines()
    assert [line for line in lines if line.startswith(("KillMode=", "SendSIGKILL=", "KillSignal="))] == [
        "KillMode=mixed"
    ]


def test_a_journal_of_the_services_own_has_the_limits_of_its_files() -> None:
    one = service(logs=LogRotation(size_bytes=1000, age_s=60, keep=4, mode="journal", lines_per_s=500))
    settings_of = dict(line.split("=", 1) for line in systemd.journal_text(one).splitlines() if "=" in line)
    assert (settings_of["SystemMaxUse"], settings_of["SystemMaxFileSize"]) == ("5000", "1000")
    assert (settings_of["MaxRetentionSec"], settings_of["MaxFileSec"]) == ("300s", "60s")
    text = systemd.log_unit_text(one)
    assert "LogNamespace=bringup-words" in text
    assert "logpipe.py --journal --lines-per-s=500" in text
    assert f"StandardOutput=append:{systemd.FIFOS}/words" in systemd.unit_text(one, HOST), (
        "never past redaction"
    )


def test_drift_is_watched_only_where_a_ratio_is_given() -> None:
    assert not Drift().watched
    assert Drift(memory_ratio=2.0).watched
    text = systemd.drift_path_text(service())
    assert "PathChanged=/run/bringup-watch-words/drift.json" in text
    assert str(drift.folder_of("words")) == "/run/bringup-watch-words"
    assert "RuntimeDirectory=bringup-watch-words" in systemd.watch_unit_text(service())
