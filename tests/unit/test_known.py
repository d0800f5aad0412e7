"""A plan that is read back says what it would say worked out anew, and is worked out anew when anything is another."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bringup import ROOT, fleet, known, plan, rolevars, seal
from bringup import inventory as inventories
from bringup.errors import UsageError


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the lab's inventory, whose plans are kept beside it."""
    monkeypatch.setattr(known, "FOLDER", tmp_path / "plans")
    return Path(shutil.copytree(ROOT / "inventories" / "lab", tmp_path / "site"))


def test_a_plan_that_is_read_back_is_the_one_that_was_worked_out(site: Path) -> None:
    first, again = known.load(str(site)), known.load(str(site))
    assert (first.is_new, again.is_new) == (True, False)
    whole = plan.load(str(site))
    variables, hosts = rolevars.of_plan(whole), inventories.read(str(site)).hosts
    for one in (first, again):
        assert (one.inventory, one.digest, one.lacking) == (whole.inventory, whole.digest, ())
        assert one.groups == {host.name: host.groups for host in whole.hosts}
        assert [host.services for host in one.hosts] == [
            tuple(service.name for service in host.services) for host in whole.hosts
        ]
        assert json.dumps(one.variables, sort_keys=True) == json.dumps(variables, sort_keys=True)
        assert one.inputs == seal.inputs(variables, hosts, site, {})
        assert one.idle == seal.idle(variables, hosts)
        names = [host.name for host in whole.hosts]
        assert one.reach(names) == fleet.hosts_of(str(site), names)
    assert seal.inputs(again.variables, hosts, site, {"x": "1"}) == seal.inputs(
        variables, hosts, site, {"x": "1"}
    )


def test_any_change_of_the_inventory_is_seen(site: Path) -> None:
    before = known.load(str(site))
    (site / "group_vars" / "new.yml").write_text("{}\n")
    with pytest.raises(UsageError, match="new"):
        known.load(str(site))
    (site / "group_vars" / "new.yml").unlink()
    assert not known.load(str(site)).is_new
    hosts = site / "hosts.yml"
    about = hosts.stat()
    hosts.write_text(hosts.read_text().replace("lab-01", "lab-09"))
    os.utime(hosts, ns=(about.st_atime_ns, about.st_mtime_ns))
    after = known.load(str(site))
    assert after.is_new
    assert "lab-09" in after.groups
    assert "lab-09" not in before.groups


def test_a_plan_that_is_not_the_one_before_is_said_to_be_another(site: Path) -> None:
    """So that Ansible is started ahead: most likely something is to be played."""
    hosts = site / "hosts.yml"
    begun: list[Path] = []
    text = hosts.read_text()
    for number, (content, is_new, is_other) in enumerate(
        [
            (text, True, True),
            (text, False, False),
            (text.replace("lab-01", "lab-09"), True, True),
            (text, False, True),
            (text, False, False),
        ]
    ):
        hosts.write_text(content)
        found = known.load(str(site), before=begun.append)
        assert (found.is_new, found.is_other) == (is_new, is_other), number
    assert begun == [site] * 3


def test_another_ansible_is_seen(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known.load(str(site))
    monkeypatch.setattr(known, "version", lambda name: "0.0")
    assert known.load(str(site)).is_new


def test_what_cannot_be_read_back_is_worked_out_again(site: Path) -> None:
    first = known.load(str(site))
    for damage in ("", "{", '{"schema_version": 1}'):
        (head,) = (path for path in known.FOLDER.glob("*.json") if "variables" not in path.name)
        head.write_text(damage)
        again = known.load(str(site))
        assert again.is_new
        assert again.inputs == first.inputs
    (beside,) = known.FOLDER.glob("*.variables.json")
    beside.unlink()
    assert known.load(str(site)).is_new
    assert not known.load(str(site)).is_new


def test_plans_are_private_and_only_the_newest_stay(site: Path) -> None:
    text = (site / "group_vars" / "all.yml").read_text()
    for number in range(known.KEPT + 2):
        (site / "group_vars" / "all.yml").write_text(f"{text}# {number}\n")
        known.load(str(site))
    assert known.FOLDER.stat().st_mode & 0o077 == 0
    files = list(known.FOLDER.iterdir())
    assert len(files) == 2 * known.KEPT
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)


def test_a_folder_that_cannot_be_written_changes_nothing_but_the_time(site: Path, tmp_path: Path) -> None:
    known.FOLDER.parent.mkdir(exist_ok=True)
    known.FOLDER.write_text("a file")
    found = known.load(str(site))
    assert found.is_new
    found.hand_over(tmp_path / "handed.json")
    handed = json.loads((tmp_path / "handed.json").read_text())
    assert handed["hosts"].keys() == found.groups.keys()


def test_nothing_that_a_plan_reads_lies_outside_of_what_its_digest_covers() -> None:
    """Watched in a process of its own: every file of this checkout that is opened, every folder that is listed."""
    program = textwrap.dedent("""
        import json, sys
        seen = set()
        def watch(event, given):
            if event in ("open", "os.listdir", "os.scandir") and isinstance(given[0], str):
                seen.add(given[0])
        from bringup import known, fleet
        sys.addaudithook(watch)
        for name in sys.argv[1:]:
            found = known._worked_out(known.inventory.folder_of(name), None)
            assert found.inputs and found.idle
        print(json.dumps(sorted(seen)))
    """)
    names = [
        name for name in inventories.known() if not (inventories.INVENTORIES / name / known.TWINS).is_file()
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    covered = [ROOT / source for source in known.SOURCES] + [inventories.INVENTORIES / name for name in names]
    opened = [Path(name) for name in json.loads(done.stdout)]
    ours = [
        path
        for path in opened
        if ROOT in path.parents and ".venv" not in path.parts and path.suffix != ".pyc"
    ]
    assert any("catalog" in path.parts for path in ours)
    outside = [
        path
        for path in ours
        if not any(source in (path, *path.parents) for source in covered)
        or (known.LEFT_OUT & set(path.relative_to(ROOT).parts) and "__pycache__" not in path.parts)
    ]
    assert outside == []


def test_hosts_survive_being_written_down() -> None:
    host = fleet.Host(
        "a", "10.0.0.1", 2222, "root", "/k", ("/one", "/two"), False, "jump", False, (("x", "y"),)
    )
    assert fleet.of_data(json.loads(json.dumps(dataclasses.asdict(host)))) == host
