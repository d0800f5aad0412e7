"""Prints, as JSON, the variables of a role for hosts that serve the lab's small model: what a plan would
give.

python tests/molecule/servers.py ROLE HOST[,HOST...] [CHANGES]       CHANGES: a JSON mapping of Service's
fields

The first host is the one whose variables are printed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from bringup.planned import (
    ApiKey,
    Drift,
    Endpoints,
    HostPlan,
    LogRotation,
    Placement,
    Plan,
    PlannedModel,
    Restart,
    Service,
    WarmUp,
)

PREFIX = "/opt/bringup/envs/llama"
FOLDER = "/srv/models/words"
NESTED: Mapping[str, type] = {"logs": LogRotation, "api_key": ApiKey}


def service(**changes: Any) -> Service:
    """The lab's server, with these fields changed."""
    port = int(changes.get("port", 8000))
    argv = [f"{PREFIX}/bin/python", "/opt/bringup/lib/llama_serve.py", "--model", f"{FOLDER}/words.gguf"]
    argv += [
        "--alias",
        "words",
        "--host",
        str(changes.get("bind", "127.0.0.1")),
        "--port",
        str(port),
        "--metrics",
        "--threads",
        "1",
    ]
    made = Service(
        name="words",
        unit="bringup-words",
        profile="cpu-words-llama-server",
        engine="llama-server",
        engine_version="2026.10.11549",
        model="words",
        served_name="words",
        bind="127.0.0.1",
        port=port,
        user="bringup-words",
        argv=tuple(argv),
        environment={"NASTY": '100% $HOME "quoted" ümlaut \\ `x`'},
        env_name="llama",
        endpoints=Endpoints(health="/health", metrics="/metrics"),
        gpus=(),
        placement=Placement(),
        warm_up=(WarmUp(16, 8, 2),),
        restart=Restart(calendar="*-*-* 04:00:00", spread_s=600, postpone_s=300, drain_s=20),
        logs=LogRotation(),
        start_timeout_s=120,
        stop_timeout_s=20,
        probe_timeout_s=10,
        log_markers={"model": "model loaded|load_model"},
        metrics_names={
            "running": "llamacpp:requests_processing",
            "waiting": "llamacpp:requests_deferred",
            "generation_tokens_total": "llamacpp:tokens_predicted_total",
        },
    )
    given = {name: _field(name, value) for name, value in changes.items()}
    return replace(made, **given)


def _field(name: str, value: Any) -> Any:
    if name == "restart":
        return Restart(**{**value, "drift": Drift(**value.get("drift", {}))})
    if name in NESTED and isinstance(value, Mapping):
        return NESTED[name](**value)
    return tuple(value) if isinstance(value, list) else value


def plan(hosts: Sequence[str], changes: Mapping[str, Any]) -> Plan:
    """All hosts serve the same."""
    model = PlannedModel("words", FOLDER, f"{FOLDER}/words.gguf", 0, (), ())
    made = [
        HostPlan(host, (), "cpu", "x86_64", (service(**changes),), (model,), environments=())
        for host in hosts
    ]
    return Plan("molecule", tuple(made), (), "digest")


def main(words: list[str]) -> None:
    role, hosts = words[0], words[1].split(",")
    changes = json.loads(words[2]) if len(words) > 2 else {}
    made = plan(hosts, changes)
    module = import_module(f"bringup.rolevars.{role}")
    print(json.dumps(module.variables(made.host(hosts[0]), made)))


if __name__ == "__main__":
    main(sys.argv[1:])
