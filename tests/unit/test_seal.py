"""Seals: what goes into a role, what it left on a node, and what follows when something differs."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from bringup import ROOT, fleet, inventory, plan, rolevars, runs, seal, sealcheck
from bringup.node import place
from bringup.node import seal as node
from bringup.seal import Verdict

ROLE = "files"


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to put things into, while a role is played in a run that holds this node."""
    monkeypatch.setattr(node, "FOLDER", tmp_path / "seals")
    monkeypatch.setattr(node, "LOCK", tmp_path / "run.json")
    (tmp_path / "run.json").write_text('{"token": "this run"}')
    monkeypatch.setenv(node.ROLE, ROLE)
    ours = tmp_path / "ours"
    ours.mkdir()
    return ours


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """One thing of each state, as a role would have it."""
    mine = {"owner": str(os.geteuid()), "group": str(os.getegid())}
    try:
        import grp
        import pwd

        mine = {"owner": pwd.getpwuid(os.geteuid()).pw_name, "group": grp.getgrgid(os.getegid()).gr_name}
    except KeyError:
        pytest.skip("this user has no name here")
    return [
        {"path": str(folder / "file"), "content": '100% $HOME "ü"\n', "mode": "0640", **mine},
        {"path": str(folder / "folder"), "state": "directory", "mode": "0750", **mine},
        {"path": str(folder / "link"), "state": "link", "target": "file"},
        {"path": str(folder / "gone"), "state": "absent"},
    ]


def sealed(folder: Path) -> None:
    """A role puts its things there, and the run comes to its end."""
    place.apply(rows_of(folder))
    assert node.seal({ROLE: "digest"}, [ROLE], "run-1", 1.0) == ([ROLE], {})


def differs() -> list[str]:
    return [seal.line(row) for row in node.verify()[ROLE]["differs"]]


SERVER_STATES: dict[str, dict[str, Any]] = yaml.safe_load(
    (ROOT / "tests" / "cases" / "seals" / "server-and-restart.yml").read_text(encoding="utf-8")
)

# ---------------------------------------------------------------- on the node


@pytest.mark.parametrize("name", SERVER_STATES)
def test_a_server_is_as_it_should_be_while_its_planned_restart_is_under_way_and_only_then(name: str) -> None:
    case = SERVER_STATES[name]
    idle = {"ActiveState": "inactive", "SubState": "dead"}
    for restarts in ((case["restart"], idle), (idle, case["restart"])):
        assert node.is_restarted(case["server"], *restarts) is case["restarted"]
    assert not node.is_restarted(case["server"], idle, {})


def test_what_a_role_left_is_found_as_it_was_left(ground: Path) -> None:
    sealed(ground)
    assert node.verify() == {
        ROLE: {"inputs": "digest", "run": "run-1", "at": 1.0, "differs": [], "basis": []}
    }
    assert (node.FOLDER / f"{ROLE}.json").stat().st_mode & 0o077 == 0


MUTATIONS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "content": (lambda f: (f / "file").write_text("other\n"), "content"),
    "content of the same size and time": (lambda f: _same_size_and_time(f / "file"), "content"),
    "mode": (lambda f: (f / "file").chmod(0o600), "mode"),
    "a file that is gone": (lambda f: (f / "file").unlink(), "state"),
    "a folder's mode": (lambda f: (f / "folder").chmod(0o700), "mode"),
    "a folder that is gone": (lambda f: (f / "folder").rmdir(), "state"),
    "a link's target": (lambda f: _instead(f / "link").symlink_to("elsewhere"), "target"),
    "a link that became a file": (lambda f: _instead(f / "link").write_text("x"), "state"),
    "what must not be there": (lambda f: (f / "gone").write_text("back\n"), "state"),
}


def _instead(path: Path) -> Path:
    """The path, with nothing there any more."""
    path.unlink()
    return path


