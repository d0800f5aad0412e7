"""Reading YAML files: a key given twice is an error, values encrypted by Ansible vault stay closed (I/O).

PyYAML is imported with the first file: most commands find what they need read already (`bringup.known`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from bringup.errors import Problem, UsageError


class Vaulted(str):
    """A value encrypted by Ansible vault: it stays closed here, and Ansible opens it on the way to a node."""

    __slots__ = ()


@cache
def _loader() -> Any:
    """A safe loader that refuses a key given twice, which YAML would silently let win."""
    import yaml

    # A PyYAML without libyaml has no CSafeLoader. The class is our own, as constructors are added to it.
    made: Any = type("Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})

    def mapping(loader: Any, node: Any, deep: bool = False) -> dict[Any, Any]:
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

    made.add_constructor("!vault", lambda loader, node: Vaulted(loader.construct_scalar(node)))
    made.add_constructor("!unsafe", lambda loader, node: str(loader.construct_scalar(node)))
    made.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return made


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises UsageError that names `where`, line and column."""
    import yaml

    try:
        return yaml.load(text, Loader=_loader())  # noqa: S506 (a safe loader)
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
