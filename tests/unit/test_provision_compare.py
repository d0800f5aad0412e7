"""The comparison of provisioning (`bench/provision/compare`): what can be known without hosts."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from bench.provision.compare import floor, product, report, stock, tree, workload

DATA = workload.read()
DIGESTS = {name: f"{at:064x}" for at, name in enumerate(DATA["weights"])}


def test_stock_modules_have_a_task_for_each_thing() -> None:
    (play,) = stock.playbook(DATA, DIGESTS)
    things = workload.things(DATA, DIGESTS, "node-001")
    # A user is two tasks: its group comes first.
    assert len(play["tasks"]) == len(things) + len(DATA["accounts"]) == 56


def test_every_thing_belongs_to_one_role_and_every_line_to_a_file() -> None:
    things = workload.things(DATA, DIGESTS, "node-001")
    whole = workload.by_lines(things)
    assert {thing.part for thing in things} == set(workload.PARTS)
    assert not [thing for thing in whole if thing.kind == "line"]
    assert max(Counter(thing.path for thing in whole).values()) == 1


def test_one_value_changes_two_files_of_one_role() -> None:
    other = {**DATA, "values": {**DATA["values"], "restart_hour": 5}}
    pairs = zip(workload.things(DATA, DIGESTS, "a"), workload.things(other, DIGESTS, "a"), strict=True)
    assert [after.part for before, after in pairs if before != after] == ["schedule", "schedule"]


def test_the_script_is_python_and_holds_the_things(tmp_path: Path) -> None:
    program = floor.program(DATA, DIGESTS, "node-001")
    compile(program, "script", "exec")
    assert "node-001 serves" in program


def test_the_products_playbook_takes_the_comparisons_roles(tmp_path: Path) -> None:
    product.make(tmp_path, workload.THINGS, DIGESTS, {"node-001": "192.0.2.1"}, {})
    plays = yaml.safe_load((tmp_path / "playbooks/provision.yml").read_text())
    names = [name for play in plays for name in product._names(play)]
    assert names == ["preflight", *product.ROLES, "run_stamp"]
    locks = yaml.safe_dump(plays).count("node_lock:")
    before = product._git("show", "HEAD:playbooks/provision.yml").decode()
    assert locks == before.count("node_lock:")
    shown = subprocess.run(
        ["python", "-c", "from bringup import plan, rolevars; p = plan.load('compared'); "
         "print(sorted(rolevars.variables(p.hosts[0], p)))"],
        cwd=tmp_path, env={"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "work_schedule_entries" in shown.stdout


def test_a_tree_tells_of_what_differs_and_nothing_else(tmp_path: Path) -> None:
    root, upper = tmp_path / "root", tmp_path / "up"
    for base in (root, upper):
        (base / "etc").mkdir(parents=True)
        (base / "etc/same").write_text("same")
        (base / "var/lib/bringup").mkdir(parents=True)
    (upper / "etc/other").write_text("other")
    (upper / "var/lib/bringup/seal").write_text("ours")
    assert list(tree.lines(upper, root)) == ["etc/other"]


@pytest.mark.parametrize(("value", "text"), [(123.4, "123"), (12.34, "12.3"), (0.123, "0.12")])
def test_figures_have_two_digits_that_mean_something(value: float, text: str) -> None:
    assert report.figure(value) == text


def test_ratios_are_of_the_same_turn() -> None:
    rows = [
        {"session": "s", "repeat": at, "contender": name, "wall_s": wall}
        for at, walls in enumerate(((10.0, 2.0), (30.0, 3.0), (8.0, 2.0)))
        for name, wall in zip(("a", "b"), walls, strict=True)
    ]
    assert report.ratio(rows, "a", "b", report.wall) == 5.0
