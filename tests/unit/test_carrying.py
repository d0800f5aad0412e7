"""Modules that are sent to a node as one program: what they take, what they answer, and that nothing is missing."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator

from bringup import ROOT, carrying, closing, narrowing
from bringup.node import kept, light

MODULES = sorted(path.stem for path in (ROOT / "plugins" / "modules").glob("*.py"))
CARRIED = [name for name in MODULES if "def main(" in (carrying.MODULES / f"{name}.py").read_text()]


def asked(
    name: str, options: dict[str, Any], check: bool = True, last: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a module answers on this machine, sent as it is to a node."""
    text = carrying.program(name) + carrying.call(options, check, last=last)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    return carrying.answer(name, done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("name", CARRIED)
def test_every_module_starts_with_nothing_of_ansible_and_names_what_it_does_not_know(name: str) -> None:
    """To come so far, all that it imports must have come along."""
    answer = asked(name, {"no such option": 1})
    assert answer["failed"]
    assert answer["msg"].startswith("Unsupported parameters: no such option. Supported"), answer


def test_every_module_has_an_action_that_carries_it() -> None:
    actions = {path.stem for path in (ROOT / "plugins" / "action").glob("*.py")}
    assert set(MODULES) <= actions


SPEC: dict[str, Any] = {
    "text": {"type": "str"},
    "needed": {"type": "str", "required": True},
    "flag": {"type": "bool", "default": False},
    "count": {"type": "int", "default": 3},
    "share": {"type": "float", "default": 0},
    "words": {"type": "list", "elements": "str", "default": []},
    "numbers": {"type": "list", "elements": "int"},
    "where": {"type": "path"},
    "one of": {"type": "str", "choices": ["a", "b"], "default": "a"},
    "row": {"type": "dict"},
    "rows": {
        "type": "list",
        "elements": "dict",
        "options": {
            "name": {"type": "str", "required": True},
            "on": {"type": "bool", "default": True},
            "maybe": {"type": "bool"},
            "paths": {"type": "list", "elements": "str", "default": []},
        },
    },
}
GIVEN: list[dict[str, Any]] = [
    {"needed": "x"},
    {"needed": 7, "text": '100% $HOME "ü"', "flag": "yes", "count": "12", "share": "0.5"},
    {"needed": "", "flag": "off", "words": "a, b", "numbers": ["1", 2], "where": "~/x"},
    {"needed": "x", "rows": [{"name": "r"}, {"name": "s", "on": "no", "maybe": False, "paths": ["/a b"]}]},
    {"needed": "x", "row": {"a": [1, None, {"b": "ü"}]}, "words": None, "text": None},
    {"needed": "x", "words": 3, "row": '{"a": 1}'},
    {},
    {"needed": None},
    {"needed": "x", "flag": "perhaps"},
    {"needed": "x", "count": "many"},
    {"needed": "x", "count": 1.5},
    {"needed": "x", "one of": "c"},
    {"needed": "x", "row": "text"},
    {"needed": "x", "rows": [{"on": True}]},
    {"needed": "x", "rows": [{"name": "r", "other": 1}]},
    {"needed": "x", "numbers": ["x"]},
    {"needed": "x", "words": {"a": 1}},
]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_options_are_taken_and_refused_as_ansible_does(given: dict[str, Any]) -> None:
    found = ArgumentSpecValidator(SPEC).validate(json.loads(json.dumps(given)))
    try:
        ours = light.checked(SPEC, given)
    except light.WrongOptions:
        assert found.error_messages, "Ansible takes it"
    else:
        assert found.error_messages == []
        assert ours == found.validated_parameters


def test_a_module_does_its_work_and_its_answer_is_found_among_what_else_was_said(tmp_path: Path) -> None:
    entry = {"path": str(tmp_path / "file"), "content": '100% $HOME "ü"\n'}
    answer = asked("node_files", {"entries": [entry]})
    assert (answer["changed"], answer["changed_paths"]) == (True, [entry["path"]])
    assert not (tmp_path / "file").exists(), "it is check mode"
    noise = f"a banner\n{light.MARK}{json.dumps(answer)}\ngoodbye"
    assert carrying.answer("node_files", 0, noise, "") == answer


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ("new", "also new", {"changed": True, "last changed": True, "failed": False}),
        ("new", "old", {"changed": True, "last changed": False, "failed": False}),
        # Nothing was changed: what would have come along comes by itself.
        ("old", "also new", {"changed": False, "last changed": None, "failed": False}),
        ("new", None, {"changed": True, "last changed": False, "failed": True}),
        (None, "also new", {"changed": False, "last changed": None, "failed": True}),
    ],
)
def test_a_program_goes_on_with_another_module_only_where_the_first_changed_something(
    first: str | None, then: str | None, said: dict[str, Any], tmp_path: Path
) -> None:
    def options(name: str, content: str | None) -> dict[str, Any]:
        if content is None:
            return {"entries": [{"path": str(tmp_path / name), "state": "nonsense"}]}
        return {"entries": [{"path": str(tmp_path / name), "content": content}]}

    for name in ("one", "two"):
        (tmp_path / name).write_text("old")
    last = {"name": "node_files", "options": options("two", then)}
    answer = asked("node_files", options("one", first), check=False, last=last)
    told = answer.get(light.LAST)
    assert said == {
        "changed": answer["changed"],
        "last changed": told["changed"] if told else None,
        "failed": bool(answer.get("failed")),
    }
    assert (tmp_path / "one").read_text() == ("new" if said["changed"] else "old")
    assert (tmp_path / "two").read_text() == (then if said["last changed"] else "old")
    assert ("nonsense" in answer.get("msg", "")) is said["failed"]
    if told and not said["failed"]:
        assert closing.parted(answer)["add_group"] == narrowing.DONE_GROUP
    else:
        assert "add_group" not in closing.parted(answer)


