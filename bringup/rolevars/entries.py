"""Entries of module `node_files`, as the roles' variables hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bringup import systemd
from bringup.planned import Service

COMPILER_VARIABLES: Mapping[str, str] = {"c": "CC", "c++": "CXX"}
"""Language -> the variable by which a profile names its own compiler."""

VERIFY = ["systemd-analyze", "verify", "--man=no", "%s"]


def folder(
    path: str, owner: str = "root", group: str = "root", mode: str = "0755", whole: bool = False
) -> dict[str, Any]:
    """A folder; `whole`: an undo removes it with all that programs have put into it."""
    made = {"path": path, "state": "directory", "owner": owner, "group": group, "mode": mode}
    return {**made, "whole": True} if whole else made


def file(path: str, content: str, mode: str = "0644") -> dict[str, Any]:
    """A file of root's."""
    return {"path": path, "state": "file", "content": content, "owner": "root", "group": "root", "mode": mode}


def unit(name: str, content: str, beside: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A unit file, checked by systemd before it counts; `name` with its suffix, `beside` the units of other
    roles that it needs.
    """
    return {**file(systemd.unit_file(name), content), "validate": VERIFY, "beside": dict(beside or {})}


def drop_in(service: Service, name: str) -> str:
    """Where a role adds to a server's unit; the server is due for a restart when it is another."""
    return f"{systemd.unit_file(f'{service.unit}.service')}.d/50-{name}.conf"


def linking(service: Service) -> dict[str, Any]:
    """What a service asks of a compiler at its start: languages (none: nothing), libraries that it links, and what its
    profile has of its own (CC and CXX by language, and LIBRARY_PATH as a list)."""
    own = service.environment
    return {
        "languages": list(service.compiles),
        "links": list(service.links),
        "compilers": {language: own[name] for language, name in COMPILER_VARIABLES.items() if name in own},
        "folders": [folder for folder in own.get("LIBRARY_PATH", "").split(":") if folder],
    }


def library(names: Iterable[str]) -> list[dict[str, Any]]:
    """Programs of the node, and the names by which they import each other (`bringup.node` is the folder
    itself).
    """
    base = systemd.LIBRARY
    programs = [{**file(str(base / f"{name}.py"), ""), "program": f"{name}.py"} for name in names]
    for program in programs:
        del program["content"]
    return [
        folder(str(base.parent)),
        folder(str(base), whole=True),
        folder(str(base / "bringup")),
        {"path": str(base / "bringup/node"), "state": "link", "target": ".."},
        *programs,
    ]


def key(service: Service) -> dict[str, str]:
    """Where a service's API key goes, and the variable of the vault that holds it."""
    if service.api_key is None:
        raise ValueError(f"{service.name} has no API key")
    return {
        "service": service.name,
        "path": systemd.key_file(service) or "",
        "variable": service.api_key.vault,
    }
