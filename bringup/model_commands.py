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
    if name == "bytes":
        return f"{report.size(int(value or 0))}"
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


@task(
    positional=["model"],
    help={
        "model": "a model of the catalog",
        "revision": "commit, tag or branch (default: the entry's, else the newest)",
        "huggingface": "address of the hub or a mirror; - leaves it out. Token: HF_TOKEN in the environment",
        "modelscope": "address of the hub; - leaves it out. Token: MODELSCOPE_API_TOKEN in the environment",
        "json": JSON,
    },
)
def lock(
    c: Context,
    model: str,
    revision: str | None = None,
    huggingface: str = "https://huggingface.co",
    modelscope: str = "https://modelscope.cn",
    json: bool = False,
) -> None:
    """Write a model's lock: the commit, and every file's size and sha256, compared between its hubs."""
    from dataclasses import asdict

    from bringup import hubs, models

    addresses = {"huggingface": huggingface, "modelscope": modelscope}
    tokens = {"huggingface": "HF_TOKEN", "modelscope": "MODELSCOPE_API_TOKEN"}
    access = {
        kind: hubs.Hub(kind, address, os.environ.get(tokens[kind], ""))
        for kind, address in addresses.items()
        if address != "-"
    }
    done = models.lock(model, access, revision)
    row = {**asdict(done), "bytes": done.size}
    _print("models.lock", [row], ["model", "path", "revision", "files", "bytes", "changed"], json)
    for note in done.notes:
        print(note, file=sys.stderr)


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
    from bringup import models

    if deep and quick:
        raise UsageError("models.verify: --deep and --quick exclude each other")
    rows = models.verify(inventory, limit, deep=deep)
    _print("models.verify", rows, ["host", "model", "bytes", "state"], json)
    _end(rows, models.failed(rows))


@task(positional=["inventory"], help={"inventory": INVENTORY, "limit": LIMIT, "json": JSON})
def space(c: Context, inventory: str, limit: str | None = None, json: bool = False) -> None:
    """Show what models take on the nodes, and which services and processes use them."""
    from bringup import models

    rows = models.space(inventory, limit)
    columns = ["host", "model", "bytes", "ready", "planned", "units", "pids", "error"]
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
    from bringup import confirm, models

    rows = models.garbage(inventory, limit)
    found = [row for row in rows if not row.get("error")]
    if found and not check:
        names = sorted({row["host"] for row in found})
        confirm.disruptive(f"removing {len(found)} folders of models", inventory, names, yes=yes)
        rows = models.garbage(inventory, limit, remove=True)
    _print("models.gc", rows, ["host", "folder", "bytes", "error"], json)
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
        "fill": "bring the models in and end",
        "huggingface": "address of the hub or a mirror. Token: HF_TOKEN in the environment",
        "modelscope": "address of the hub. Token: MODELSCOPE_API_TOKEN in the environment",
        "json": JSON,
    },
)
def depot(
    c: Context,
    folder: str,
    models: str = "",
    bind: str = "127.0.0.1",
    port: int = 7421,
    fill: bool = False,
    huggingface: str = "https://huggingface.co",
    modelscope: str = "https://modelscope.cn",
    json: bool = False,
) -> None:
    """Serve models to nodes that reach no hub: a read-only hub over a folder of verified models."""
    from pathlib import Path

    from bringup import depots
    from bringup.node import store

    access = store.Access(
        huggingface=huggingface,
        modelscope=modelscope,
        huggingface_token=os.environ.get("HF_TOKEN", ""),
        modelscope_token=os.environ.get("MODELSCOPE_API_TOKEN", ""),
    )
    place = Path(folder).absolute()
    rows = depots.fill(place, [name for name in models.split(",") if name], access)
    shown = [{**row, "bytes": sum(file["size"] for file in row["files"])} for row in rows]
    _print("models.depot", shown, ["name", "repositories", "commit", "bytes", "ready"], json)
    if not fill:
        shelves = depots.ready(rows)
        host = f"[{bind}]" if ":" in bind else bind
        said = f"serving {len(shelves)}; on the nodes: model_store_huggingface: http://{host}:{port}"
        print(said, file=sys.stderr, flush=True)
        depots.serve(shelves, bind, port)


@task(
    positional=["inventory"],
    help={
        "inventory": INVENTORY,
        "limit": LIMIT,
        "undo": "take away the overlay of this grafted model; base and delta stay",
        "yes": "agree to what is disruptive, for scripts",
        "json": JSON,
    },
)
def graft(
    c: Context,
    inventory: str,
    limit: str | None = None,
    undo: str | None = None,
    yes: bool = False,
    json: bool = False,
) -> None:
    """Show the grafted models on the nodes, and what they are made of; or take one away."""
    from bringup import confirm, models

    rows = models.grafts(inventory, limit)
    if undo:
        found = [row for row in rows if row.get("model") == undo]
        if not found:
            raise UsageError(f"models.graft: no node has a grafted model {undo}")
        names = sorted({row["host"] for row in found})
        confirm.disruptive(f"taking away the grafted model {undo}", inventory, names, yes=yes)
        rows = models.grafts(inventory, limit, undo=undo)
    _print(
        "models.graft", rows, ["host", "model", "layer", "base", "delta", "ready", "refused", "error"], json
    )
    _end(rows, False)
    if any(row.get("refused") for row in rows):
        raise Exit(code=int(Code.LOCKED))


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
