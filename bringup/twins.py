"""Twins: one container for each host of any inventory, wearing recorded hardware (design: docs/twins.md).

`dress` brings the twins of an inventory up and gives the folder of an inventory that names them; every
command takes that folder in place of the real one. `plan_for` is what the plan of such a folder goes through:
the same launch lines, units, ports and roles, with engines, environments and models that are stand-ins.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bringup import ROOT
from bringup.errors import HostFailed, Problem, UsageError, unknown
from bringup.planned import (
    Finding,
    HostPlan,
    ModelFile,
    ModelSource,
    Plan,
    PlannedEnvironment,
    PlannedModel,
    Service,
)

KIND = "twin"
FOLDER = ROOT / ".lab" / "twins"
SOURCES = ROOT / "tests" / "lab" / "twin"
FACTS = ROOT / "tests" / "facts"
FAULTS = SOURCES / "faults"
ARCHES: Mapping[str, str] = {"x86_64": "amd64", "aarch64": "arm64"}
"""How a container engine calls a machine."""

MACHINES: Mapping[str, str] = {arch: machine for machine, arch in ARCHES.items()}

MARK = "twins.json"
"""A file in an inventory's folder that says: these hosts are twins, and which."""

SUFFIX = "-twins"
LABEL = "bringup.twin"
SCHEMA_VERSION = 1
AT_ONCE = 4
DRESS_LIMIT_S = 1260
ON_NODE = "/usr/lib/twin/tests/lab/twin/node"
WHEELS = "/opt/twin/wheels"
STAND_IN_DISK_GIB = 0.5
"""What must stay free on a twin: its disk is this machine's, and no part of the recorded hardware."""

LIKE_A_MACHINE = ("--shm-size", "16g")
"""Arguments of `docker run` that give a twin what every machine has, and a container has not."""

REAL_ENGINES = ("llama-server",)
"""Engines that a twin runs for real, when the model is one that the lab makes."""

MEMORY_MIB: Mapping[str, int] = {
    "H200": 143771,
    "H20-3e": 143771,
    "H20": 97871,
    "H100": 81559,
    "GH200": 97871,
}
"""What a driver shows of a GPU's memory, by a word of its name, where the platform's own figure is not closer."""

POWER_W: Mapping[str, int] = {"H20": 500, "H20-3e": 500, "H200": 700, "H100": 700, "GH200": 900}
ADDRESSES = ("19", "3b", "4c", "5d", "9b", "bb", "cb", "db")
SWITCH_ADDRESSES = ("05", "06", "07", "08")
NVLINKS_OF_AN_HGX_GPU = 18


# --- hardware -----------------------------------------------------------------------------------------------


def hardware(host: HostPlan, name: str, arch: str = "amd64") -> dict[str, Any]:
    """What twin `name` wears as `host`: composed from the platform's entry, with what was recorded on top.

    Recorded is `tests/facts/<platform>/twin.json`, as `record` writes it.
    """
    platform = host.expected
    made = _composed(host, platform)
    recorded = FACTS / host.platform / "twin.json"
    if recorded.is_file():
        made.update(json.loads(recorded.read_text(encoding="utf-8")))
    made.update(
        schema_version=SCHEMA_VERSION,
        stand_in=True,
        host=host.name,
        twin=name,
        platform=host.platform,
        arch=MACHINES[arch],
    )
    return made


def _composed(host: HostPlan, platform: Mapping[str, Any]) -> dict[str, Any]:
    gpus, machine, driver = platform.get("gpus"), platform.get("host"), platform.get("driver") or {}
    numa = _numa(machine) if machine else []
    memory = machine["sockets"] * machine["memory_gib_per_socket"] if machine else 8
    made: dict[str, Any] = {
        "places": _places(host),
        "source": f"composed from catalog/platforms/{host.platform}.yml",
        "numa": numa,
        "memory_gib": memory,
        "gpus": [],
        "switches": [],
        "kernel_log": [],
    }
    if gpus:
        made["gpus"] = [_gpu(host, number, gpus, platform) for number in range(gpus["count"])]
        made["switches"] = [f"0000:{bus}:00.0" for bus in SWITCH_ADDRESSES[: platform["links"]["nvswitches"]]]
        if driver.get("page_size_kib"):
            made["page_size_kib"] = driver["page_size_kib"]
        made["needs_open"] = bool(driver.get("open_modules"))
        made["needs_root_persistence"] = _is_grace(platform)
        made["driver"] = born_driver(driver)
    return made