def _same_size_and_time(path: Path) -> None:
    status = path.stat()
    path.write_bytes(b"x" * status.st_size)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_change_behind_our_back_is_found_alone_and_put_back_by_the_role(ground: Path, name: str) -> None:
    sealed(ground)
    mutate, field = MUTATIONS[name]
    mutate(ground)
    (found,) = node.verify()[ROLE]["differs"]
    assert found["field"] == field
    sealed(ground)
    assert differs() == []


def test_a_file_that_was_only_written_again_is_as_it_was_left(ground: Path) -> None:
    sealed(ground)
    text = (ground / "file").read_text()
    (ground / "file").write_text(text)
    assert differs() == []


def test_a_digest_of_a_files_content_never_leaves_the_node(ground: Path) -> None:
    sealed(ground)
    (ground / "file").write_text("another secret\n")
    told = str(node.verify())
    assert node.sha256(ground / "file") not in told
    assert "'found': 'another'" in told


def test_what_is_not_so_at_the_end_of_the_run_is_not_sealed(ground: Path) -> None:
    place.apply(rows_of(ground))
    (ground / "file").chmod(0o600)
    done, left = node.seal({ROLE: "digest"}, [ROLE], "run-1", 1.0)
    assert done == []
    assert [row["field"] for row in left[ROLE]] == ["mode"]
    assert node.verify() == {}


def test_a_run_that_dies_leaves_no_seal_and_its_records_count_for_no_other(ground: Path) -> None:
    sealed(ground)
    place.apply(rows_of(ground))
    assert node.verify() == {}, "the first thing that is recorded ends the old seal"
    node.LOCK.write_text('{"token": "the next run"}')
    assert node.seal({ROLE: "digest"}, [], "run-2", 2.0) == ([], {})
    assert node.verify() == {}


def test_a_role_without_anything_to_do_is_sealed_only_where_it_was_played(ground: Path) -> None:
    assert node.seal({ROLE: "digest", "other": "digest"}, ["other"], "run-1", 1.0) == (["other"], {})
    assert list(node.verify()) == ["other"]


