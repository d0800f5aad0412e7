"""Reading one YAML file into one frozen model, with every problem of the file at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from bringup.errors import Problem, UsageError, did_you_mean

try:
    from yaml import CSafeLoader as _BaseLoader
except ImportError:  # a PyYAML without libyaml
    from yaml import SafeLoader as _BaseLoader  # type: ignore[assignment]


class Entry(BaseModel):
    """Base of every catalog model: frozen, and an unknown key is an error."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=False, protected_namespaces=(), allow_inf_nan=False
    )


EntryT = TypeVar("EntryT", bound=Entry)


class _Loader(_BaseLoader):
    """A safe loader that refuses a key given twice, which YAML would silently let win."""


def _mapping(loader: Any, node: Any, deep: bool = False) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue  # `<<`: what it brings is overruled by what is written out
        key = loader.construct_object(key_node, deep=True)
        if isinstance(key, (str, int)) and key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f'key "{key}" is given twice', key_node.start_mark
            )
        if isinstance(key, (str, int)):
            seen.add(key)
    result: dict[Any, Any] = yaml.SafeLoader.construct_mapping(loader, node, deep=deep)
    return result


class Vaulted(str):
    """A value encrypted by Ansible vault: it stays closed here, and Ansible opens it on the way to a node."""

    __slots__ = ()


def _vaulted(loader: Any, node: Any) -> Vaulted:
    return Vaulted(loader.construct_scalar(node))


def _unsafe(loader: Any, node: Any) -> str:
    return str(loader.construct_scalar(node))


_Loader.add_constructor("!vault", _vaulted)
_Loader.add_constructor("!unsafe", _unsafe)
_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises UsageError that names `where`, line and column."""
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 (a safe loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise UsageError(Problem(place, f"not valid YAML: {error.problem}")) from None
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise UsageError(Problem(where, f"not valid YAML: {error}")) from None


def read_text(path: Path, where: str) -> str:
    """A UTF-8 file's text. Raises UsageError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(Problem(where, f"cannot be read: {error.strerror}")) from None
    except UnicodeDecodeError as error:
        raise UsageError(Problem(where, f"not UTF-8 text: {error.reason}")) from None


def read_yaml(path: Path, where: str | None = None) -> Any:
    """A YAML file's value; `where` is how messages call the file (default: its path)."""
    name = where or str(path)
    return parse_yaml(read_text(path, name), name)


def build(model: type[EntryT], data: Any, where: str) -> EntryT:
    """`data` as `model`. Raises UsageError with every problem, each with its key."""
    if not isinstance(data, dict):
        kind = "empty" if data is None else f"a {type(data).__name__}"
        raise UsageError(Problem(where, f"should be a mapping of keys, is {kind}"))
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise UsageError(problems_of(error, model, where)) from None


def problems_of(error: ValidationError, model: type[BaseModel], where: str) -> list[Problem]:
    """One Problem for each of pydantic's errors, with a suggestion for a misspelt key."""
    return [_problem(item, model, where) for item in error.errors(include_url=False)]


def _problem(item: Any, model: type[BaseModel], where: str) -> Problem:
    location = item["loc"]
    key = ".".join(str(part) for part in location) or "(whole file)"
    if item["type"] == "extra_forbidden":
        return Problem(f"{where}: {key}", "unknown key", _key_hint(model, location))
    if item["type"] == "missing":
        return Problem(f"{where}: {key}", "is required and missing")
    message = str(item["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return Problem(f"{where}: {key}", message[:1].lower() + message[1:])


def _key_hint(model: type[BaseModel], location: tuple[Any, ...]) -> str:
    """The closest key of the (possibly nested) model that `location` lies in."""
    here: Any = model
    for part in location[:-1]:
        here = _step(here, part)
        if here is None:
            return ""
    fields = getattr(here, "model_fields", None)
    return did_you_mean(str(location[-1]), fields) if fields else ""


def _step(here: Any, part: Any) -> Any:
    fields = getattr(here, "model_fields", None)
    if fields is None or part not in fields:
        return here if isinstance(part, int) else None
    return _model_in(fields[part].annotation)


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in getattr(annotation, "__args__", ()):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
