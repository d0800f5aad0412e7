"""`invoke models.*`: the files of models. Each is one call into `bringup.models` or `bringup.depots` and one table."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from invoke import Collection, Context, Exit, task

from bringup.errors import Exit as Code
from bringup.errors import UsageError

INVENTORY = "folder under inventories/, such as lab, or a path to one"
LIMIT = "hosts, groups, globs, !without, &both; separated by commas"
JSON = "print one JSON object on stdout"
HUGGINGFACE = "address of the hub or a mirror, none leaves it out (default: HF_ENDPOINT). Token: HF_TOKEN"
MODELSCOPE = (
    "address of the hub, none leaves it out (default: MODELSCOPE_ENDPOINT). Token: MODELSCOPE_API_TOKEN"
)
ENDPOINTS = {"huggingface": "HF_ENDPOINT", "modelscope": "MODELSCOPE_ENDPOINT"}
LEFT_OUT = ("none", "-")
SCHEMA_VERSION = 1


def _print(command: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str], as_json: bool) -> None:
    """Rows as one JSON object, or as a table with one column a name in `columns`."""
    from bringup import report

    if as_json:
        report.print_json({"schema_version": SCHEMA_VERSION, "command": command, "rows": list(rows)})
        return
    out = report.console()
    report.table(out, columns, [[_cell(name, row) for name in columns] for row in rows])


def _cell(name: str, row: Mapping[str, Any]) -> str:
    from bringup import report

    value = row.get(name)
    if name == "state":
        return _state(row)
    if name in ("bytes", "shared", "frees"):
        return "" if value is None else report.size(int(value))
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _state(row: Mapping[str, Any]) -> str:
    """One line on a model: ready, or the first thing that is wrong and how many more there are."""
    if row.get("error"):
        return f"no answer: {row['error']}"
    wrong: list[str] = [f"{path} {text}" for path, text in (row.get("faults") or {}).items()] + list(
        row.get("problems") or []
    )
    if wrong:
        return wrong[0] + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
    return "ready" if row.get("ready") else "not ready: run provision"


def _endpoint(kind: str, given: str | None) -> str:
    """A hub's address: as given, else its client's own variable, else its home; "" leaves the hub out."""
    from bringup import hubs

    address = given or os.environ.get(ENDPOINTS[kind]) or getattr(hubs, kind.upper())
    if address in LEFT_OUT:
        return ""
    if not address.startswith(("http://", "https://")):
        raise UsageError(
            f'--{kind}: "{address}" is no address: it begins with http:// or https://, or is none'
        )
    return str(address).rstrip("/")


@task(
    positional=["model"],
    help={
        "model": "a model of the catalog",
        "revision": "commit, tag or branch (default: the entry's, else the newest)",
        "huggingface": HUGGINGFACE,
        "modelscope": MODELSCOPE,
        "check": "ask and compare, and write nothing (exit 6: the lock would change)",
        "json": JSON,
    },
)
def lock(
    c: Context,
    model: str,
    revision: str | None = None,
    huggingface: str | None = None,
    modelscope: str | None = None,
    check: bool = False,
    json: bool = False,
) -> None:
    """Write a model's lock: the commit, and every file's size and sha256, compared between its hubs."""
    from dataclasses import asdict

    from bringup import hubs, models, progress

    addresses = {
        "huggingface": _endpoint("huggingface", huggingface),
        "modelscope": _endpoint("modelscope", modelscope),
    }
    access = {
        kind: hubs.Hub(kind, address, os.environ.get(hubs.TOKENS[kind], ""))
        for kind, address in addresses.items()
        if address
    }
    with progress.waiting(f"asking {' and '.join(access)} for the files of {model}", progress.choose()):
        done = models.lock(model, access, revision, check=check)
    row = {**asdict(done), "bytes": done.size}
    _print("models.lock", [row], ["model", "path", "revision", "files", "bytes", "changed"], json)
    for note in done.notes:
        print(note, file=sys.stderr)
    if check and done.changed:
        raise Exit(code=int(Code.PENDING))


@task(name="list", help={"json": JSON})
def list_(c: Context, json: bool = False) -> None:
    """List the catalog's models: where they come from, whether they are locked, how big they are."""
    from bringup import models

    _print("models.list", models.listed(), ["model", "format", "files", "bytes", "revision", "from"], json)


@task(
    positional=["inventory"],
    help={
        "inventory": INVENTORY,
        "limit": LIMIT,
        "deep": "read every byte (default: sizes and times, and what somebody has touched)",
        "quick": "sizes and times only, which is the default",
        "json": JSON,
    },
)
def verify(
    c: Context,
    inventory: str,
    limit: str | None = None,
    deep: bool = False,
    quick: bool = False,
    json: bool = False,
) -> None:
    """Look whether every planned model on the nodes is what its lock says (exit 4: one is not)."""
    from bringup import models, progress

    if deep and quick:
        raise UsageError("models.verify: --deep and --quick exclude each other")
    how = "reading every byte" if deep else "looking at sizes and times"
    what = f"{how} of the models of {inventory}"
    seen: models.Seen = {}
    with progress.waiting(lambda: ": ".join(filter(None, (what, models.told(seen)))), progress.choose()):
        rows = models.verify(inventory, limit, deep=deep, seen=seen)
    _print("models.verify", rows, ["host", "model", "bytes", "state"], json)
    _end(rows, models.failed(rows))


@task(positional=["inventory"], help={"inventory": INVENTORY, "limit": LIMIT, "json": JSON})
def space(c: Context, inventory: str, limit: str | None = None, json: bool = False) -> None:
    """Show what models take on the nodes, and which services and processes use them."""
    from bringup import models, progress

    with progress.waiting(f"looking at the models of {inventory}", progress.choose()):
        rows = models.space(inventory, limit)
    columns = ["host", "model", "bytes", "shared", "ready", "planned", "units", "pids", "error"]
    _print("models.space", rows, columns, json)
    _end(rows, False)


