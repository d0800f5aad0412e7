"""What a module of ours stands on when it is sent to a node as one program, in place of Ansible's own wrapping.

Ansible packs a module with its library into an archive that a node unpacks and compiles at every task: 0.2 s of its
time. Our modules need little of that library: their options, checked, and a way to say how it went. That is here.
Everything else of a module is the same, whichever way it came (`bringup/carrying.py`, controller's side).

Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import types
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
"""As in `typing`, which takes longer to import than most modules take to do their work."""

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, NoReturn, TypeAlias

    Compiled: TypeAlias = Callable[[str, str], types.CodeType]
    """Name of a part and path -> its code."""

PACKAGE = "ansible.module_utils.bringup_node"
BASIC = "ansible.module_utils.basic"
MARK = "bringup-answer: "
"""Begins the line of the answer; what comes before it is somebody else's."""

HELD = "bringup_held"
"""Field of an answer: how the node came to be held for the run, and the other run that holds or held it."""

LAST = "bringup_last"
"""Field of an answer: what the module said that was gone on with."""

NOT_HELD = ("refused", "closed")

ROLE = "BRINGUP_ROLE"
"""As in `seal`."""

HIDDEN = "VALUE_SPECIFIED_IN_NO_LOG_PARAMETER"
YES = ("y", "yes", "on", "1", "true", "t", "1.0")
NO = ("n", "no", "off", "0", "false", "f", "0.0")


class WrongOptions(ValueError):
    """What is wrong with the options, for the operator."""


def checked(
    spec: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any], where: str = ""
) -> dict[str, Any]:
    """The options as an `argument_spec` has them: defaults, types, choices, options of options. Raises WrongOptions.

    Sub-option defaults apply here as they do with Ansible.
    """
    unknown = sorted(set(given) - set(spec))
    if unknown:
        names = ", ".join(sorted(spec))
        raise WrongOptions(
            f"Unsupported parameters{where}: {', '.join(unknown)}. Supported parameters: {names}"
        )
    missing = sorted(name for name, rule in spec.items() if rule.get("required") and name not in given)
    if missing:
        raise WrongOptions(f"missing required arguments{where}: {', '.join(missing)}")
    return {
        name: _value(name, rule, given.get(name, rule.get("default")), where) for name, rule in spec.items()
    }


def _value(name: str, rule: Mapping[str, Any], value: Any, where: str) -> Any:
    if value is None and not rule.get("required") and rule.get("default") is None:
        return None
    at = f"{where or ' of'} {name}"
    value = _typed(rule.get("type", "str"), value, at)
    if isinstance(value, list) and "elements" in rule:
        value = [_typed(rule["elements"], one, at) for one in value]
    if "options" in rule:
        several = isinstance(value, list)
        rows = [checked(rule["options"], one, at) for one in (value if several else [value])]
        value = rows if several else rows[0]
    for one in value if isinstance(value, list) else [value]:
        if rule.get("choices") and one not in rule["choices"]:
            choices = ", ".join(map(str, rule["choices"]))
            raise WrongOptions(f"value{at} must be one of: {choices}, got: {one}")
    return value


def _typed(kind: str, value: Any, at: str) -> Any:
    try:
        return TYPES[kind](value)
    except (TypeError, ValueError):
        found = f"{type(value).__name__} {value!r:.60}"
        raise WrongOptions(f"argument{at} cannot be converted to {kind}: it is {found}") from None


def _bool(value: Any) -> bool:
    text = str(value).strip().lower()
    if text in (*YES, *NO):
        return text in YES
    raise ValueError(value)


def _int(value: Any) -> int:
    if isinstance(value, float) and value != int(value):
        raise ValueError(value)
    return int(value)


