"""Environments are whole or not there; the link always leads to a whole one; what is in use stays."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from bringup import ROOT
from bringup.node import environment, inuse, undo


def wheel(folder: Path, name: str, version: str) -> str:
    """Writes a wheel with one module and returns its line for a lock."""
    info = f"{name}-{version}.dist-info"
    members = {
        f"{name}.py": f"VERSION = '{version}'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in members.items()]
    members[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in members.items():
            archive.writestr(member, text)
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "wheels").mkdir()
    return tmp_path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A place with environment 1.0 in it: building takes seconds, so tests that do not change it share it."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "wheels").mkdir()
    environment.ensure(wanted(folder, "1.0"))
    return folder


def wanted(place: Path, version: str, lock: str = "", **changes: object) -> environment.Wanted:
    plain = environment.Wanted(
        name="demo",
        provider="pip",
        prefix=str(place / "envs" / f"demo-{version}"),
        lock=lock or wheel(place / "wheels", "smallest", version),
        digest=version,
        python=sys.executable,
        link=str(place / "envs" / "demo-current"),
        checks=(("python", "-c", "import smallest"),),
        cache=str(place / "cache"),
        log=str(place / "log" / "demo.log"),
        settings={
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(place / "wheels"),
            "PIP_CONFIG_FILE": "/dev/null",
        },
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def names(place: Path) -> list[str]:
    folder = place / "envs"
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_environments_follow_each_other_and_the_oldest_goes(place: Path) -> None:
    first, second, third = (wanted(place, version) for version in ("1.0", "2.0", "3.0"))
    assert environment.ensure(first, check_only=True) == {
        "changed": True, "built": True, "switched": True, "pruned": [], "prefix": first.prefix,
    }  # fmt: skip
    assert not (place / "envs").exists()
    assert environment.ensure(first)["built"]
    assert environment.ensure(first)["changed"] is False
    assert environment.ensure(first, check_only=True)["changed"] is False
    about = environment.manifest(Path(first.prefix))
    assert (about["packages"]["smallest"], about["digest"]) == ("1.0", "1.0")
    environment.ensure(second)
    planned = dataclasses.replace(third, planned=(first.prefix,))
    assert environment.ensure(planned)["pruned"] == []
    assert environment.ensure(third)["pruned"] == [first.prefix]
    assert names(place) == ["demo-2.0", "demo-3.0", "demo-current"]
    assert (place / "envs" / "demo-current").readlink() == Path(third.prefix)
    assert "install the packages" in (place / "log" / "demo.log").read_text()


def test_an_undo_takes_all_environments_their_link_and_the_downloads(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(undo, "FOLDER", place / "state" / "undo")
    first, second = (wanted(place, version, role="demo") for version in ("1.0", "2.0"))
    before = sorted(place.rglob("*"))
    environment.ensure(first, check_only=True)
    assert sorted(place.rglob("*")) == before
    environment.ensure(first)
    environment.ensure(second)
    assert {*names(place)} == {"demo-1.0", "demo-2.0", "demo-current"}
    undo.Journal("demo").restore()
    # What a build said stays.
    assert sorted(place.rglob("*")) == sorted([*before, place / "log", place / "log" / "demo.log"])


def test_a_manifest_that_others_may_write_is_ours_again(place: Path) -> None:
    one = wanted(place, "1.0")
    environment.ensure(one)
    about = Path(one.prefix) / environment.MANIFEST
    assert not environment.ensure(one)["changed"]
    text = about.read_text()
    about.chmod(0o606)
    assert environment.ensure(one, check_only=True)["changed"]
    assert about.stat().st_mode & 0o777 == 0o606
    answer = environment.ensure(one)
    assert (answer["changed"], answer["built"]) == (True, False)
    assert about.stat().st_mode & 0o777 == 0o644
    assert about.read_text() == text
    (row,) = (row for row in environment._claims(one) if row["name"] == str(about))
    assert (row["mode"], row["uid"], row["gid"]) == (0o644, os.geteuid(), os.getegid())
    assert not environment.ensure(one)["changed"]


def test_what_a_process_runs_from_stays_until_it_ends(place: Path) -> None:
    first, second = wanted(place, "1.0"), wanted(place, "2.0", keep=0)
    environment.ensure(first)
    with running(first.prefix) as process:
        assert environment.ensure(second)["pruned"] == []
        (Path(first.prefix) / environment.MANIFEST).unlink()
        with pytest.raises(environment.EnvironmentFailed, match=rf"processes run from it \({process.pid}\)"):
            environment.ensure(first)
    assert environment.ensure(second)["pruned"] == [first.prefix]


class running:
    """A process of an environment, from here to the end of the block."""

    def __init__(self, prefix: str) -> None:
        self._argv = [f"{prefix}/bin/python", "-c", "print(flush=True); import time; time.sleep(60)"]

    def __enter__(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(self._argv, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self._process

    def __exit__(self, *_: object) -> None:
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lock": "smallest==1.0 --hash=sha256:" + "0" * 64 + "\n"}, "DO NOT MATCH THE HASHES"),
        ({"lock": "smallest==1.0\n"}, "--hash"),
        ({"checks": (("python", "-c", "import not_in_the_lock"),)}, "No module named 'not_in_the_lock'"),
        ({"python": "9.9"}, "there is no Python 9.9"),
        ({"python": "/no/such/python"}, "there is no Python /no/such/python"),
        ({"provider": "guess"}, 'no provider "guess". Known: pip, uv'),
    ],
    ids=["wrong hash", "no hash", "failing check", "no such version", "no such path", "no such provider"],
)
def test_a_build_that_fails_says_why_and_leaves_what_was_there(
    change: dict[str, Any], words: str, built: Path
) -> None:
    good = wanted(built, "1.0")
    with pytest.raises(environment.EnvironmentFailed) as caught:
        environment.ensure(wanted(built, "2.0", **change))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(built) == ["demo-1.0", "demo-current"]
    assert environment.is_ready(good)
    assert environment.is_linked(good)


def test_a_package_that_was_put_in_or_taken_out_by_hand_makes_it_be_built_again(built: Path) -> None:
    one = wanted(built, "1.0")
    packages = next(Path(one.prefix).glob("lib/python3*/site-packages"))
    (packages / "stranger-1.dist-info").mkdir()
    assert environment.ensure(one)["built"]
    assert not (packages / "stranger-1.dist-info").exists()


def test_content_that_was_changed_by_hand_is_damage_and_a_time_alone_is_none(built: Path) -> None:
    one = wanted(built, "1.0")
    environment.ensure(one)
    (module,) = Path(one.prefix).glob("lib/python3*/site-packages/smallest*.py")
    text = module.read_text()
    os.utime(module, (1, 1))
    assert not environment.ensure(one)["changed"]
    assert environment.manifest(Path(one.prefix))["content"] == environment.fingerprint(Path(one.prefix))
    module.write_text("x" * len(text))
    assert environment.ensure(one)["built"]
    assert module.read_text() == text
    (Path(one.prefix) / "bin" / "by-hand").touch()
    assert environment.ensure(one)["built"]


KILLED = """
import sys
from bringup.node import environment
environment.ensure(environment.Wanted(**eval(sys.argv[1])))
"""


def test_a_build_that_was_killed_leaves_nothing_that_counts_and_no_process(place: Path) -> None:
    slow = wanted(place, "1.0", checks=(("python", "-c", "import time; time.sleep(61)"),))
    given = repr(dataclasses.asdict(slow))
    process = subprocess.Popen([sys.executable, "-c", KILLED, given], cwd=ROOT)
    log = Path(slow.log)
    wait_until(lambda: log.exists() and "time.sleep(61)" in log.read_text())
    process.send_signal(signal.SIGKILL)
    process.wait(120)
    assert not environment.is_ready(slow)
    wait_until(lambda: not inuse.users([Path(slow.prefix)]))
    again = wanted(place, "1.0")
    assert environment.ensure(again)["built"]
    assert environment.is_ready(again)


def wait_until(holds: object, limit_s: float = 180) -> None:
    end = time.monotonic() + limit_s
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def test_an_environment_that_a_unit_names_is_in_use(tmp_path: Path) -> None:
    units = tmp_path / "units"
    units.mkdir()
    (units / "a.service").write_text("[Service]\nExecStart=/opt/envs/demo-1/bin/python -m server\n")
    found = inuse.in_use([Path("/opt/envs/demo-1"), Path("/opt/envs/demo-11")], tmp_path, units)
    assert found == {Path("/opt/envs/demo-1")}


def test_a_command_over_its_limit_is_ended_with_its_children(tmp_path: Path) -> None:
    log = environment.Log(tmp_path / "log")
    with pytest.raises(environment.EnvironmentFailed, match="took longer than 1 s"):
        log.run(["sh", "-c", f"sleep 30 & echo $! > {tmp_path}/child; wait"], 1, "wait")
    child = int((tmp_path / "child").read_text())
    wait_until(
        lambda: not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_text()
    )