def _places(host: HostPlan) -> dict[str, str]:
    """What faults call `{model}`, `{shard}`, `{cache}` and `{unit}`: of the host's first service."""
    if not host.services:
        return {}
    service = host.services[0]
    folders = {model.name: model for model in host.models}
    model = folders.get(service.model)
    files = [file.path for file in model.files] if model else []
    shards = [path for path in files if path.endswith((".safetensors", ".gguf"))]
    found = {"unit": f"{service.unit}.service", "cache": service.cache_folder}
    if model and shards:
        found |= {"model": model.folder, "shard": f"{model.folder}/{shards[0]}"}
    return {name: path for name, path in found.items() if path}


def _is_grace(platform: Mapping[str, Any]) -> bool:
    return any(node["gpu_memory"] for node in (platform.get("host") or {}).get("numa", ()))


def _numa(machine: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The platform's nodes, or one a socket."""
    if machine["numa"]:
        return [
            {"node": node["node"], "cpus": node["cpus"], "memory_gib": node["memory_gib"]}
            for node in machine["numa"]
        ]
    cores = machine["cores_per_socket"]
    return [
        {
            "node": socket,
            "cpus": f"{socket * cores}-{(socket + 1) * cores - 1}",
            "memory_gib": machine["memory_gib_per_socket"],
        }
        for socket in range(machine["sockets"])
    ]


def _gpu(host: HostPlan, number: int, gpus: Mapping[str, Any], platform: Mapping[str, Any]) -> dict[str, Any]:
    name = gpus["names"][0]
    machine = platform.get("host") or {}
    switches = platform["links"]["nvswitches"]
    grace = _is_grace(platform)
    own = [node for node in machine.get("numa", ()) if number in node["gpus"]]
    sockets = machine.get("sockets", 1)
    near = next((node["node"] for node in own if node["cpus"]), number * sockets // gpus["count"])
    memory_node = next((node["node"] for node in own if node["gpu_memory"]), None)
    identity = hashlib.sha256(f"{host.name} {number}".encode()).hexdigest()
    uuid = "-".join((identity[:8], identity[8:12], identity[12:16], identity[16:20], identity[20:32]))
    return {
        "name": name if name.startswith("NVIDIA") else f"NVIDIA {name}",
        "uuid": f"GPU-{uuid}",
        "address": f"00{number}9:01:00.0" if grace else f"0000:{ADDRESSES[number % len(ADDRESSES)]}:00.0",
        "pci_id": (list(gpus["pci_ids"]) or ["10de:2335"])[0],
        "memory_mib": _memory_mib(name, gpus["memory_gib"]),
        "sm": gpus["sm"],
        "power_limit_w": next((POWER_W[word] for word in name.split() if word in POWER_W), 700),
        "numa_node": near,
        "memory_node": memory_node,
        "addressing_mode": "ATS" if grace else "None",
        "c2c_mode": "Enabled" if grace else "Disabled",
        "nvlinks": NVLINKS_OF_AN_HGX_GPU if switches else 0,
        "peers_by_nvlink": bool(switches),
    }


def _memory_mib(name: str, gib: float) -> int:
    """What a driver shows of `gib` nominal GiB."""
    near = [MEMORY_MIB[word] for word in name.split() if word in MEMORY_MIB]
    return next((mib for mib in near if abs(mib / 1024 - gib) < gib / 20), int(gib * 1024))


def born_driver(driver: Mapping[str, Any]) -> dict[str, Any]:
    """The driver that a twin is born with: of the recommended branch the newest, or the very version."""
    from tests.lab.twin import archive

    wanted = str(driver.get("recommended") or driver["minimum"])
    branch = wanted.partition(".")[0]
    versions = archive.BRANCHES.get(branch) or archive.BRANCHES["580"]
    version = wanted if wanted in versions else versions[-1]
    branch = version.partition(".")[0]
    packages = [f"nvidia-headless-{branch}-open"]
    packages += [f"nvidia-fabricmanager-{branch}"] if driver.get("fabric_manager") else []
    needed = ("nvidia-dkms-{}-open", "nvidia-kernel-common-{}", "nvidia-utils-{}", "nvidia-compute-utils-{}")
    packages += [name.format(branch) for name in (*needed, "libnvidia-compute-{}")]
    return {"version": version, "packages": [f"{name}={version}-0twin1" for name in packages]}


ADDED = ("files", "kernel_log", "stopped_units", "dpkg_unpacked", "manager_environment")
"""Parts of the hardware to which each fault adds; every other is what the last fault says."""


# --- faults -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A named fault: what it changes on a twin, and what preflight must say of it.

    `state`: dotted name -> value in the hardware; `next_boot`: the same, only after a reboot; `run`: commands
    started on the twin; `causes`: known failures that it shows; `needs`: "switches" when only such a machine
    can have it; `code`: the finding expected (None: none from preflight).
    """

    name: str
    title: str
    code: str | None
    state: Mapping[str, Any]
    next_boot: Mapping[str, Any]
    run: tuple[tuple[str, ...], ...]
    causes: tuple[str, ...]
    needs: str


def faults() -> dict[str, Fault]:
    """Every fault by its name."""
    from bringup.yamlfile import read_yaml

    found = {}
    for path in sorted(FAULTS.glob("*.yml")):
        data = read_yaml(path, f"tests/lab/twin/faults/{path.name}")
        found[path.stem] = Fault(
            name=path.stem,
            title=data["title"],
            code=data.get("code"),
            state=data.get("state", {}),
            next_boot=data.get("next_boot", {}),
            run=tuple(tuple(argv) for argv in data.get("run", ())),
            causes=tuple(data.get("causes", ())),
            needs=data.get("needs", ""),
        )
    return found


def chosen_faults(words: Iterable[str], hosts: Sequence[str]) -> dict[str, list[Fault]]:
    """`NAME` (on the first host) or `NAME@HOST` -> the faults of each host. Raises UsageError for what is
    unknown."""
    known = faults()
    problems = []
    found: dict[str, list[Fault]] = {}
    for word in words:
        name, _, host = word.partition("@")
        host = host or hosts[0]
        if name not in known:
            problems.append(Problem("--fault", *unknown("fault", name, list(known))))
        elif host not in hosts:
            problems.append(Problem("--fault", *unknown("host", host, hosts)))
        else:
            found.setdefault(host, []).append(known[name])
    if problems:
        raise UsageError(problems)
    return found


def with_faults(worn: Mapping[str, Any], chosen: Iterable[Fault]) -> dict[str, Any]:
    """The hardware with faults in it."""
    from tests.lab.twin.node import state

    changed: dict[str, Any] = json.loads(json.dumps(worn))
    for fault in chosen:
        for dotted, value in fault.state.items():
            fresh, before = json.loads(json.dumps(value)), changed.get(dotted)
            if dotted in ADDED and isinstance(before, list):
                fresh = before + fresh
            elif dotted in ADDED and isinstance(before, dict):
                fresh = before | fresh
            state.set_at(changed, dotted, fresh)
        if fault.next_boot:
            changed.setdefault("next_boot", {}).update(fault.next_boot)
    return changed


# --- engines ------------------------------------------------------------------------------------------------


def wheel(engine: str, version: str) -> tuple[str, bytes]:
    """Name and bytes of the package that stands in for an engine version: its flags, and a small server."""
    from tests.lab.twin.engine import package

    return package.wheel(engine, version)


def lock_of(engine: str, version: str) -> tuple[str, str]:
    """Path (in this checkout) and text of the lock of a stand-in environment."""
    name, content = wheel(engine, version)
    text = f"{WHEELS}/{name} --hash=sha256:{hashlib.sha256(content).hexdigest()}\n"
    return f".lab/twins/locks/{engine}-{version}.txt", text


def _environment(planned: PlannedEnvironment, engine: str, version: str) -> PlannedEnvironment:
    lock, text = lock_of(engine, version)
    return replace(
        planned,
        provider="pip",
        python="system",
        lock=lock,
        digest=hashlib.sha256(text.encode()).hexdigest(),
        checks=(("python", "-m", "bringup_stand_in", "--version"),),
    )


# --- models -------------------------------------------------------------------------------------------------


def model_files(model: PlannedModel, context: int | None = None) -> dict[str, bytes]:
    """The files of a stand-in for a model: its headers are whole and say what the plan expects, weights are
    a few bytes. `context`: tokens that the model is said to take."""
    if model.entry != model.folder:
        return {Path(model.entry).name: _gguf(model.name)}
    expects = model.expects
    tensors = {
        name: b"\0\0"
        for prefix, count in {"model.embed_tokens.weight": 1, **(expects.get("tensors") or {})}.items()
        for name in _tensor_names(prefix, count)
    }
    shard = "model-00001-of-00001.safetensors"
    index = {"metadata": {"total_size": 2 * len(tensors)}, "weight_map": dict.fromkeys(tensors, shard)}
    config: dict[str, Any] = {"architectures": [expects.get("architecture") or "StandInForCausalLM"]}
    for dotted, value in (expects.get("config") or {}).items():
        here = config
        *above, last = dotted.split(".")
        for part in above:
            here = here.setdefault(part, {})
        here[last] = value
    if context:
        config["max_position_embeddings"] = context
    config["stand_in"] = f"of {model.name}, made for a twin"
    return {
        "config.json": _json(config),
        "model.safetensors.index.json": _json(index),
        "tokenizer_config.json": _json({"stand_in": True}),
        shard: _safetensors(tensors),
    }


def _tensor_names(prefix: str, count: int | None) -> list[str]:
    """Names of `count` tensors that start with a prefix; a prefix that is a whole name stays one."""
    if count == 1:
        return [prefix if not prefix.endswith(".") else f"{prefix}weight"]
    return [f"{prefix}{number:04d}.weight" for number in range(count or 1)]


def _json(data: Any) -> bytes:
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()


def _safetensors(tensors: Mapping[str, bytes]) -> bytes:
    """A file with tiny bf16 tensors (https://github.com/huggingface/safetensors#format)."""
    header: dict[str, Any] = {"__metadata__": {"stand_in": "bringup twin"}}
    at = 0
    for name, content in tensors.items():
        header[name] = {
            "dtype": "BF16",
            "shape": [len(content) // 2],
            "data_offsets": [at, at + len(content)],
        }
        at += len(content)
    text = json.dumps(header, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(tensors.values())


def _gguf(name: str) -> bytes:
    """A GGUF header without tensors, with the name of what it stands in for."""
    key, value = b"general.name", f"stand-in of {name}".encode()
    pair = struct.pack("<Q", len(key)) + key + struct.pack("<I", 8) + struct.pack("<Q", len(value)) + value
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair


def context_of(model: PlannedModel, host: HostPlan) -> int | None:
    """Tokens that a host's services want of a model."""
    wanted = [one.context_tokens for one in host.services if one.model == model.name and one.context_tokens]
    return max(wanted, default=None)


def _model(planned: PlannedModel, context: int | None) -> PlannedModel:
    files = model_files(planned, context)
    digest = hashlib.sha256(b"".join(files[name] for name in sorted(files))).hexdigest()[:12]
    rows = tuple(
        ModelFile(path, len(content), hashlib.sha256(content).hexdigest()) for path, content in files.items()
    )
    source = ModelSource("controller", f".lab/twins/models/{planned.name}-{digest}")
    size = sum(map(len, files.values()))
    return replace(planned, files=rows, sources=(source,), made_by=None, size=size, graft=None)


# --- the plan -----------------------------------------------------------------------------------------------

DROPPED = ("PLAN_NO_LOCK", "PLAN_GRAFT_NEEDS")
"""Findings about what a twin replaces."""


def plan_for(plan: Plan, arches: Mapping[str, str] | None = None) -> Plan:
    """The plan of an inventory's twins. `arches`: host -> "amd64" or "arm64", how its twin runs (default: amd64).

    Launch lines, environment variables, units, ports and placement stay; engines, environments and models
    become stand-ins, and say so.
    """
    hosts = tuple(_host(host, (arches or {}).get(host.name, "amd64")) for host in plan.hosts)
    findings = [finding for finding in plan.findings if finding.code not in DROPPED]
    findings += [
        Finding("TWIN", "note", host.name, "is a twin: hardware, engine and model are stand-ins", instead="")
        for host in hosts
    ]
    digest = hashlib.sha256(
        json.dumps([asdict(host) for host in hosts], sort_keys=True, default=str).encode()
    ).hexdigest()
    return replace(plan, hosts=hosts, findings=tuple(findings), digest=digest)


def _host(host: HostPlan, arch: str) -> HostPlan:
    machine = MACHINES[arch]
    stood_in = {service.env_name for service in host.services if not _runs_for_real(service, host)}
    services = tuple(
        replace(service, is_stand_in=service.is_stand_in or service.env_name in stood_in)
        for service in host.services
    )
    engines = {service.env_name: (service.engine, service.engine_version) for service in host.services}
    environments = tuple(
        _environment(one, *engines[one.name]) if one.name in stood_in else one for one in host.environments
    )
    thresholds = {**host.expected.get("thresholds", {}), "disk_free_gib": STAND_IN_DISK_GIB}
    expected = {**host.expected, "thresholds": thresholds}
    if host.expected.get("arch") not in (None, "any"):
        expected["arch"] = machine
    return replace(
        host,
        arch=machine if host.arch != "any" else host.arch,
        services=services,
        environments=environments,
        models=tuple(
            model if model.made_by else _model(model, context_of(model, host)) for model in host.models
        ),
        expected=expected,
    )


def _runs_for_real(service: Service, host: HostPlan) -> bool:
    model = next((model for model in host.models if model.name == service.model), None)
    return service.engine in REAL_ENGINES and model is not None and model.made_by is not None


def is_worn(folder: Path) -> bool:
    """Whether an inventory's folder is one of twins."""
    return (folder / MARK).is_file()


def worn(folder: Path, plan: Plan) -> Plan:
    """The plan as it is for the twins of an inventory's folder."""
    mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
    return plan_for(plan, {name: host["arch"] for name, host in mark["hosts"].items()})


# --- containers (I/O) ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Twin:
    """One twin: container `name`, the host that it is, and how it runs."""

    name: str
    host: str
    arch: str


def given() -> dict[str, dict[str, Twin]]:
    """Inventory -> host -> its twin, for every inventory that has twins."""
    found = {}
    for path in sorted(FOLDER.glob(f"*{SUFFIX}/{MARK}")):
        mark = json.loads(path.read_text(encoding="utf-8"))
        found[str(mark["of"])] = {
            host: Twin(str(row["twin"]), host, str(row["arch"])) for host, row in mark["hosts"].items()
        }
    return found


def assigned(inventory: str, hosts: Sequence[str], arches: Mapping[str, str] | None = None) -> list[Twin]:
    """A twin for each host: the one that it has, else the lowest name that no inventory's twin has (twin-01 and on).

    `arches`: host -> how its twin is to run; without, a twin runs as it does, and a new one as amd64.
    Raises LabError when the addresses for twins are used up, and says by whom.
    """
    from bringup import lab

    before = given()
    own = before.pop(inventory, {})
    arches = arches or {host: twin.arch for host, twin in own.items()}
    taken = {twin.name for twins in before.values() for twin in twins.values()}
    kept = {host: own[host].name for host in hosts if host in own and own[host].name not in taken}
    every = lab.node_names(lab.room(KIND), KIND)
    free = [name for name in every if name not in taken and name not in kept.values()]
    if len(hosts) - len(kept) > len(free):
        others = ", ".join(f"{other} has {len(names)}" for other, names in before.items()) or "nobody has any"
        raise lab.LabError(
            Problem(
                f"twins of {inventory}",
                f"{len(hosts)} hosts want a twin, {len(free) + len(kept)} of {len(every)} addresses are free "
                f"({others})",
                "Give some back: invoke twins.down --inventory NAME; or name fewer hosts in the inventory.",
            )
        )
    names = iter(free)
    return [Twin(kept.get(host) or next(names), host, arches.get(host, "amd64")) for host in hosts]


def dress(
    inventory: str,
    faults: Iterable[str] = (),
    limit: str | None = None,
    say: Any = None,
    *,
    real_arch: bool = False,
) -> Path:
    """Brings the twins of an inventory up and gives the folder of an inventory that names them.

    `faults`: NAME or NAME@HOST; twins that are up already are kept, and healed of what is not named.
    `limit`: only these hosts get a container (all stay in the inventory). `real_arch`: each twin runs as its host's
    architecture, emulated where this machine has another; without, twins that are there stay as they are. Raises
    UsageError for wrong intent or names, LabError when a container cannot be had.
    """
    from bringup import fleet, lab
    from bringup import inventory as inventories
    from bringup import plan as plans

    say = say or lab.say_to_stderr
    real = plans.load(inventory)
    if is_worn(inventories.folder_of(inventory)):
        raise UsageError(Problem("--twins", f"{inventory} is an inventory of twins already"))
    names = [host.name for host in real.hosts]
    chosen = chosen_faults(faults, names)
    up = fleet.matching({host.name: host.groups for host in real.hosts}, limit)
    with lab.alone("twins", say):
        arches = {host.name: ARCHES[host.arch] for host in real.hosts if host.arch in ARCHES}
        twins = assigned(inventories.read(inventory).name, names, arches if real_arch else None)
        folder = write_inventory(inventory, real, twins)
    stood_in = plan_for(real, {twin.host: twin.arch for twin in twins})
    write_stand_ins(real, stood_in)
    start([twin for twin in twins if twin.host in up], stood_in, chosen, say)
    return folder


def write_inventory(inventory: str, plan: Plan, twins: Sequence[Twin]) -> Path:
    """An inventory's folder under .lab/twins with the same hosts, groups and intent, reached as twins."""
    import yaml

    from bringup import inventory as inventories
    from bringup import lab

    source = inventories.read(inventory)
    folder = FOLDER / f"{source.name}{SUFFIX}"
    by_host = {twin.host: twin for twin in twins}
    services = {host.name: host.services for host in plan.hosts}
    hosts: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for host in source.hosts:
        hosts[host.name] = _variables(host.variables, services[host.name])
        address, port = lab.address(by_host[host.name].name)
        hosts[host.name] |= {"ansible_host": address, **({} if port == 22 else {"ansible_port": port})}
        for group in host.groups:
            groups.setdefault(group, {"hosts": {}})["hosts"][host.name] = None
    known = f"-o UserKnownHostsFile={lab.LAB / 'known_hosts'} -o StrictHostKeyChecking=yes"
    reach = {
        "ansible_user": lab.USER,
        "ansible_ssh_private_key_file": str(lab.LAB / "id"),
        "ansible_ssh_common_args": known,
    }
    content = {"all": {"vars": reach, "hosts": hosts, **({"children": groups} if groups else {})}}
    mark = {
        "schema_version": SCHEMA_VERSION,
        "of": source.name,
        "hosts": {twin.host: {"twin": twin.name, "arch": twin.arch} for twin in twins},
    }
    write(folder / "hosts.yml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode())
    write(folder / "plan.node", b"plugin: plan\n")
    write(folder / MARK, _json(mark))
    return folder


def _variables(given: Mapping[str, Any], services: Iterable[Service]) -> dict[str, Any]:
    """A host's variables for its twin: all but how it is reached; secrets are stand-ins."""
    kept = {
        name: f"stand-in-of-{name}" if name.startswith("vault_") else value
        for name, value in given.items()
        if not name.startswith("ansible_")
    }
    for service in services:
        if service.api_key:
            kept[service.api_key.vault] = f"stand-in-of-{service.api_key.vault}"
    plain: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return plain


def write_stand_ins(real: Plan, stood_in: Plan) -> None:
    """Puts what the twins' plan names on the controller's disk: wheels, locks, models."""
    for host, twin_host in zip(real.hosts, stood_in.hosts, strict=True):
        engines = {
            one.env_name: (one.engine, one.engine_version) for one in twin_host.services if one.is_stand_in
        }
        for engine, version in engines.values():
            name, content = wheel(engine, version)
            write(FOLDER / "wheels" / name, content)
            lock, text = lock_of(engine, version)
            write(ROOT / lock, text.encode())
        for model, twin_model in zip(host.models, twin_host.models, strict=True):
            if twin_model is not model and not model.made_by:
                for path, content in model_files(model, context_of(model, host)).items():
                    write(ROOT / twin_model.sources[0].locator / path, content)


def write(path: Path, content: bytes) -> None:
    """Beside and renamed; left alone when it is so already."""
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(content)
    beside.replace(path)


def start(twins: Sequence[Twin], plan: Plan, chosen: Mapping[str, Sequence[Fault]], say: Any) -> None:
    """Starts the containers, puts hardware on them, installs the driver that they are born with, then brings
    the faults in."""
    from bringup import lab
    from tests.lab.twin import archive

    hosts = {host.name: host for host in plan.hosts}
    healthy = {twin.name: hardware(hosts[twin.host], twin.name, twin.arch) for twin in twins}
    who = {twin.name: identity(twin, hosts[twin.host], healthy[twin.name]) for twin in twins}
    for name, made in healthy.items():
        write(FOLDER / "nodes" / name / "hardware.json", _json(made))
    engine = lab.ensure_engine(say)
    strangers = [twin.name for twin in twins if _wears_another(engine, twin.name, who[twin.name])]
    if strangers:
        lab.down(strangers, say)
    for arch in sorted({twin.arch for twin in twins}):
        lab.ensure_program(*archive.COMPILERS[arch], say)
        packages = archive.build(FOLDER, arch)
        these = [twin for twin in twins if twin.arch == arch]
        extra = {twin.name: container_arguments(twin.name, packages, who[twin.name]) for twin in these}
        lab.up([twin.name for twin in these], say, arch=arch, extra=extra)

    def ready(twin: Twin) -> None:
        on(engine, twin.name, "twin-born")
        faulty = with_faults(healthy[twin.name], chosen.get(twin.host, ()))
        write(FOLDER / "nodes" / twin.name / "hardware.json", _json(faulty))
        on(engine, twin.name, "twin-refresh")
        for fault in chosen.get(twin.host, ()):
            for argv in fault.run:
                engine.run("exec", "--detach", twin.name, f"{ON_NODE}/standin", "twin-fault", *argv)

    say(f"dressing {len(twins)} twin{'s' * (len(twins) != 1)}")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(ready, twins))
    for host, found in chosen.items():
        say(f"{host}: {', '.join(fault.title for fault in found)}")


def on(engine: Any, name: str, program: str, *words: str) -> str:
    """One of the twin's own programs, run in the container. Raises HostFailed with what it said."""
    done = engine.tries("exec", name, f"{ON_NODE}/standin", program, *words, limit=DRESS_LIMIT_S)
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-600:]
        raise HostFailed(Problem(name, f"{program} failed: {said}", f"Remove it: docker rm -f {name}"))
    return str(done.stdout)


def identity(twin: Twin, host: HostPlan, healthy: Mapping[str, Any]) -> str:
    """What a container was born as; another identity needs another container."""
    born = {
        "host": twin.host,
        "arch": twin.arch,
        "platform": host.platform,
        "driver": healthy.get("driver"),
        "container": LIKE_A_MACHINE,
        # A stand-in engine lies where the real one would, under a name that does not tell its own versions.
        "environments": sorted(one.digest for one in host.environments),
    }
    return hashlib.sha256(json.dumps(born, sort_keys=True).encode()).hexdigest()[:16]


def _wears_another(engine: Any, name: str, who: str) -> bool:
    label = engine.tries("inspect", "--format", f'{{{{index .Config.Labels "{LABEL}"}}}}', name)
    return bool(label.returncode == 0 and label.stdout.strip() != who)


def container_arguments(name: str, packages: Path, who: str) -> list[str]:
    """Arguments of `docker run` for a twin, beside those of every node."""
    mounts = (
        (SOURCES / "node", ON_NODE),
        (SOURCES / "node" / "init", "/etc/node-fake/init"),
        (FOLDER / "nodes" / name, "/etc/twin"),
        (FOLDER / "wheels", WHEELS),
        (packages, "/opt/twin/archive"),
    )
    (FOLDER / "wheels").mkdir(parents=True, exist_ok=True)
    return [
        *(word for source, target in mounts for word in ("--volume", f"{source}:{target}:ro")),
        *("--security-opt", f"seccomp={SOURCES / 'seccomp-numa.json'}"),
        *("--label", f"{LABEL}={who}"),
        *LIKE_A_MACHINE,
    ]


def down(say: Any = None, inventory: str = "") -> list[str]:
    """Removes the twins of an inventory, or every twin, with its inventory and its files; their names. Raises
    UsageError for an inventory that has none."""
    from bringup import lab

    there = given()
    if inventory and inventory not in there:
        raise UsageError(Problem("--inventory", *unknown("inventory with twins", inventory, list(there))))
    ours = {twin.name for twin in there[inventory].values()} if inventory else None
    names = [
        node.name
        for node in lab.nodes()
        if node.name.startswith(f"{KIND}-") and (ours is None or node.name in ours)
    ]
    gone = lab.down(names, say or lab.say_to_stderr) if names else []
    if ours is None:
        shutil.rmtree(FOLDER, ignore_errors=True)
        return gone
    shutil.rmtree(FOLDER / f"{inventory}{SUFFIX}", ignore_errors=True)
    for name in ours:
        shutil.rmtree(FOLDER / "nodes" / name, ignore_errors=True)
    return gone


# --- recording ----------------------------------------------------------------------------------------------

OUTPUTS: Mapping[str, str] = {
    "nvidia-smi-q.xml": "nvidia-smi -q -x",
    "topo-m.txt": "nvidia-smi topo -m",
    "nvlink-s.txt": "nvidia-smi nvlink -s",
    "driver-version.txt": "cat /proc/driver/nvidia/version",
    "lspci.txt": "lspci -Dnn -d 10de:",
    "numa.txt": "grep -sH . /sys/devices/system/node/node*/cpulist /sys/devices/system/node/node*/distance "
    "/sys/devices/system/node/node*/meminfo || true",
    "meminfo.txt": "cat /proc/meminfo",
    "pci-nodes.txt": "grep -sH . /sys/bus/pci/devices/*/numa_node || true",
    "page-size.txt": "getconf PAGESIZE",
    "os-release.txt": "cat /etc/os-release",
    "kernel.txt": "uname -r -m",
    "kernel-log.txt": "sudo -n dmesg | grep -E 'NVRM|nvidia|SXid' | tail -n 200",
}
"""What a record holds: file -> the command whose output it is."""


def record(host: Any, folder: Path) -> Path:
    """Gathers the outputs of a real node (a `fleet.Host`) over SSH into a folder, with `twin.json` made from them; see
    `blanked` for what is not kept. Twins of a platform wear what lies in `FACTS / <platform>`.

    Raises HostUnreachable.
    """
    from bringup import remote

    outputs: dict[str, str] = {}
    for name, command in OUTPUTS.items():
        ran = remote.run(host, command)
        if ran.code == 0:
            outputs[name] = blanked(ran.out)
    for name, content in outputs.items():
        write(folder / "recorded" / name, content.encode())
    write(folder / "twin.json", _json(hardware_of_record(outputs)))
    return folder


_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_IDENTIFYING = "serial|pdi|chassis_serial_number|chassisSerialNumber|gpu_fabric_guid|host_id|hostId"
_OF_PROGRAMS = "supported_clocks|processes|accounted_processes"


def blanked(text: str) -> str:
    """A record without what identifies a machine (UUIDs, serial numbers, host identifiers), without processes, whose
    command lines are their owners' business, and without what looks like a secret."""
    import re

    from bringup.redact import text as redacted

    text = re.sub(_UUID, "00000000-0000-0000-0000-000000000000", text, flags=re.I)
    text = re.sub(rf"(<({_IDENTIFYING})>)[^<]*", r"\g<1>0", text)
    text = re.sub(rf"<({_OF_PROGRAMS})>.*?</\1>", r"<\1/>", text, flags=re.DOTALL)
    return redacted(text)


def hardware_of_record(outputs: Mapping[str, str]) -> dict[str, Any]:
    """The hardware that recorded outputs describe, in the twin's own form; parts that were not recorded are
    left out."""
    import re

    from bringup.node import facts

    made: dict[str, Any] = {"source": "recorded"}
    if "nvidia-smi-q.xml" in outputs:
        rows = facts.parse_smi(outputs["nvidia-smi-q.xml"])["gpus"]
        links = {row["gpu"]: row["links"] for row in facts.parse_nvlink(outputs.get("nvlink-s.txt", ""))}
        near = {
            address: int(node)
            for address, node in re.findall(
                r"devices/(\S+)/numa_node:(-?\d+)", outputs.get("pci-nodes.txt", "")
            )
        }
        made["gpus"] = [
            _recorded_gpu(number, row, near, links.get(number, 0)) for number, row in enumerate(rows)
        ]
    if outputs.get("page-size.txt", "").strip().isdecimal():
        made["page_size_kib"] = int(outputs["page-size.txt"]) // 1024
    if "lspci.txt" in outputs:
        bridges = re.findall(r"^(\S+) Bridge.*\[0680\]", outputs["lspci.txt"], re.MULTILINE)
        made["switches"] = bridges
    if "topo-m.txt" in outputs:
        made["topology"] = outputs["topo-m.txt"]
    numa = _recorded_numa(outputs.get("numa.txt", ""))
    if numa:
        made["numa"] = numa
    total = re.search(r"^MemTotal:\s+(\d+) kB", outputs.get("meminfo.txt", ""), re.MULTILINE)
    if total:
        made["memory_gib"] = round(int(total[1]) / 1024**2, 2)
    return made


def _recorded_gpu(number: int, row: Mapping[str, Any], near: Mapping[str, int], links: int) -> dict[str, Any]:
    raw = str(row["address"] or "").lower()
    domain, _, rest = raw.partition(":")
    device = str(row["pci_id"] or "233510DE").lower()
    address = f"{domain[-4:]}:{rest}"
    return {
        "name": row["name"],
        "uuid": f"GPU-00000000-0000-0000-0000-{number:012d}",
        "address": address,
        "pci_id": f"{device[4:]}:{device[:4]}",
        "memory_mib": (row["memory"] or 0) // 1024**2,
        "power_limit_w": row["power_limit_w"] or 700,
        "power_default_w": row["power_default_w"] or row["power_limit_w"] or 700,
        "temperature_c": row["temperature_c"] or 34,
        "numa_node": near.get(address, 0),
        "nvlinks": links,
        "peers_by_nvlink": links > 0,
    }


def _recorded_numa(text: str) -> list[dict[str, Any]]:
    import re

    nodes: dict[int, dict[str, Any]] = {}
    for number, name, value in re.findall(r"node(\d+)/(cpulist|distance|meminfo):(.*)$", text, re.MULTILINE):
        node = nodes.setdefault(int(number), {"node": int(number), "cpus": "", "memory_gib": 0.0})
        if name == "cpulist":
            node["cpus"] = value.strip()
        elif name == "distance":
            node["distance"] = value.strip()
        elif found := re.search(r"MemTotal:\s+(\d+) kB", value):
            node["memory_gib"] = round(int(found[1]) / 1024**2, 2)
    return [nodes[number] for number in sorted(nodes)]