def _str(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _path(value: Any) -> str:
    return os.path.expanduser(os.path.expandvars(_str(value)))  # noqa: PTH111 (as Ansible does it)


def _list(value: Any) -> list[Any]:
    if isinstance(value, str):
        return value.split(",")
    if isinstance(value, (int, float)):
        return [str(value)]
    if isinstance(value, (list, tuple)):
        return list(value)
    raise ValueError(value)


def _dict(value: Any) -> dict[str, Any]:
    found = json.loads(value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise TypeError(value)
    return found


TYPES: dict[str, Callable[[Any], Any]] = {
    "bool": _bool,
    "dict": _dict,
    "float": float,
    "int": _int,
    "list": _list,
    "path": _path,
    "raw": lambda value: value,
    "str": _str,
}


def secrets(spec: Mapping[str, Mapping[str, Any]], params: Mapping[str, Any]) -> list[str]:
    """Values of options that must not be shown, the longest first."""
    found = {str(params[name]) for name, rule in spec.items() if rule.get("no_log") and params.get(name)}
    return sorted(found, key=len, reverse=True)


def without(value: Any, hidden: Sequence[str]) -> Any:
    """A result in which no secret stands."""
    if isinstance(value, dict):
        return {name: without(one, hidden) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [without(one, hidden) for one in value]
    if isinstance(value, str):
        for secret in hidden:
            value = value.replace(secret, HIDDEN)
    return value


class AnsibleModule:
    """The part of Ansible's class of this name that modules of ours use. `request`: what the controller asks."""

    request: Mapping[str, Any] = {}
    held: Mapping[str, Any] = {}
    first: Mapping[str, Any] = {}
    """What the module before this one said, whose answer is not told yet."""

    def __init__(
        self, argument_spec: Mapping[str, Mapping[str, Any]], supports_check_mode: bool = False
    ) -> None:
        self._hidden: list[str] = []
        self._warnings: list[str] = []
        self.check_mode = bool(self.request.get("check"))
        try:
            self.params = checked(argument_spec, self.request["options"])
        except WrongOptions as error:
            self.fail_json(str(error))
        self._hidden = secrets(argument_spec, self.params)
        if self.check_mode and not supports_check_mode:
            self.exit_json(skipped=True, msg="this module does not support check mode")

    def log(self, text: str) -> None:
        """Nothing: what was done stands in the run's record and in the stamp."""

    def warn(self, text: str) -> None:
        """Said to the operator with the result."""
        self._warnings.append(text)

    def exit_json(self, **result: Any) -> NoReturn:
        """Ends with a result."""
        self._end({"changed": False, **result}, 0)

    def fail_json(self, msg: str, **result: Any) -> NoReturn:
        """Ends with a failure."""
        self._end({"changed": False, **result, "failed": True, "msg": msg}, 1)

    def _end(self, result: Mapping[str, Any], code: int) -> NoReturn:
        more = {"warnings": self._warnings} if self._warnings else {}
        answer = without({**result, **more}, self._hidden)
        if self.first:
            failure = {"failed": True, "msg": answer["msg"]} if code else {}
            answer = {**self.first, **failure, LAST: answer}
        elif self.request.get("last") and answer.get("changed") and not code:
            raise GoOn(answer)
        say(answer)
        raise SystemExit(code)


class GoOn(SystemExit):
    """Ends a module whose answer is told with that of the next one."""

    def __init__(self, answer: Mapping[str, Any]) -> None:
        super().__init__(0)
        self.answer = answer


def say(result: Mapping[str, Any]) -> None:
    """The answer, on a line of its own, with how the node came to be held when that was asked for too."""
    sys.stdout.write(f"\n{MARK}{json.dumps({**result, **AnsibleModule.held}, default=str)}\n")
    sys.stdout.flush()


class Sources:
    """Finds modules among texts, and gives the texts to whoever asks for them (`inspect.getsource`)."""

    def __init__(self, texts: Mapping[str, str], compiled: Compiled) -> None:
        self._texts = texts
        self._compiled = compiled

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """As the import system asks."""
        package, _, short = name.rpartition(".")
        if package != PACKAGE or short not in self._texts:
            return None
        loader: Any = self
        return ModuleSpec(name, loader, origin=f"/bringup/node/{short}.py")

    def create_module(self, spec: ModuleSpec) -> None:
        """As usual."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs the text."""
        spec = module.__spec__
        module.__file__ = spec.origin if spec else None
        exec(self._compiled(module.__name__.rpartition(".")[2], str(module.__file__)), module.__dict__)  # noqa: S102

    def get_source(self, name: str) -> str:
        """A module's text."""
        return self._texts[name.rpartition(".")[2]]


class Later(types.ModuleType):
    """A module of Python's own that is imported when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        """Only asked for what is not there yet."""
        import importlib

        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        found = importlib.import_module(self.__name__)
        self.__dict__.update(found.__dict__)
        return getattr(found, name)


LATER = ("bz2", "inspect", "ipaddress", "lzma")
"""What `dataclasses`, `pathlib` and `shutil` import for what modules of ours hardly ever ask of them: a quarter of the
time that a module takes."""


def provide(texts: Mapping[str, str], compiled: Compiled) -> None:
    """Lets modules import what they would find with Ansible: their own library and `AnsibleModule`."""
    for name in ("ansible", "ansible.module_utils", PACKAGE, BASIC):
        module = types.ModuleType(name)
        module.__path__ = []
        sys.modules[name] = module
    for name in LATER:
        sys.modules.setdefault(name, Later(name))
    sys.modules[BASIC].AnsibleModule = AnsibleModule  # type: ignore[attr-defined]
    sys.meta_path.insert(0, Sources(texts, compiled))


def run(
    name: str,
    texts: Mapping[str, str],
    digests: Mapping[str, str],
    compiled: Callable[[str, str, str], types.CodeType],
    request: Mapping[str, Any],
) -> None:
    """Runs the module `name` (`modules/NAME` of `texts`, which has its library too), and where that changed something
    the one that is to be gone on with (`last`: name, options); ends the process. `compiled`: text, path and digest ->
    code (`bringup/node/kept.py`)."""

    def play(part: str) -> None:
        exec(compiled(texts[part], f"/bringup/{part}.py", digests[part]), {"__name__": "__main__"})  # noqa: S102

    AnsibleModule.request = request
    provide(texts, lambda part, path: compiled(texts[part], path, digests[part]))
    part = f"modules/{name}"
    try:
        if request.get("lock"):
            from ansible.module_utils.bringup_node import nodelock

            how = nodelock.take(request["lock"])
            AnsibleModule.held = {HELD: how}
            if how["how"] in NOT_HELD:
                say({"failed": True, "changed": False, "msg": "the node is not held for this run"})
                raise SystemExit(1)
        try:
            play(part)
        except GoOn as done:
            last = request["last"]
            name, part = last["name"], f"modules/{last['name']}"
            AnsibleModule.first, AnsibleModule.request = done.answer, {"options": last["options"]}
            # What it owns is its own role's.
            os.environ[ROLE] = name
            play(part)
    except Exception as error:
        import traceback

        frames = traceback.extract_tb(error.__traceback__)
        last = next((one for one in reversed(frames) if one.filename.startswith("/bringup/")), frames[-1])
        msg = f"{name}: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        failed = {"failed": True, "msg": msg, "exception": traceback.format_exc()}
        say({"changed": False, **AnsibleModule.first, **failed})
        raise SystemExit(1) from None