@task(
    positional=["inventory"],
    help={
        "inventory": INVENTORY,
        "limit": LIMIT,
        "check": "show what would go and remove nothing (exit 6: something would)",
        "yes": "agree to what is disruptive, for scripts",
        "json": JSON,
    },
)
def gc(
    c: Context,
    inventory: str,
    limit: str | None = None,
    check: bool = False,
    yes: bool = False,
    json: bool = False,
) -> None:
    """Remove models that no plan has, no unit names and no process has open."""
    from bringup import confirm, models, progress

    with progress.waiting(f"looking for garbage on {inventory}", progress.choose()):
        rows = models.garbage(inventory, limit)
    found = [row for row in rows if not row.get("error")]
    if found and not check:
        names = sorted({row["host"] for row in found})
        confirm.disruptive(f"removing {len(found)} folders of models", inventory, names, yes=yes)
        with progress.waiting(f"removing models from {inventory}", progress.choose()):
            rows = models.garbage(inventory, limit, remove=True)
    _print("models.gc", rows, ["host", "folder", "frees", "error"], json)
    _end(rows, False)
    if check and found:
        raise Exit(code=int(Code.PENDING))


@task(
    positional=["folder"],
    help={
        "folder": "where the depot's models lie, or will",
        "models": "models of the catalog to bring into it first, separated by commas",
        "bind": "address to listen on",
        "port": "port to listen on",
        "allow": "addresses and networks that may ask, separated by commas (default: all). Token: DEPOT_TOKEN",
        "fill": "bring the models in and end",
        "check": "show what would be brought in and end (exit 6: something would)",
        "huggingface": HUGGINGFACE,
        "modelscope": MODELSCOPE,
        "json": JSON,
    },
)
def depot(
    c: Context,
    folder: str,
    models: str = "",
    bind: str = "127.0.0.1",
    port: int = 7421,
    allow: str = "",
    fill: bool = False,
    check: bool = False,
    huggingface: str | None = None,
    modelscope: str | None = None,
    json: bool = False,
) -> None:
    """Serve models to nodes that reach no hub: a read-only hub over a folder of verified models."""
    from pathlib import Path

    from bringup import depots, hubs
    from bringup.node import depot as program

    names = [name for name in models.split(",") if name]
    if (fill or check) and not names:
        raise UsageError("models.depot: --fill and --check need --models: which are to be brought in?")
    doors = depots.doors([text for text in allow.split(",") if text], program.token())
    hub = depots.access(
        _endpoint("huggingface", huggingface),
        _endpoint("modelscope", modelscope),
        {kind: os.environ.get(name, "") for kind, name in hubs.TOKENS.items()},
    )
    place = Path(folder).absolute()
    rows = depots.wanted(place, names) if check else depots.fill(place, names, hub)
    shown = [{**row, "bytes": sum(file["size"] for file in row["files"])} for row in rows]
    _print("models.depot", shown, ["name", "repositories", "commit", "bytes", "ready"], json)
    if check and not all(row["ready"] for row in rows):
        raise Exit(code=int(Code.PENDING))
    if not (fill or check):
        shelves = depots.ready(rows)
        host = f"[{bind}]" if ":" in bind else bind
        said = f"serving {len(shelves)}; on the nodes: model_store_huggingface: http://{host}:{port}"
        print(said, file=sys.stderr, flush=True)
        depots.serve(shelves, bind, port, doors)


@task(
    positional=["inventory"],
    help={
        "inventory": INVENTORY,
        "limit": LIMIT,
        "undo": "take away the overlay of this grafted model; base and delta stay, and provision makes it again",
        "check": "with --undo: show what would go and change nothing (exit 6: something would)",
        "yes": "agree to what is disruptive, for scripts",
        "json": JSON,
    },
)
def graft(
    c: Context,
    inventory: str,
    limit: str | None = None,
    undo: str | None = None,
    check: bool = False,
    yes: bool = False,
    json: bool = False,
) -> None:
    """Show the grafted models on the nodes, and what they are made of; or take one away."""
    from bringup import confirm, models, progress

    if check and not undo:
        raise UsageError("models.graft: --check goes with --undo MODEL; without it nothing is changed anyway")
    with progress.waiting(f"looking at the grafted models of {inventory}", progress.choose()):
        rows = models.grafts(inventory, limit)
    if undo:
        silent = [row for row in rows if row.get("error")]
        rows = [row for row in rows if row.get("model") == undo] + silent
        if not rows:
            raise UsageError(f"models.graft: no node has a grafted model {undo}")
        names = sorted({row["host"] for row in rows if not row.get("error")})
        if names and not check:
            confirm.disruptive(f"taking away the grafted model {undo}", inventory, names, yes=yes)
            rows = models.grafts(inventory, limit, undo=undo)
    _print(
        "models.graft", rows, ["host", "model", "layer", "base", "delta", "ready", "refused", "error"], json
    )
    _end(rows, False)
    if any(row.get("refused") for row in rows):
        raise Exit(code=int(Code.LOCKED))
    if check:
        raise Exit(code=int(Code.PENDING))


def _end(rows: Sequence[Mapping[str, Any]], failed: bool) -> None:
    """Exit 5 when a host gave no answer, 4 when `failed`."""
    if any(row.get("error") for row in rows):
        raise Exit(code=int(Code.UNREACHABLE))
    if failed:
        raise Exit(code=int(Code.FAILED))


def collection() -> Collection:
    """The tasks, as `models` of the main collection."""
    made = Collection("models")
    for one in (lock, list_, verify, space, gc, depot, graft):
        made.add_task(one)
    return made
