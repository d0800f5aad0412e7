"""What every contender brings about (`things/things.yml`), as one list of things for each host.

Read by all of them, so that nobody's list can differ: the playbook of stock modules is made from it, pyinfra's
deploy, our role variables and the script of the floor read it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import yaml

FOLDER = Path(__file__).resolve().parent / "things"
THINGS = FOLDER / "things.yml"
TEMPLATES = FOLDER / "templates"
PARTS = ("settings", "service", "schedule", "weights")
"""Roles of ours, in the order in which they are played."""

RIGHTS = {"owner": "root", "group": "root"}


@dataclass(frozen=True)
class Thing:
    """One thing on a host. `kind`: account, folder, file, link, line, absent, weight; `content` is rendered text.

    `source`: the template that the content comes from; `key` how a line begins that is replaced; `sha256` of a weight.
    """

    kind: str
    part: str
    path: str
    owner: str = "root"
    group: str = "root"
    mode: str = "0644"
    content: str = ""
    source: str = ""
    target: str = ""
    key: str = ""
    line: str = ""
    sha256: str = ""

    def row(self) -> dict[str, Any]:
        """As plain data, without what is empty."""
        return {name: value for name, value in asdict(self).items() if value}


@cache
def _read(path: Path, changed_ns: int) -> str:
    return json.dumps(yaml.safe_load(path.read_text(encoding="utf-8")))


def read(path: Path = THINGS) -> dict[str, Any]:
    """The file as it is."""
    found: dict[str, Any] = json.loads(_read(path, path.stat().st_mtime_ns))
    return found


@cache
def _template(name: str) -> jinja2.Template:
    # As Ansible's template module has it, so that all render the same bytes.
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(  # noqa: S701 (files of a system, no web pages)
        loader=loader, trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template(name)


def things(data: Mapping[str, Any], digests: Mapping[str, str], host: str) -> list[Thing]:
    """Every thing of one host, in the order in which it must be made. `digests`: sha256 of each weight."""
    values = {**data["values"], "node": host}
    found = [Thing("account", "service", name) for name in data["accounts"]]
    found += [Thing("folder", **{"mode": "0755", **row}) for row in data["folders"]]
    for row in data["templates"]:
        rest = {name: value for name, value in row.items() if name != "src"}
        found.append(Thing("file", **rest, source=row["src"], content=_template(row["src"]).render(values)))
    found += [Thing("file", **row) for row in data["files"]]
    found += [Thing("link", **row) for row in data["links"]]
    found += [Thing("line", **row) for row in data["lines"]]
    found += [Thing("absent", **row) for row in data["absent"]]
    folder = data["values"]["weights"]
    found += [
        Thing("weight", "weights", f"{folder}/{name}", sha256=digests[name]) for name in data["weights"]
    ]
    return found


def by_lines(found: list[Thing]) -> list[Thing]:
    """Lines put together to the files that they are the whole of; everything else as it is."""
    texts: dict[str, list[Thing]] = {}
    for thing in found:
        if thing.kind == "line":
            texts.setdefault(thing.path, []).append(thing)
    files = [
        Thing("file", lines[0].part, path, content="".join(f"{one.line}\n" for one in lines))
        for path, lines in texts.items()
    ]
    return [thing for thing in found if thing.kind != "line"] + files
