"""Does what surrounds a server let it live? Limits, memory, names and mirrors, containers, environment, files.

Checks of preflight, as in `bringup.preflight`: facts in (`bringup.node.surroundings`), findings out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from typing import Any

from bringup.expected import GIB, Check, Expected, Facts, Finding, numbers, size
from bringup.node import linking
from bringup.node.contents import INDEX

OPEN_FILES_LEAST = 65_536
"""Open files that a server of eight ranks and a thousand clients needs."""

TASKS_LEAST = 16_384
"""Threads and processes: eight ranks with their compilers, tokenizers and library pools start thousands."""

FILES_SHARE = 0.8
"""Part of the machine's open files that may be in use."""

HUGE_SHARE = 0.05
"""Part of the memory that may lie in huge pages of fixed size, which no server here takes."""

SHARED_GIB = 8.0
"""Size of /dev/shm that ranks and collectives of other people's containers and tools need."""

FIRST_TOOLKIT: Mapping[str, tuple[int, int]] = {
    "8.0": (11, 0),
    "8.9": (11, 8),
    "9.0": (12, 0),
    "10.0": (12, 8),
    "10.3": (12, 9),
    "12.0": (12, 8),
}
"""Compute capability -> the first toolkit that compiles for all of it, sm_90a, sm_100f and their like included
(https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/)."""

FRONT_LEAST_S = 300
"""Seconds that a proxy must wait for the next piece: an answer that is not streamed comes whole, after minutes."""

STALE_BYTES = 16 * 1024**2
SHORT_START_S = 300
"""Seconds: a start timeout below this ends a server that is still loading."""


def check_limits(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """The machine, and no drop-in, takes from units what they are planned with."""
    found = facts.get("limits") or {}
    wanted = expected.limits
    most = found.get("open_files_most")
    if wanted and most is not None and most < OPEN_FILES_LEAST:
        yield Finding(
            "LIMIT_OPEN_FILES",
            "error",
            f"no process may open more than {most} files here, servers need {OPEN_FILES_LEAST}",
            f"fs.nr_open = {most}",
            f"sudo sysctl -w fs.nr_open={wanted['open_files']}",
        )
    opened, table = found.get("files_open"), found.get("files_most")
    if opened is not None and table and opened > FILES_SHARE * table:
        yield Finding(
            "FILE_TABLE_FULL",
            "error",
            f"{opened} of {table} files are open on the whole machine: new ones will be refused",
            "/proc/sys/fs/file-nr",
            "Find who holds them (sudo lsof -n | awk '{print $1}' | sort | uniq -c | sort -n | tail), "
            "or raise it: sudo sysctl -w fs.file-max=9223372036854775807",
        )
    locked = found.get("locked_memory")
    if expected.gpus and locked not in (None, -1) and found.get("raised") is False:
        yield Finding(
            "LIMIT_LOCKED_MEMORY",
            "error",
            f"units may lock {size(locked)} of memory at most: pinned host memory and RDMA fail",
            "hard limit of process 1, which has no right to raise it",
            "Start the machine's container or virtual machine with an unlimited memlock",
        )
    tasks = found.get("tasks_most")
    if wanted and tasks is not None and tasks < TASKS_LEAST:
        yield Finding(
            "LIMIT_TASKS",
            "error",
            f"all units together may have {tasks} threads, a server needs up to {TASKS_LEAST}",
            "the least of kernel.threads-max, kernel.pid_max and pids.max of system.slice",
            "sudo sysctl -w kernel.threads-max=1000000 kernel.pid_max=4194304; systemctl show -p TasksMax system.slice",
        )


def _count(text: str) -> float:
    """A limit of systemd as a number: "512", "64K", "1024:524288" (soft:hard, the soft counts), "infinity"."""
    word = text.partition(":")[0].strip()
    if word in ("infinity", ""):
        return float("inf")
    factor = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}.get(word[-1:], 1)
    digits = word[:-1] if factor > 1 else word
    return float(digits) * factor if digits.isdecimal() else float("inf")