def test_nothing_is_recorded_outside_of_a_role_and_nothing_sealed_without_inputs(
    ground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.apply(rows_of(ground))
    assert node.seal({}, [ROLE], "run-1", 1.0) == ([], {})
    monkeypatch.delenv(node.ROLE)
    place.apply(rows_of(ground))
    assert list(node.FOLDER.glob("**/*.json")) == []


def test_nothing_is_recorded_in_check_mode(ground: Path) -> None:
    sealed(ground)
    (ground / "file").chmod(0o600)
    place.apply(rows_of(ground), check_only=True)
    assert len(differs()) == 1


def test_a_folder_and_all_in_it_is_one_digest_that_bytecode_does_not_change(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "inner").mkdir(parents=True)
    (tree / "inner" / "module.py").write_text("answer = 42\n")
    (tree / "link").symlink_to("inner")
    (tree / "manifest").write_text("{}")
    before = node.fingerprint(tree, ["manifest"])
    (tree / "inner" / "__pycache__").mkdir()
    (tree / "inner" / "__pycache__" / "module.pyc").write_bytes(b"x")
    (tree / "manifest").write_text('{"content": ""}')
    assert node.fingerprint(tree, ["manifest"]) == before
    (tree / "inner" / "module.py").write_text("answer = 43\n")
    changed = node.fingerprint(tree, ["manifest"])
    assert changed != before
    (tree / "inner" / "more.py").touch()
    assert node.fingerprint(tree, ["manifest"]) not in (before, changed)


OUR_UNIT = "bringup-words.service"
DROP_INS = {
    "service.d/10-image.conf": True,
    "timer.d/a b.conf": True,
    "bringup-words.service.d/99-by-hand.conf": False,
    "bringup-.service.d/99-by-hand.conf": False,
    "bringup-words@.service.d/99-by-hand.conf": False,
}
"""A drop-in, and whether it is one for all units of its type."""


def dropped_in(ground: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[node.Shown, Path]:
    """What systemd shows of a unit of ours with a drop-in of the machine's owner, which lies there."""
    monkeypatch.setattr(node, "ADMIN_UNITS", (f"{ground}/",))
    path = ground / name.replace(" ", "-")
    path.parent.mkdir()
    path.write_text("[Unit]\n")
    shown = node.Shown()
    shown.units = {OUR_UNIT: {"DropInPaths": f"/usr/lib/systemd/system/service.d/10-package.conf {path}"}}
    return shown, path


@pytest.mark.parametrize("name", DROP_INS)
def test_a_drop_in_for_all_units_of_a_type_is_evidence_and_one_for_ours_is_not(
    ground: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shown, path = dropped_in(ground, monkeypatch, name)
    others = node._drop_ins_of_others({}, shown)
    assert others == {OUR_UNIT: [str(path)]}
    assert node._is_of_a_type(str(path)) is DROP_INS[name]
    rows = node._rows_of_types([node.unit_row(OUR_UNIT, on=True)], others)
    assert list(rows) == ([f"path {path}"] if DROP_INS[name] else [])


def test_a_later_change_of_a_drop_in_for_all_units_of_a_type_is_found(
    ground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, path = dropped_in(ground, monkeypatch, "service.d/10-image.conf")
    (row,) = node._rows_of_types([node.unit_row(OUR_UNIT, on=True)], {OUR_UNIT: [str(path)]}).values()
    kept = {**row, **node.observe(row, shown)}
    assert node.differences(kept, node.observe(kept, shown)) == []
    path.write_text("[Service]\nLimitNOFILE=1024\n")
    assert [one["field"] for one in node.differences(kept, node.observe(kept, shown))] == ["content"]
    path.unlink()
    assert [one["field"] for one in node.differences(kept, node.observe(kept, shown))] == ["state"]


def test_a_drop_in_that_is_a_link_counts_by_where_it_leads_and_what_is_there(
    ground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, path = dropped_in(ground, monkeypatch, "service.d/10-image.conf")
    path.rename(ground / "aside.conf")
    path.symlink_to(ground / "aside.conf")
    rows = node._rows_of_types([node.unit_row(OUR_UNIT, on=True)], {OUR_UNIT: [str(path)]})
    kept = {key: {**row, **node.observe(row, shown)} for key, row in rows.items()}
    assert {row["state"] for row in kept.values()} == {"link", "file"}
    (ground / "aside.conf").write_text("[Service]\n")
    wrong = [one for row in kept.values() for one in node.differences(row, node.observe(row, shown))]
    assert [(one["what"], one["field"]) for one in wrong] == [(f"path {ground}/aside.conf", "content")]


def test_what_others_brought_does_not_become_ours_by_being_in_a_seal(
    ground: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, path = dropped_in(ground, monkeypatch, "service.d/10-image.conf")
    row = node.unit_row(OUR_UNIT, on=True)
    others = {OUR_UNIT: [str(path)]}
    evidence = node._rows_of_types([row], others)
    assert node._drop_ins_of_others({"earlier": evidence}, shown) == others
    ours = {"a role's": {"path": node.path_row(path, "file")}}
    assert node._drop_ins_of_others(ours, shown) == {}


# ---------------------------------------------------------------- what goes in


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inventories") / "site"
    shutil.copytree(ROOT / "inventories" / "lab", folder)
    return folder


def digests(
    site: Path, intent: dict[str, Any], extra: dict[str, Any] | None = None
) -> dict[str, dict[str, str]]:
    """What goes into each role when some intent is added."""
    file = site / "group_vars" / "all.yml"
    before = file.read_text()
    try:
        file.write_text(yaml.safe_dump({**yaml.safe_load(before), **intent}))
        read = inventory.read(str(site))
        return seal.inputs(rolevars.of_plan(plan.load(str(site))), read.hosts, read.folder, extra or {})
    finally:
        file.write_text(before)


def changed(before: dict[str, dict[str, str]], after: dict[str, dict[str, str]]) -> set[str]:
    return {
        role
        for host, roles in before.items()
        for role, digest in roles.items()
        if after[host][role] != digest
    }


def test_the_same_intent_goes_in_as_the_same_digest(site: Path) -> None:
    assert digests(site, {}) == digests(site, {})
    assert set(digests(site, {})["lab-01"]) == set(rolevars.ROLES)


@pytest.mark.parametrize(
    ("intent", "only"),
    [
        ({"model_store_port": 7421}, {"model_store"}),
        ({"scheduled_restart_address": "192.0.2.7"}, {"scheduled_restart"}),
        ({"engine_env_keep": 3}, {"engine_env"}),
        ({"ansible_become_password": "secret"}, set()),
    ],
)
def test_a_variable_goes_into_the_roles_that_name_it_and_no_other(
    site: Path, intent: dict[str, Any], only: set[str]
) -> None:
    before = digests(site, {})
    assert changed(before, digests(site, intent)) == only
    assert changed(before, digests(site, {}, extra=intent)) == only, "also for one run"


def test_a_variable_counts_through_another_that_names_it(site: Path) -> None:
    one = digests(site, {"model_store_huggingface_token": "{{ vault_hub }}", "vault_hub": "one"})
    two = digests(site, {"model_store_huggingface_token": "{{ vault_hub }}", "vault_hub": "two"})
    assert changed(one, two) == {"model_store"}
    assert "one" not in one["lab-01"].values()


def test_a_vault_that_is_closed_counts_by_its_ciphertext(site: Path) -> None:
    intent = {"model_store_huggingface_token": "{{ vault_hub }}"}
    vault = site / "group_vars" / "all" / "vault.yml"
    plain = site / "group_vars" / "all.yml"
    assert plain.is_file()
    closed = site / "host_vars" / "lab-01"
    closed.mkdir(parents=True)
    try:
        (closed / "vault.yml").write_text("$ANSIBLE_VAULT;1.1;AES256\n6161\n")
        one = digests(site, intent)
        (closed / "vault.yml").write_text("$ANSIBLE_VAULT;1.1;AES256\n6262\n")
        assert "model_store" in changed(one, digests(site, intent))
    finally:
        shutil.rmtree(closed.parent)
    assert not vault.exists()


# ---------------------------------------------------------------- what follows

WANTED = dict.fromkeys(rolevars.ROLES, "in")


def verdict(host: str = "one", **seals: Any) -> Verdict:
    """A host on which everything holds, but for what is given."""
    whole = {role: {"inputs": "in", "differs": [], "basis": []} for role in WANTED}
    return Verdict(
        host, seals={role: seals.get(role, row) for role, row in whole.items() if seals.get(role, row)}
    )


def due(*verdicts: Verdict) -> dict[str, set[str]]:
    found = seal.due(verdicts, {one.host: WANTED for one in verdicts})
    return {host: set(roles) for host, roles in found.items()}


ROW = {"what": "path /etc/x", "field": "mode", "expected": "0o644", "found": "0o600"}
JUDGED = {"preflight"}


def test_where_all_holds_nothing_is_played() -> None:
    assert due(verdict()) == {"one": set()}


@pytest.mark.parametrize(
    "row",
    [
        None,
        {"inputs": "other", "differs": [], "basis": []},
        {"inputs": "in", "differs": [ROW], "basis": []},
        {"inputs": "in", "differs": [], "basis": [ROW]},
    ],
)
def test_a_role_is_played_that_has_no_seal_or_one_that_does_not_hold(row: Any) -> None:
    assert due(verdict(system_settings=row)) == {"one": {"system_settings"} | JUDGED}


def test_roles_that_build_on_another_are_played_after_it_and_in_order() -> None:
    found = seal.due([verdict(engine_env=None)], {"one": WANTED})["one"]
    assert set(found) == {"engine_env", "library_fixes", "engine_service", "scheduled_restart"} | JUDGED
    assert list(found) == [role for role in rolevars.ROLES if role in found]


def test_timers_and_records_alone_need_no_look_at_the_node() -> None:
    found = due(verdict(run_stamp=None, scheduled_restart=None))
    assert found == {"one": {"run_stamp", "scheduled_restart"}}


def test_a_node_that_cannot_be_asked_or_that_a_run_holds_needs_everything() -> None:
    found = due(Verdict("gone", why="no answer"), Verdict("held", held=True, seals=verdict().seals))
    assert found == {"gone": set(WANTED), "held": set(WANTED)}


def test_a_model_that_one_node_lacks_is_brought_from_the_others() -> None:
    found = due(verdict("one"), verdict("new", model_store=None))
    assert "model_store" in found["one"] & found["new"]
    found = due(verdict("one"), Verdict("gone", why="no answer"))
    assert found["one"] == set(), "whether a node that does not answer lacks one is not known"


def test_every_role_that_is_built_on_comes_before_in_the_play() -> None:
    order = list(rolevars.ROLES)
    assert all(
        order.index(before) < order.index(role) for role, all_of in seal.FOLLOWS.items() for before in all_of
    )


@pytest.mark.parametrize("role", seal.IDLE)
def test_no_task_of_a_role_that_may_be_left_out_does_anything_with_its_defaults(role: str) -> None:
    """Each is skipped by its condition or loops over nothing."""
    from ansible.parsing.dataloader import DataLoader
    from ansible.template import Templar, trust_as_template

    tasks = yaml.safe_load((ROOT / "roles" / role / "tasks" / "main.yml").read_text())
    defaults = yaml.safe_load((ROOT / "roles" / role / "defaults" / "main.yml").read_text())
    known = {
        name: trust_as_template(value) if isinstance(value, str) else value
        for name, value in defaults.items()
    }
    templar = Templar(DataLoader(), variables=known)
    assert tasks
    for task in tasks:
        conditions = task.get("when", [])
        conditions = conditions if isinstance(conditions, list) else [conditions]
        skipped = "loop" in task and templar.template(trust_as_template(str(task["loop"]))) == []
        for text in conditions if not skipped else ():
            expression = trust_as_template("{{ " + text + " }}")
            skipped = skipped or templar.template(expression) is False
        assert skipped, f"{role}: {task['name']} does something"


def test_a_role_is_idle_where_the_plan_gives_it_its_defaults_and_the_inventory_says_nothing(
    site: Path,
) -> None:
    read, planned = inventory.read(str(site)), plan.load(str(site))
    variables = rolevars.of_plan(planned)
    found = seal.idle(variables, read.hosts)
    assert set(found["lab-01"]) == {"system_settings", "nvidia_driver", "cuda_runtime", "library_fixes"}
    variables["lab-01"]["system_settings_values"] = [{"name": "x", "path": "/proc/sys/x", "value": "1"}]
    said = [
        dataclasses.replace(host, variables={**host.variables, "cuda_runtime_check": True})
        for host in read.hosts
    ]
    assert set(seal.idle(variables, said)["lab-01"]) == {"nvidia_driver", "library_fixes"}


def test_an_idle_role_is_sealed_and_not_played_and_a_host_with_nothing_else_is_given_back_all_the_same() -> (
    None
):
    from bringup import playbook

    job = playbook.Job(Path("p"), Path("i"))
    idle = {"one": ("cuda_runtime",), "two": ("cuda_runtime",)}
    due = {"one": {"cuda_runtime": ["x"], "run_stamp": ["x"]}, "two": {"cuda_runtime": ["x"]}}
    found = playbook._narrowed(job, due, {"one": ["engine_env"], "two": ["engine_env", "run_stamp"]}, idle)
    assert found is not None
    assert (found.limit, found.tags) == (None, "run_stamp")
    assert found.extra["provision_sealed"] == {
        "cuda_runtime": ["one", "two"],
        "engine_env": ["one", "two"],
        "run_stamp": ["two"],
    }
    alone = playbook._narrowed(job, {"two": due["two"], "one": {}}, {"one": ["run_stamp"]}, idle)
    assert alone is not None
    assert (alone.limit, alone.tags) == ("two", "lock")
    assert playbook._narrowed(job, {"one": {}}, {}, idle) is None


def test_variables_that_a_command_worked_out_are_those_that_the_inventory_plugin_would(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bringup import handed

    planned = plan.load(str(site))
    variables = rolevars.of_plan(planned)
    assert handed.given(site) is None
    (tmp_path / "file").write_text(handed.text(site, variables))
    monkeypatch.setenv(handed.FILE, str(tmp_path / "file"))
    assert json.dumps(handed.given(site)) == json.dumps(variables)
    assert handed.given(tmp_path) is None, "another inventory's"


def test_what_a_run_takes_to_its_nodes_is_private_and_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "FOLDER", tmp_path)
    (tmp_path / "run-1").mkdir()
    seal.write_run(tmp_path / "run-1", {"one": {"files": "in"}}, {"one": ["files"]})
    assert seal.of_run("run-1") == {"one": {"inputs": {"files": "in"}, "played": ["files"]}}
    assert (tmp_path / "run-1" / seal.FILE).stat().st_mode & 0o077 == 0
    assert seal.of_run("") == seal.of_run("run-2") == {}


def test_code_goes_into_the_roles_that_reach_it_through_modules_programs_and_imports() -> None:
    programs = seal._Programs()

    def reached(*names: str) -> set[str]:
        files = programs._reached(path for name in names for path in programs._named[name])
        return {str(path.relative_to(ROOT)) for path in files}

    assert {"bringup/node/place.py", "bringup/node/undo.py", "plugins/action/node_files.py"} <= reached(
        "node_files"
    )
    assert {"bringup/preflight.py", "plugins/modules/node_facts.py", "bringup/node/facts.py"} <= reached(
        "preflight"
    )
    assert "bringup/node/store.py" not in reached("node_files", "preflight", "system_settings")


HARMLESS = {
    "preflight",
    *(f"ansible.builtin.{name}" for name in ("assert", "group_by", "include_tasks", "reboot")),
}
"""What leaves nothing on a node."""


@pytest.mark.parametrize("role", rolevars.ROLES)
def test_all_that_a_role_leaves_is_recorded_by_the_module_that_leaves_it(role: str) -> None:
    """A task that changes a node without recording it would be sealed as if it had left nothing."""
    programs = seal._Programs()
    tasks = yaml.safe_load((ROOT / "roles" / role / "tasks" / "main.yml").read_text())
    used = {
        key for task in tasks for key in task if key.startswith("ansible.builtin.") or key in programs._named
    }
    recording = {
        name
        for name in used - HARMLESS
        for path in programs._reached(programs._named.get(name, []))
        if path.name != "seal.py" and "seal.claim(" in path.read_text()
    }
    assert used, "its tasks are seen"
    assert used - HARMLESS - recording == set()


def test_a_record_tells_of_a_host_what_was_played_and_what_was_as_it_was_left() -> None:
    from bringup import events, playbook

    roles = {
        "play": events.RoleOutcome(ok=2),
        "files": events.RoleOutcome(ok=1),
        "users": events.RoleOutcome(skipped=1),
    }
    outcome = events.Outcome(hosts={"one": events.HostOutcome(ok=3, done=True, roles=roles)})
    left = playbook.Left(None, {"one": ("users",), "two": ("files", "users")}, ("said",))
    found = playbook.with_sealed(outcome, left)
    assert (list(found.hosts["one"].roles), found.hosts["one"].sealed) == (["play", "files"], ("users",))
    assert found.hosts["two"] == events.HostOutcome(done=True, sealed=("files", "users"))
    assert found.notes == ("said",)


def test_who_has_not_answered_is_named_while_nodes_are_asked() -> None:
    hosts = [fleet.Host(f"h20-{number:02}", "192.0.2.1") for number in range(1, 4)]
    asked = sealcheck.Asked(hosts)
    asked.answered(hosts[1])
    assert str(asked).endswith("no answer yet from h20-01, h20-03")
