"""A site of its own for the end-to-end tests: real nodes, an inventory in a temporary folder, real commands.

Tests change nodes only through `invoke`; what they look at, they look at from outside (`docker exec`).
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import yaml

from bringup import ROOT, lab
from bringup.errors import Exit

INVOKE = Path(sys.executable).parent / "invoke"
COMMAND_LIMIT_S = 1800
LOOK_LIMIT_S = 240
SERVE_LIMIT_S = 360
REST_LIMIT_S = 120
"""How long the nodes may take to come to rest by themselves: a restart that is under way, a server that starts."""

PASSING = ("activating", "deactivating")
"""States of units that end by themselves."""

FAR_HOURS = 12
"""Until the schedule of restarts on a site comes up: no run of these tests takes so long."""

STEP_S = 0.5


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        value: dict[str, Any] = json.loads(self.out)
        return value

    @property
    def text(self) -> str:
        """Everything a person saw."""
        return f"{self.out}\n{self.err}"


@dataclass
class Site:
    """Nodes by name, and the folder of the inventory that names them."""

    folder: Path
    names: tuple[str, ...]

    @property
    def intent_file(self) -> Path:
        """The site's intent, as an SRE edits it."""
        return self.folder / "group_vars" / "all.yml"

    def invoke(
        self, *words: str, limit: float = COMMAND_LIMIT_S, variables: Mapping[str, str] | None = None
    ) -> Done:
        """`invoke` with this inventory, to its end; `variables` are added to its environment."""
        done = subprocess.run(
            [str(INVOKE), *words, "--inventory", str(self.folder)],
            cwd=ROOT,
            env={**environment(), **(variables or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def provision(self, *words: str) -> Done:
        """`invoke provision --json`."""
        return self.invoke("provision", "--json", *words)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """`invoke` with this inventory in a process group of its own, as in a terminal; still running."""
        return subprocess.Popen(
            [str(INVOKE), *words, "--inventory", str(self.folder)],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @contextmanager
    def changed(self, change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
        """The intent with a change, for as long as the block lasts."""
        before = self.intent_file.read_text()
        intent = copy.deepcopy(yaml.safe_load(before))
        change(intent)
        self.intent_file.write_text(yaml.safe_dump(intent, sort_keys=False))
        try:
            yield
        finally:
            self.intent_file.write_text(before)

    def service(self) -> dict[str, Any]:
        """The first service of the intent."""
        service: dict[str, Any] = yaml.safe_load(self.intent_file.read_text())["node_services"][0]
        return service


def environment() -> Mapping[str, str]:
    """The environment of every command: as here, without colours and without a terminal's width."""
    return {**os.environ, "NO_COLOR": "1", "COLUMNS": "160"}


def make(folder: Path, names: Sequence[str], like: str = "lab") -> Site:
    """Boots fresh nodes and writes an inventory for them: the one called `like`, with other hosts."""
    lab.down(list(names), say=quiet)
    lab.up(list(names), say=quiet)
    shutil.copytree(ROOT / "inventories" / like, folder)
    hosts_file = folder / "hosts.yml"
    hosts = yaml.safe_load(hosts_file.read_text())
    _replace_hosts(hosts, {name: {"ansible_host": lab.address(name)[0]} for name in names})
    hosts_file.write_text(yaml.safe_dump(hosts, sort_keys=False))
    site = Site(folder, tuple(names))
    intent = yaml.safe_load(site.intent_file.read_text())
    # Enough old logs that a test can count every line of the whole story.
    intent["node_log_rotation"] = {"keep": 60}
    # Nothing is restarted in the middle of a test that does not ask for it, at whatever hour the tests run.
    for service in intent["node_services"]:
        service["restart"] = {**service.get("restart", {}), "calendar": far_calendar(datetime.now(UTC))}
    site.intent_file.write_text(yaml.safe_dump(intent, sort_keys=False))
    return site


def far_calendar(now: datetime) -> str:
    """A time of day (systemd calendar, UTC) that comes in about FAR_HOURS."""
    return f"*-*-* {now + timedelta(hours=FAR_HOURS):%H:%M}:00 UTC"


def _replace_hosts(group: Any, hosts: Mapping[str, Any]) -> None:
    if isinstance(group, dict):
        for key, value in group.items():
            if key == "hosts":
                group[key] = dict(hosts)
            else:
                _replace_hosts(value, hosts)


def quiet(text: str) -> None:
    """Where progress of the lab goes in tests: to the captured stderr."""
    print(f"[lab] {text}", file=sys.stderr)


def on(name: str, command: str, check: bool = True, limit: float = LOOK_LIMIT_S) -> str:
    """What a shell command prints on a node, run as root from outside SSH; fails with its output."""
    engine = lab.find_engine()
    assert engine is not None
    done = engine.tries("exec", name, "sh", "-c", command, limit=limit)
    assert not check or done.returncode == 0, f"{name}: {command}: {done.stdout}{done.stderr}"
    return done.stdout.strip()


def until(what: str, true: Callable[[], bool], limit: float = SERVE_LIMIT_S) -> None:
    """Waits until something is true, and fails saying what was waited for."""
    deadline = time.monotonic() + limit
    while not true():
        assert time.monotonic() < deadline, f"not within {limit} s: {what}"
        time.sleep(STEP_S)


def unrest(site: Site) -> dict[str, bool]:
    """What on the site's nodes is not at rest (a restart that runs, a server that is not up or gives no token) ->
    whether it may come to rest by itself.
    """
    service = site.service()
    units = [f"bringup-restart-{service['name']}.service", f"bringup-{service['name']}.service"]
    found = {}
    for node in site.names:
        restart, server = (on(node, f"systemctl show -P ActiveState {unit}", check=False) for unit in units)
        if restart in PASSING:
            found[f"{node}: its restart is {restart}"] = True
        elif server != "active" or not answers(node, int(service["port"])):
            found[f"{node}: its server is {server or 'unknown'} and gives no token"] = server in (
                "active",
                *PASSING,
            )
    return found


def settle(site: Site, limit: float = REST_LIMIT_S) -> None:
    """Brings the nodes to rest: waits while what is not at rest may come to that by itself, at most `limit` seconds;
    what is left then is provisioned, once. Fails with what is not at rest after that.
    """
    deadline = time.monotonic() + limit
    while any((found := unrest(site)).values()) and time.monotonic() < deadline:
        time.sleep(STEP_S)
    if not found:
        return
    done = site.provision()
    assert done.code == Exit.DONE, f"not at rest: {'; '.join(found)}\n{done.text}"
    assert not (left := unrest(site)), f"not at rest after provisioning either: {'; '.join(left)}"


def answers(name: str, port: int) -> bool:
    """Whether a chat completion on the node's own loopback gives tokens."""
    return tokens(name, port) > 0


def healthy(name: str, port: int) -> bool:
    """Whether the engine says that it is well: asked as often as one likes, it makes no work for the server, and
    so keeps none from being restarted while it is idle.
    """
    return (
        on(name, f"curl -s -m 5 -o /dev/null -w '%{{http_code}}' http://127.0.0.1:{port}/health", False)
        == "200"
    )


def tokens(name: str, port: int, say: str = "hello", limit: float = 20) -> int:
    """Completion tokens that one chat request got (0: no answer), by the server's own count."""
    body = json.dumps({"messages": [{"role": "user", "content": say}], "max_tokens": 8})
    reply = on(
        name,
        f"curl -s -m {limit} -H 'Content-Type: application/json' -d '{body}' "
        f"http://127.0.0.1:{port}/v1/chat/completions",
        check=False,
    )
    try:
        return int(json.loads(reply)["usage"]["completion_tokens"])
    except (ValueError, KeyError, TypeError):
        return 0


def end(process: subprocess.Popen[str], by: signal.Signals, limit: float = 300) -> Done:
    """Sends a signal to a command's process group, as a terminal's Ctrl-C does, and waits for its end."""
    os.killpg(process.pid, by)
    out, err = process.communicate(timeout=limit)
    return Done(process.returncode, out, err)