def _seconds(text: str) -> float:
    """A span of systemd in seconds: "90", "90s", "5min", "1h 30min", "infinity"."""
    if text.strip() in ("infinity", ""):
        return float("inf")
    units = {"": 1, "s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "hr": 3600, "ms": 0.001, "d": 86400}
    return sum(
        float(number) * units.get(unit, 1) for number, unit in re.findall(r"([\d.]+)\s*([a-z]*)", text)
    )


def check_overrides(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """No drop-in that somebody else left changes what a server's unit says."""
    for row in facts.get("overrides") or ():
        verdict = _override(str(row["key"]), str(row["value"]))
        if verdict:
            code, what = verdict
            yield Finding(
                code,
                "error",
                f"a drop-in {what}",
                f"{row['file']}: {row['key']}={row['value']}, for {row['unit']}",
                f"Take it away, or the line out of it: sudo rm {row['file']} && sudo systemctl daemon-reload",
            )


def _override(key: str, value: str) -> tuple[str, str] | None:
    """Code and words for a drop-in's line; None when it takes nothing away."""
    if key == "LimitNOFILE" and _count(value) < OPEN_FILES_LEAST:
        return "LIMIT_OPEN_FILES", f"lets servers open only {value} files, they need {OPEN_FILES_LEAST}"
    if key == "LimitMEMLOCK" and _count(value) != float("inf"):
        return "LIMIT_LOCKED_MEMORY", f"lets servers lock only {value} bytes of memory"
    if key in ("TasksMax", "LimitNPROC") and ("%" not in value) and _count(value) < TASKS_LEAST:
        return "LIMIT_TASKS", f"lets servers start only {value} threads, they need up to {TASKS_LEAST}"
    if key == "DevicePolicy" and value in ("strict", "closed"):
        return "UNIT_DEVICES", "closes devices to servers, and GPUs are devices"
    if key == "PrivateDevices" and value.lower() in ("yes", "true", "1", "on"):
        return "UNIT_DEVICES", "gives servers a /dev without GPUs"
    if key == "Restart" and value not in ("always", ""):
        return (
            "UNIT_RESTART",
            f"makes servers restart {value} only: engines end with exit code 0 after GPU faults",
        )
    if key == "TimeoutStartSec" and 0 < _seconds(value) < SHORT_START_S:
        return "UNIT_START_TIMEOUT", f"ends servers that load for longer than {value}"
    return None


def check_shared_memory(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """/dev/shm is big enough for ranks and collectives, and nothing dead lies in it."""
    found = facts.get("shared_memory")
    if not expected.gpus or not found:
        return
    least = expected.threshold("shm_gib", SHARED_GIB) * GIB
    if found["total"] < least:
        yield Finding(
            "SHM_SMALL",
            "warning",
            f"/dev/shm has {size(found['total'])}, ranks and collectives need {size(least)}",
            "our servers have one of their own, other programs and containers have not",
            "sudo mount -o remount,size=50% /dev/shm",
        )
    if found["stale_bytes"] > STALE_BYTES:
        yield Finding(
            "SHM_STALE",
            "warning",
            f"{found['stale_count']} segments of dead programs hold {size(found['stale_bytes'])} of memory",
            ", ".join(f"/dev/shm/{name}" for name in found["stale"]),
            "invoke cleanup, or: sudo rm /dev/shm/nccl-* /dev/shm/psm_*",
        )


def check_huge_pages(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Pages of the size that the kernel's command line and the platform want, and no memory put away in huge ones."""
    found = facts.get("huge_pages") or {"sizes": [], "asked": []}
    there = {row["size"] for row in found["sizes"]}
    strange = [asked for asked in found["asked"] if there and asked not in there]
    if strange:
        yield Finding(
            "HUGE_PAGES_UNSUPPORTED",
            "warning",
            f"the kernel's command line asks for huge pages of {', '.join(size(one) for one in strange)}, "
            "which this kernel has not",
            f"sizes: {', '.join(size(one) for one in sorted(there))}",
            "Take hugepagesz= out of the kernel's command line, or give it a size that is there",
        )
    held = sum(row["size"] * row["free"] for row in found["sizes"])
    total = facts["memory"]["total"]
    if expected.gpus and held > HUGE_SHARE * total:
        yield Finding(
            "HUGE_PAGES_HELD",
            "warning",
            f"{size(held)} of memory lie in free huge pages, which servers do not use",
            f"of {size(total)}",
            "sudo sysctl -w vm.nr_hugepages=0, and take hugepages= out of the kernel's command line",
        )
    wanted, there_now = (expected.driver or {}).get("page_size_kib"), facts.get("page_size")
    if wanted and there_now and there_now != wanted * 1024:
        yield Finding(
            "PAGE_SIZE",
            "warning",
            f"the kernel has pages of {there_now // 1024} KiB, {wanted} KiB are recommended for {expected.platform}",
            f"getconf PAGESIZE: {there_now}",
            f"Boot a kernel with {wanted} KiB pages (its package ends in -64k), at the next maintenance",
        )


def check_memory_policy(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Processes can be bound to memory nodes, where the plan does so."""
    said = facts.get("memory_policy")
    if said:
        yield Finding(
            "MEMORY_POLICY_DENIED",
            "error",
            f"memory cannot be bound to nodes {expected.memory_nodes}, as the plan does",
            said,
            "In a container give it SYS_NICE or another seccomp profile; else look at numactl --hardware",
        )


def check_settings(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Kernel values and files of /sys are as the settings of the plan say (transparent huge pages among them)."""
    there: Mapping[str, str] = facts.get("values") or {}
    differ = [
        f"{path} is {value or 'empty'}, not {row['value']}"
        for row in expected.settings
        for path, value in there.items()
        if fnmatch(path, str(row["path"])) and value.split() != str(row["value"]).split()
    ]
    if differ:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        yield Finding(
            "SETTINGS_DIFFER",
            "note",
            f"{len(differ)} kernel settings are not as planned",
            "; ".join(differ[:3]) + more,
            "invoke provision sets them (role system_settings); why each is there: catalog/settings/gpu-node.yml",
        )


def check_addresses(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Something answers at one of the addresses of each thing that has still to be fetched."""
    by_purpose: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for row in facts.get("addresses") or ():
        by_purpose[row["purpose"]].append(row)
    for purpose, rows in by_purpose.items():
        if not all(row["error"] for row in rows):
            continue
        seen = "; ".join(f"{row['host']}:{row['port']}: {row['error']}" for row in rows)
        if all(row["error"].startswith("name") for row in rows):
            yield Finding(
                "NAME_NOT_FOUND",
                "error",
                f"the node finds no address of {rows[0]['host']}, where {purpose} comes from",
                seen,
                "Look at /etc/resolv.conf (resolvectl status); a site without a way out names mirrors in its inventory",
            )
        else:
            yield Finding(
                "MIRROR_UNREACHABLE",
                "error",
                f"nobody answers at {rows[0]['host']}, where {purpose} comes from",
                seen,
                "Check routes, firewall and proxy from the node (curl -v), or name a mirror in the inventory",
            )


def check_containers(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """No container of somebody else has GPUs; and what we do would not take them from it unseen."""
    if not expected.gpus:
        return
    environment = facts.get("environment") or {}
    for one in facts.get("containers") or ():
        names = ", ".join(row["name"] for row in one["with_gpus"])
        if names:
            yield Finding(
                "CONTAINER_HAS_GPUS",
                "warning",
                f"containers of {one['engine']} have GPUs: {names}",
                "; ".join(f"{row['name']}: {row['image']}" for row in one["with_gpus"]),
                f"Stop them before servers start: sudo {one['engine']} stop {names.replace(',', '')}",
            )
        if names and environment.get("char_links") is False:
            yield Finding(
                "CONTAINER_LOSES_GPUS",
                "warning",
                f"the next daemon-reload of systemd takes the GPUs from {names}",
                "/dev/char has no links to the GPUs' devices",
                "sudo nvidia-ctk system create-dev-char-symlinks --create-all, or stop the containers first",
            )
        if not one["gives_gpus"]:
            yield Finding(
                "CONTAINER_RUNTIME",
                "note",
                f"{one['engine']} cannot give GPUs to containers (our servers run in none)",
                f"{one['engine']} info names no nvidia runtime",
                "Where it is needed: sudo apt-get install nvidia-container-toolkit; sudo nvidia-ctk runtime configure",
            )


def check_environment(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """No variable reaches servers from outside of their units."""
    found = facts.get("environment") or {}
    manager = {
        name: value
        for name, value in (found.get("manager") or {}).items()
        if name not in expected.sets and "proxy" not in name.lower()
    }
    home = manager.get("CUDA_HOME", "")
    if ":" in home:
        yield Finding(
            "CUDA_HOME_MALFORMED",
            "error",
            "CUDA_HOME is a list of folders; what compiles at run time takes it as one",
            f"CUDA_HOME={home}, in systemd's environment",
            "sudo systemctl unset-environment CUDA_HOME; look in /etc/systemd/system.conf (DefaultEnvironment=)",
        )
    collective = {name: value for name, value in manager.items() if name.startswith(("NCCL_", "GLOO_"))}
    collective |= {
        name: value for name, value in (found.get("nccl") or {}).items() if name not in expected.sets
    }
    if collective and expected.gpus:
        yield Finding(
            "COLLECTIVE_TUNED",
            "warning",
            "somebody has tuned the collective library for every program on this node",
            ", ".join(f"{name}={value}" for name, value in collective.items()),
            "Take it out of /etc/nccl.conf and systemd's environment; a profile's environment is the place for it",
        )
    others = sorted(set(manager) - set(collective) - ({"CUDA_HOME"} if ":" in home else set()))
    if others and expected.gpus:
        yield Finding(
            "ENVIRONMENT_LEAKS",
            "warning",
            f"every unit inherits {', '.join(others)}",
            ", ".join(f"{name}={manager[name]}" for name in others),
            f"sudo systemctl unset-environment {' '.join(others)}; look in /etc/systemd/system.conf",
        )


def check_own_name(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """The node finds an address for its own name: collectives and distributed start-up ask for it."""
    found = facts.get("own_name") or {}
    if expected.gpus and found.get("found") is False:
        yield Finding(
            "OWN_NAME_UNKNOWN",
            "warning",
            f"the node finds no address for its own name, {found['name']}: starts wait for it, and collectives fall "
            "back to loopback",
            f"getent ahosts {found['name']} finds nothing",
            f"echo '127.0.1.1 {found['name']}' | sudo tee -a /etc/hosts",
        )


def check_compiler(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Engines that compile at run time find a C compiler, and it makes a program: one was made to see."""
    for row in facts.get("linking") or ():
        trouble = linking.trouble(row, facts["os"])
        if trouble and trouble.code == "COMPILER_MISSING":
            yield Finding("COMPILER_MISSING", "error", trouble.what, trouble.evidence, trouble.remedy)
        elif trouble and trouble.code == "LINK_FAILED":
            yield Finding("LINK_FAILED", "error", trouble.what, trouble.evidence, trouble.remedy)


def check_toolkits(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """The toolkit that servers would compile with makes code for these GPUs that this driver loads."""
    versions = sorted(facts.get("toolkits") or (), key=numbers)
    if not expected.gpus or not versions:
        return
    newest, known = versions[-1], (facts["gpu"]["smi"] or {}).get("cuda")
    if known and numbers(newest) > numbers(known):
        yield Finding(
            "TOOLKIT_NEWER",
            "warning",
            f"CUDA toolkit {newest} is newer than the driver, which knows CUDA {known}: what servers compile at run "
            "time may not load",
            f"/usr/local/cuda-{newest}",
            f"Install a newer driver (node_driver.version), or toolkit {known} in place of {newest}",
        )
    capability = str(expected.gpus.get("sm", ""))
    least = FIRST_TOOLKIT.get(capability)
    if least and numbers(newest) < least:
        yield Finding(
            "TOOLKIT_TOO_OLD",
            "warning",
            f"CUDA toolkit {newest} cannot compile for compute capability {capability}: what servers compile at run "
            "time fails",
            f"/usr/local/cuda-{newest}",
            f"Install toolkit {'.'.join(map(str, least))} or newer, up to the driver's CUDA {known or 'version'}",
        )


def check_log_cutters(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Nobody else cuts the servers' logs: a second one loses lines, or leaves holes."""
    rows = facts.get("log_cutters") or ()
    if rows:
        yield Finding(
            "LOGS_CUT_TWICE",
            "warning",
            "logrotate takes in the servers' logs, which are cut by their own writer already",
            "; ".join(f"{row['file']}: {row['pattern']}" for row in rows),
            f"Take the pattern out of {rows[0]['file']}; sizes and numbers are node_log_rotation in the inventory",
        )


def check_fronts(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """A proxy in front of a server waits as long as an answer takes."""
    for row in facts.get("fronts") or ():
        if row["seconds"] < FRONT_LEAST_S:
            yield Finding(
                "PROXY_IMPATIENT",
                "warning",
                f"nginx in front of port {row['port']} ends answers that say nothing for {row['seconds']} s",
                f"{row['file']}: proxy_read_timeout {row['seconds']}s",
                "proxy_read_timeout 3600s; proxy_buffering off; then: sudo nginx -t && sudo systemctl reload nginx",
            )


def check_caches(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """Servers own what lies in their folders."""
    for row in facts.get("caches") or ():
        if row["foreign"]:
            yield Finding(
                "CACHE_NOT_WRITABLE",
                "error",
                f"{row['path']} holds files that are not {row['user']}'s: what is compiled cannot be kept there",
                f"{row['foreign']} belongs to uid {row['owner']}",
                f"sudo chown -R {row['user']}: {row['path']}, or remove it: caches are made anew",
            )


def check_models(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """The files of models that are there are what the lock says, by size and first bytes, and what services draft with
    is in the index."""
    for row in facts.get("models") or ():
        if row["problems"]:
            more = (
                f" and {row['count'] - len(row['problems'])} more"
                if row["count"] > len(row["problems"])
                else ""
            )
            yield Finding(
                "MODEL_DAMAGED",
                "error",
                f"model {row['name']} in {row['folder']} is not whole",
                "; ".join(row["problems"]) + more,
                "invoke provision fetches what is wrong again (role model_store)",
            )
        mtp = row.get("mtp") or {}
        if mtp and not mtp["found"]:
            yield Finding(
                "MODEL_MTP_MISSING",
                "error",
                f"{' and '.join(mtp['services'])} drafts with the MTP layer of model {row['name']}, whose index has no "
                "tensor of it: it would serve with health 200, and accept nothing of what it drafts",
                f"{row['folder']}/{INDEX}: 0 names start with {mtp['prefix']}",
                "invoke provision fetches or makes the model again (role model_store); a copy that never had the layer "
                "is another model: take the speculative flags out, or plan one that has it",
            )


def check_packages(facts: Facts, expected: Expected) -> Iterator[Finding]:
    """The package manager is not in the middle of something."""
    names = facts.get("packages_broken") or ()
    if names:
        yield Finding(
            "PACKAGES_BROKEN",
            "error",
            f"{len(names)} packages are not installed to their end, so that nothing else can be",
            ", ".join(names[:5]),
            "sudo dpkg --configure -a && sudo apt-get -f install; then sudo apt-get check",
        )


CHECKS: tuple[Check, ...] = (
    check_packages,
    check_limits,
    check_overrides,
    check_shared_memory,
    check_huge_pages,
    check_memory_policy,
    check_settings,
    check_environment,
    check_addresses,
    check_own_name,
    check_containers,
    check_compiler,
    check_toolkits,
    check_log_cutters,
    check_fronts,
    check_caches,
    check_models,
)