def test_a_module_that_breaks_says_where_and_one_that_says_nothing_is_a_failure() -> None:
    broken = asked("node_files", {"entries": [{"path": 1}]})
    assert broken["failed"]
    assert "bringup/node/place.py:" in broken["msg"]
    assert carrying.answer("node_units", 1, "", "sudo: a password is required\n") == {
        "failed": True,
        "msg": "node_units ended without an answer (exit 1): sudo: a password is required",
        "rc": 1,
    }


def test_values_of_options_that_must_not_be_shown_do_not_come_back() -> None:
    spec: dict[str, dict[str, Any]] = {
        "token": {"type": "str", "no_log": True},
        "name": {"type": "str"},
    }
    hidden = light.secrets(spec, {"token": "s3cret", "name": "plain"})
    told = light.without({"msg": "tried s3cret", "rows": [{"a": ("s3cret", 1)}]}, hidden)
    assert "s3cret" not in json.dumps(told)
    assert "plain" not in hidden


def test_what_a_module_hands_on_of_its_own_library_is_whole() -> None:
    """Models' modules start programs of the library from its text (`inspect.getsource`)."""
    texts = {path.stem: path.read_text() for path in carrying.NODE.glob("*.py")}
    module = (
        "import inspect, json\n"
        "from ansible.module_utils.basic import AnsibleModule\n"
        "from ansible.module_utils.bringup_node import chain, fetch\n"
        "module = AnsibleModule(argument_spec={})\n"
        "files = [str(part.__file__) for part in (chain, fetch)]\n"
        "module.exit_json(text=inspect.getsource(fetch), files=files)\n"
    )
    parts = [("light", Path(light.__file__).read_text()), ("modules/demo", module), *texts.items()]
    text = f"{carrying.bundle(parts)}name = 'demo'\n{carrying.START}{carrying.call({}, check=False)}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-"], input=text, capture_output=True, text=True, timeout=60, check=False
    )
    told = carrying.answer("demo", done.returncode, done.stdout, done.stderr)
    assert told.get("text") == texts["fetch"], told
    assert [Path(name).name for name in told["files"]] == ["chain.py", "fetch.py"]


def test_no_module_is_called_like_a_part_of_the_library() -> None:
    """Both lie in one program by their names."""
    assert not {f"modules/{name}" for name in MODULES} & {path.stem for path in carrying.NODE.glob("*.py")}


KEEPS = """
import os
exec(open({kept!r}).read())
FOLDER = {folder!r}
code = compiled({text!r}, "told.py", "d1")
exec(code)
print(sorted(name.partition("-")[0] for name in os.listdir(FOLDER)) if os.path.isdir(FOLDER) else "nothing kept")
"""


def _kept(folder: Path, text: str) -> list[str]:
    program = KEEPS.format(kept=kept.__file__, folder=str(folder), text=text)
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root keeps code")
def test_code_is_kept_by_its_digest_and_never_in_a_folder_that_others_may_write(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    assert _kept(ours, "print('first')") == ["first", "['d1']"]
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700
    # The same digest is the same text: what was compiled then runs now.
    assert _kept(ours, "print('second')") == ["first", "['d1']"]
    for path in ours.iterdir():
        path.write_bytes(path.read_bytes()[:20])
    assert _kept(ours, "print('third')") == ["third", "['d1']"]
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert _kept(open_to_all, "print('fourth')") == ["fourth", "[]"]


def test_a_lean_text_keeps_its_lines_and_all_that_is_evaluated() -> None:
    text = (
        "from __future__ import annotations\nfrom collections.abc import Callable, Mapping\nfrom typing import (\n"
        "    Any,\n)\nfrom typing import NamedTuple\n\n\n"
        "def f(x: Any) -> Mapping[str, Any]:\n    y: Any = x\n    return y\n\n\n"
        "class One(NamedTuple):\n    a: int\n\n\nKINDS = {'a': Callable[[int], int]}\n"
    )
    found = carrying.lean(text)
    assert found.count("\n") == text.count("\n")
    assert "from typing import (" not in found
    assert "from collections.abc import Callable, Mapping" in found
    assert "from typing import NamedTuple" in found
    exec(compile(found, "found", "exec"), {})  # noqa: S102 (our own)
    without = text.replace("from __future__ import annotations", "")
    assert carrying.lean(without) == without


def test_what_is_imported_later_is_the_real_thing() -> None:
    program = (
        f"exec(open({light.__file__!r}).read())\nprovide({{}}, None)\nimport inspect, dataclasses\n"
        "before = type(inspect).__name__\nassert inspect.signature(print)\n"
        "import inspect as again\nassert again.signature is inspect.signature\n"
        "print(before, type(again).__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["Later", "module"]


def test_a_program_that_is_read_back_is_the_one_that_would_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(carrying, "KEPT", tmp_path / "programs")
    made = carrying.program.__wrapped__("run_stamp")
    (path,) = carrying.KEPT.iterdir()
    assert carrying.KEPT.stat().st_mode & 0o077 == 0
    assert path.read_text() == made == carrying.program.__wrapped__("run_stamp")
    # Of another library it is another.
    monkeypatch.setattr(carrying, "_header", lambda: "# another\n")
    assert carrying.program.__wrapped__("run_stamp") != made
    assert len(list(carrying.KEPT.iterdir())) == 1
