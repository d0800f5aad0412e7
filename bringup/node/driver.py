"""The GPU driver of a node: which version should be there, from which packages, and what is to be done.

Deciding is pure (`satisfied`, `choose`, `reboot_reasons`); `apply` looks, decides and acts. Nothing that
would end a running server is done unless it was asked for, and the fabric manager is never restarted: it is
enabled, and started where it does not run.
"""

from __future__ import annotations

import hashlib
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import common, facts, packages, place, seal, undo, units
from .files import write_atomic

ROLE = "nvidia_driver"
MODULE_VERSION = Path("/proc/driver/nvidia/version")
NOUVEAU = Path("/sys/module/nouveau")
INDEX = Path("/var/lib/bringup/driver-archive")
"""Where the index of a folder of packages lies that has none of its own."""

SOURCE = "/etc/apt/sources.list.d/bringup-driver.sources"
DKMS_SETTINGS = Path("/etc/dkms")
DKMS_KEYS = ("/var/lib/dkms/mok.pub", "/var/lib/shim-signed/mok/MOK.der")
"""Certificates of the keys that DKMS signs with, on Debian and on Ubuntu, where its settings name none."""

MODPROBE_LIMIT_S = 120
ANSWER_EVERY_S = 5
DRAIN_EVERY_S = 2
FABRIC = "nvidia-fabricmanager.service"
PERSISTENCE = "nvidia-persistenced.service"


class DriverFailed(Exception):
    """Why the driver is not as wanted, and what to do."""


class DriverRefused(DriverFailed):
    """The node serves, and nothing was changed."""


@dataclass(frozen=True)
class Now:
    """What a node has: versions of the running module and of the packages ("" for none).

    `packaged_open`: a package that only a driver with open kernel modules has is installed.
    """

    running: str = ""
    running_open: bool = False
    packaged: str = ""
    fabric: str = ""
    nouveau: bool = False
    packaged_open: bool = False


@dataclass(frozen=True)
class Wish:
    """What is wanted. `version`: exact, a branch, or "" for at least `minimum` (else `recommended`)."""

    version: str = ""
    minimum: str = ""
    recommended: str = ""
    open_modules: bool = False
    fabric: bool = False
    modules: str = "dkms"

    @property
    def spec(self) -> str:
        """What is installed when something has to be."""
        return self.version or self.recommended or self.minimum


# --- deciding -----------------------------------------------------------------------------------------------


def numbers(version: str) -> tuple[int, ...]:
    """ "580.105.08" -> (580, 105, 8)."""
    return tuple(int(part) for part in re.findall(r"\d+", version))


def matches(version: str, spec: str) -> bool:
    """Is a version the one, or of the branch, that `spec` names? "580.105.08" is of "580"."""
    wanted = numbers(spec)
    return bool(version) and numbers(version)[: len(wanted)] == wanted


def driver_fits(wish: Wish, now: Now) -> bool:
    """Is the driver that is installed one that is wanted?"""
    have = now.packaged or now.running
    # Open modules that are installed and wait for a boot are not installed again.
    is_closed = now.running == have and not now.running_open and not now.packaged_open
    if not have or (wish.open_modules and is_closed):
        return False
    return matches(have, wish.version) if wish.version else numbers(have) >= numbers(wish.minimum)


def satisfied(wish: Wish, now: Now) -> bool:
    """Is what is installed as wanted? The fabric manager must be of exactly the driver's version."""
    return driver_fits(wish, now) and not (wish.fabric and now.packaged and now.fabric != now.packaged)


def wanted_version(wish: Wish, now: Now) -> str:
    """The version, or branch, that is to be installed: a driver that fits stays when only the fabric manager
    does not."""
    return now.packaged if now.packaged and driver_fits(wish, now) else wish.spec


def reboot_reasons(wish: Wish, now: Now) -> list[str]:
    """Why the driver on the disk is not the one that runs."""
    reasons = []
    if now.nouveau:
        reasons.append("nouveau holds the GPUs")
    if now.running and now.packaged and now.running != now.packaged:
        reasons.append(f"driver {now.running} runs, {now.packaged} is installed")
    if now.running and wish.open_modules and not now.running_open:
        reasons.append("closed kernel modules run, open ones are needed")
    return reasons


def expand(name: str, branch: str, kernel: str) -> str:
    """A package's name with `{branch}` and `{kernel}` filled in."""
    return name.replace("{branch}", branch).replace("{kernel}", kernel)


def choose(
    wish: Wish, spec: str, sets: Sequence[Mapping[str, Any]], had: Mapping[str, Sequence[str]], kernel: str
) -> tuple[str, dict[str, str]]:
    """The newest version that fits `spec` and the packages (name -> version) that bring it, from the first
    set that can be had whole; ("", {}) when none can.

    A set: `modules` (dkms, prebuilt), `open`, `driver` (names at the driver's own version), `other` (names at
    any version), `fabric` (names, only where the machine has switches).
    """
    branch = spec.partition(".")[0]
    for one in sets:
        if one["modules"] != wish.modules or (wish.open_modules and not one["open"]):
            continue
        names = [*one["driver"], *(one["fabric"] if wish.fabric else [])]
        exact = [expand(name, branch, kernel) for name in names]
        other = [expand(name, branch, kernel) for name in one["other"]]
        versions = [{packages.upstream(text): text for text in reversed(had.get(name, ()))} for name in exact]
        common_ones = set(versions[0]).intersection(*versions[1:]) if versions else set()
        fitting = sorted((text for text in common_ones if matches(text, spec)), key=numbers)
        if fitting and all(had.get(name) for name in other):
            found = {name: texts[fitting[-1]] for name, texts in zip(exact, versions, strict=True)}
            return fitting[-1], {**found, **{name: had[name][0] for name in other}}
    return "", {}


def names_of(sets: Sequence[Mapping[str, Any]], branch: str, kernel: str) -> list[str]:
    """All packages that any of the sets names."""
    found = [name for one in sets for key in ("driver", "other", "fabric") for name in one[key]]
    return sorted({expand(name, branch, kernel) for name in found})


def installed_of(
    sets: Sequence[Mapping[str, Any]], have: Iterable[str], kernel: str, parts: Sequence[str]
) -> list[str]:
    """Installed packages that a set names in one of its parts, whatever their branch; the sets' order."""
    found: dict[str, None] = {}
    for one in sets:
        for name in (name for part in parts for name in one[part]):
            form = re.escape(expand(name, "BRANCH", kernel)).replace("BRANCH", r"\d+")
            found.update({package: None for package in have if re.fullmatch(form, package)})
    return list(found)


def open_only(sets: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The sets with open kernel modules, less the packages that sets with closed ones name too."""
    shared = {name for one in sets if not one["open"] for name in (*one["driver"], *one["other"])}
    return [
        {
            **one,
            "driver": [name for name in one["driver"] if name not in shared],
            "other": [name for name in one["other"] if name not in shared],
        }
        for one in sets
        if one["open"]
    ]


def packaged_version(
    sets: Sequence[Mapping[str, Any]], have: Mapping[str, str], kernel: str, part: str = "driver"
) -> str:
    """Version of the driver (or fabric manager) as its packages say, whatever their branch; "" for none."""
    first = next(iter(installed_of(sets, have, kernel, (part,))), "")
    return packages.upstream(have[first]) if first else ""


def refusal(serving: Sequence[str], why: str) -> str:
    """The message for a node that serves."""
    return (
        f"this node serves ({'; '.join(serving)}), and {why} would end that. Provision it in a window with "
        "-e nvidia_driver_while_serving=drain, which stops the servers first."
    )


# --- looking ------------------------------------------------------------------------------------------------


def look(sets: Sequence[Mapping[str, Any]]) -> Now:
    """What runs and what is installed."""
    text, have, kernel = facts.read(MODULE_VERSION), packages.versions(), platform.release()
    return Now(
        running=facts.parse_module_version(text) or "",
        running_open="Open Kernel Module" in text,
        packaged=packaged_version(sets, have, kernel),
        fabric=packaged_version(sets, have, kernel, "fabric"),
        nouveau=NOUVEAU.is_dir(),
        packaged_open=bool(installed_of(open_only(sets), have, kernel, ("driver", "other"))),
    )


def serving(services: Sequence[Mapping[str, Any]], gpus: int) -> list[str]:
    """What uses the GPUs: our servers that are up, and other processes that compute."""
    up = [row["unit"] for row in services if undo.unit_state(f"{row['unit']}.service")[1]]
    holders = [
        f"pid {pid} on GPU {gpu}"
        for gpu, pid in common.gpu_holders(range(gpus))
        if common.unit_of(pid) not in up
    ]
    return [f"{unit} is up" for unit in up] + holders[:4]


def shown() -> tuple[int, str]:
    """GPUs that the driver shows, and what it says when it shows none."""
    code, out, err = common.run(["nvidia-smi", "-L"], facts.GPU_COMMAND_LIMIT_S)
    found = len(re.findall(r"^GPU \d+:", out, re.MULTILINE)) if code == 0 else 0
    return found, "" if found else " ".join((out + err).split())[:300]


def fabric_version() -> str:
    """The installed fabric manager's version, "" without one."""
    match = re.search(r"(\d+\.\d+(?:\.\d+)?)", common.run(["nv-fabricmanager", "--version"])[1])
    return match[1] if match else ""


# --- secure boot --------------------------------------------------------------------------------------------


def signing_keys(root: Path = Path("/")) -> list[Path]:
    """Certificates of the keys that DKMS signs modules with, those that are there."""
    named = [
        match[1]
        for path in (root / str(DKMS_SETTINGS).lstrip("/")).glob("framework.conf*")
        for file in (sorted(path.glob("*.conf")) if path.is_dir() else [path])
        for match in re.finditer(r"^\s*mok_certificate=[\"']?([^\s\"']+)", facts.read(file), re.MULTILINE)
    ]
    return [path for name in (named or DKMS_KEYS) if (path := root / name.lstrip("/")).is_file()]


def unsigned(runner: facts.Runner, root: Path = Path("/")) -> str:
    """Why the kernel would refuse modules that DKMS builds here, and what to do; "" when it would take them."""
    if not facts.secure_boot(runner, root):
        return ""
    keys = signing_keys(root)
    said = {key: runner(["mokutil", "--test-key", str(key)], facts.COMMAND_LIMIT_S) for key in keys}
    if any("already enrolled" in text for _, text in said.values()):
        return ""
    if any(code == 127 for code, _ in said.values()):
        why = "whether their key is enrolled cannot be seen without mokutil"
        key = "install mokutil and run this again"
    elif keys:
        why = f"their key {keys[0]} is not enrolled"
        key = f"enrol it (sudo mokutil --import {keys[0]}; boot, and confirm at the console)"
    else:
        why = "there is no key that they could be signed with"
        key = (
            "make one (sudo dkms generate_mok; on Ubuntu sudo update-secureboot-policy --new-key) and enrol it "
            f"(sudo mokutil --import {DKMS_KEYS[0]}; boot, and confirm at the console)"
        )
    return (
        f"secure boot is on, and the kernel would refuse modules that DKMS builds: {why}. Set "
        f"node_driver.modules: prebuilt (the distribution's own signed modules), or {key}, or turn secure boot "
        "off in the firmware. Nothing was changed."
    )


# --- an archive of packages ---------------------------------------------------------------------------------


def source_text(folder: Path) -> str:
    """The deb822 text of a local archive, whose index may lie beside it."""
    place_of = folder if (folder / "Packages").is_file() else INDEX
    return (
        "# Written by bringup from the plan: the driver's packages, in a folder of this node.\n"
        f"Types: deb\nURIs: file:{place_of}\nSuites: ./\nTrusted: yes\n"
    )


def make_ready(folder: Path, journal: undo.Journal) -> None:
    """Compares a local archive with its sums and makes its index where it has none. Raises DriverFailed."""
    if not folder.is_dir():
        raise DriverFailed(f"there is no folder {folder} on this node. Copy the driver's packages there.")
    check_sums(folder)
    if not (folder / "Packages").is_file():
        journal.remember_paths([INDEX / name for name in ("Packages", "debs", "listing")])
        index(folder)


def check_sums(folder: Path) -> None:
    """Compares the packages with the archive's SHA256SUMS, where it has one. Raises DriverFailed."""
    sums = folder / "SHA256SUMS"
    if not sums.is_file():
        return
    wrong = []
    for line in sums.read_text(encoding="utf-8").splitlines():
        wanted, _, name = line.partition(" ")
        path = folder / name.strip().lstrip("*")
        if name.strip() and (not path.is_file() or sha256(path) != wanted):
            wrong.append(path.name)
    if wrong:
        raise DriverFailed(
            f"{sums}: {', '.join(wrong[:5])} missing or not as listed. Copy the archive again."
        )


def sha256(path: Path) -> str:
    """Hexadecimal digest of a file."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def index(folder: Path) -> Path:
    """An index beside the folder of packages, made again when the folder has changed. Raises DriverFailed."""
    debs = sorted(folder.glob("*.deb"))
    if not debs:
        raise DriverFailed(f"{folder} holds no packages (*.deb). Copy the driver's packages there.")
    state = "".join(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}\n" for path in debs)
    listing = INDEX / "listing"
    if facts.read(listing) == state and (INDEX / "Packages").is_file():
        return INDEX
    rows = []
    for path in debs:
        code, control = undo.run(["dpkg-deb", "-f", str(path)])
        if code != 0:
            raise DriverFailed(f"{path} is no package: {control[:200]}")
        rows.append(
            f"{control}\nFilename: debs/{path.name}\nSize: {path.stat().st_size}\nSHA256: {sha256(path)}\n"
        )
    write_atomic(INDEX / "Packages", "\n".join(rows))
    link = INDEX / "debs"
    link.unlink(missing_ok=True)
    link.symlink_to(folder)
    write_atomic(listing, state)
    return INDEX


# --- doing --------------------------------------------------------------------------------------------------


def drain(services: Sequence[Mapping[str, Any]]) -> list[str]:
    """Stops each server that is up, after its requests in flight have ended or `drain_s` are over."""
    done = []
    for row in services:
        unit = f"{row['unit']}.service"
        if not undo.unit_state(unit)[1]:
            continue
        end = time.monotonic() + float(row["drain_s"])
        while time.monotonic() < end and _in_flight(str(row["name"])):
            time.sleep(DRAIN_EVERY_S)
        code, said = undo.run(
            ["systemctl", "stop", unit], float(row["stop_timeout_s"]) + packages.INSTALL_LIMIT_S
        )
        if code != 0:
            raise DriverFailed(f"{unit} does not stop: {said}")
        done.append(f"stop {unit}")
    return done


def _in_flight(name: str) -> int:
    try:
        service = common.load(name)
        return common.in_flight(service, key=common.key_of(service))
    except common.Refusal:
        return 0


def install(chosen: Mapping[str, str], old: Sequence[str], journal: undo.Journal) -> list[str]:
    """Installs the packages in place of the `old` ones; their daemons are not started or restarted by it."""
    daemons = (FABRIC, PERSISTENCE)
    gone = sorted(set(old) - set(chosen))
    journal.begin_install()
    free = sorted(packages.held() & {*chosen, *gone})
    undo.run(["systemctl", "mask", "--runtime", *daemons])
    if free:
        undo.run(["apt-mark", "unhold", *free])
    try:
        packages.install(list(chosen), journal, packages.INSTALL_LIMIT_S, chosen, gone)
    except packages.PackagesFailed:
        if still := sorted(set(free) & set(packages.versions())):
            undo.run(["apt-mark", "hold", *still])
        raise
    finally:
        undo.run(["systemctl", "unmask", "--runtime", *daemons])
        undo.run(["systemctl", "daemon-reload"])
    return installing(chosen, old)


def installing(chosen: Mapping[str, str], old: Sequence[str]) -> list[str]:
    """The steps of an installation, in words."""
    return [f"install {name}={version}" for name, version in sorted(chosen.items())] + [
        f"remove {name}" for name in sorted(set(old) - set(chosen))
    ]


def offered(folder: Path) -> dict[str, list[str]]:
    """The versions of each package in a local archive, newest first, from its index or from the packages."""
    known = folder / "Packages"
    texts = [facts.read(known)] if known.is_file() else []
    for path in () if texts else sorted(folder.glob("*.deb")):
        texts.append(undo.run(["dpkg-deb", "-f", str(path), "Package", "Version"])[1] + "\n")
    found: dict[str, set[str]] = {}
    for row in "\n".join(texts).split("\n\n"):
        about = dict(
            line.split(": ", 1) for line in row.splitlines() if re.match(r"(Package|Version): ", line)
        )
        if len(about) == 2:
            found.setdefault(about["Package"], set()).add(about["Version"])
    return {name: sorted(texts, key=numbers, reverse=True) for name, texts in found.items()}


def hold(names: Iterable[str], journal: undo.Journal | None) -> list[str]:
    """Holds packages that are not held yet."""
    missing = sorted(set(names) - packages.held())
    if missing and journal is not None:
        journal.remember_holds(missing)
        code, said = undo.run(["apt-mark", "hold", *missing])
        if code != 0:
            raise DriverFailed(f"apt-mark hold: {said}")
    return [f"hold {name}" for name in missing]


def load() -> None:
    """Loads the module of a driver that was not there before. Raises DriverFailed with what was said."""
    code, said = undo.run(["modprobe", "nvidia"], MODPROBE_LIMIT_S)
    if code != 0:
        _, log = undo.run(["dmesg"])
        last = [
            line
            for line in log.splitlines()
            if "NVRM" in line or "nvidia" in line.lower() or "key" in line.lower()
        ]
        raise DriverFailed(
            f"the kernel does not load the driver: {said}; {' | '.join(last[-3:])}. Look at dkms status, "
            f"at the headers of kernel {platform.release()} and at secure boot, which loads signed modules only."
        )
    undo.run(["modprobe", "nvidia-uvm"], MODPROBE_LIMIT_S)


def daemons(wish: Wish, changed: Sequence[str], own: Sequence[str], check_only: bool) -> list[str]:
    """Enables the daemons and our own units, and starts those that do not run; restarts persistence and
    clocks when their files changed, and the fabric manager never."""
    rows = [
        {"name": PERSISTENCE, "enabled": True, "started": True, "restart_on": _drop_ins(PERSISTENCE, changed)}
    ]
    if wish.fabric:
        rows.append({"name": FABRIC, "enabled": True, "started": True, "restart_on": []})
    rows += [
        {"name": name, "enabled": True, "started": True, "restart_on": [f"/etc/systemd/system/{name}"]}
        for name in own
    ]
    done: list[str] = units.apply(rows, changed, check_only, ROLE)["done"]
    return done


def _drop_ins(unit: str, changed: Sequence[str]) -> list[str]:
    return [path for path in changed if path.startswith(f"/etc/systemd/system/{unit}.d/")]


def apply(given: Mapping[str, Any], check_only: bool) -> dict[str, Any]:
    """Brings the driver to what is wanted: {changed, done, reboot (reasons), version, diff}.

    Raises DriverFailed, PackagesFailed, PlaceFailed, UnitsFailed, OSError; nothing was changed when a node
    that serves was refused.
    """
    wish = Wish(**given["wish"])
    sets, kernel, gpus = given["packages"], platform.release(), int(given["gpus"])
    now = look(sets)
    change = not satisfied(wish, now)
    busy = serving(given["services"], gpus) if change or reboot_reasons(wish, now) else []
    if change and busy and given["while_serving"] != "drain":
        have = now.packaged or now.running or "none"
        raise DriverRefused(refusal(busy, f"driver {wanted_version(wish, now)} in place of {have}"))
    if change and now.running and not now.packaged:
        raise DriverFailed(
            f"driver {now.running} did not come from packages. Remove it with nvidia-uninstall, or leave "
            "node_driver.version unset to keep it."
        )
    if change and wish.modules == "dkms" and (why := unsigned(facts.run)):
        raise DriverFailed(why)
    files = [*given["files"]]
    if given["archive"]:
        if not check_only:
            make_ready(Path(given["archive"]), undo.Journal(ROLE))
        files.append({"path": SOURCE, "content": source_text(Path(given["archive"]))})
    else:
        files.append({"path": SOURCE, "state": "absent"})
    placed = place.apply(files, check_only, ROLE)
    done: list[str] = []
    chosen: Mapping[str, str] = {}
    if change:
        done, chosen = _change(wish, now, given, placed["changed_paths"], kernel, check_only)
    journal = None if check_only else undo.Journal(ROLE)
    if not check_only:
        now = look(sets)
    elif change:
        now = _expected(wish, now, chosen, given, kernel)
    there = {*packages.versions(), *chosen}
    done += hold(set(names_of(sets, now.packaged.partition(".")[0], kernel)) & there, journal)
    done += _initramfs(placed["changed_paths"], journal)
    reboot = reboot_reasons(wish, now)
    if not reboot and not now.running and now.packaged:
        if not check_only:
            load()
        done.append("load the driver")
    if not reboot:
        done += daemons(wish, placed["changed_paths"], given["units"], check_only)
    else:
        if not check_only:
            undo.run(["systemctl", "daemon-reload"])
        for name in (PERSISTENCE, *([FABRIC] if wish.fabric else []), *given["units"]):
            done += _enable(name, check_only)
    if not check_only:
        seal.claim(_claims(wish, now, given, kernel))
    diff = [*placed["diff"], *([{"before": "", "after": "\n".join(done) + "\n"}] if done else [])]
    return {
        "changed": placed["changed"] or bool(done),
        "done": [*placed["changed_paths"], *done],
        "reboot": reboot,
        "version": now.packaged or now.running,
        "diff": diff,
    }


def _claims(wish: Wish, now: Now, given: Mapping[str, Any], kernel: str) -> list[dict[str, Any]]:
    """What is to stay so: the driver that runs, its packages and their holds, its daemons, and the GPUs."""
    names = names_of(given["packages"], now.packaged.partition(".")[0], kernel)
    have = packages.versions()
    kept = [
        {"kind": "package", "name": name, "version": have[name], "held": True}
        for name in names
        if name in have
    ]
    daemons_of = (PERSISTENCE, *([FABRIC] if wish.fabric else []), *given["units"])
    return [
        *kept,
        *(seal.unit_row(name, on=True, active=True) for name in daemons_of),
        {"kind": "driver", "name": "that runs", "runs": now.packaged or now.running},
        {"kind": "gpus", "name": "that the driver shows", "count": int(given["gpus"])},
        {"kind": "kernel", "name": "that runs", "release": kernel, "basis": True},
    ]


def _expected(wish: Wish, now: Now, chosen: Mapping[str, str], given: Mapping[str, Any], kernel: str) -> Now:
    """What a node would have after the installation that check mode leaves out."""
    version = packaged_version(given["packages"], chosen, kernel) or wanted_version(wish, now)
    return replace(
        now, packaged=version, fabric=version if wish.fabric else now.fabric, packaged_open=wish.open_modules
    )


def _enable(name: str, check_only: bool) -> list[str]:
    state, active = undo.unit_state(name)
    if state == "enabled":
        return []
    if check_only:
        return [f"enable {name}"]
    undo.Journal(ROLE).remember_unit(name, state, active)
    code, said = undo.run(["systemctl", "enable", name])
    if code != 0:
        raise DriverFailed(f"systemctl enable {name}: {said}")
    return [f"enable {name}"]


def _change(
    wish: Wish, now: Now, given: Mapping[str, Any], changed: Sequence[str], kernel: str, check_only: bool
) -> tuple[list[str], Mapping[str, str]]:
    """Chooses packages and installs them; what was done, and the packages. In check mode it only says what it would
    install: a repository that the node does not know yet is asked nothing, so its packages have no names then.
    """
    spec = wanted_version(wish, now)
    names = names_of(given["packages"], spec.partition(".")[0], kernel)
    headers = [f"linux-headers-{kernel}"] if wish.modules == "dkms" else []
    old = installed_of(given["packages"], packages.versions(), kernel, ("driver", "fabric"))
    if check_only:
        there = offered(Path(given["archive"])) if given["archive"] else {}
        _, chosen = choose(wish, spec, given["packages"], {**packages.available(names), **there}, kernel)
        return installing(chosen, old) or [f"install driver {spec}"], chosen
    if any(path.startswith("/etc/apt/") for path in changed) or not packages.available(names):
        packages.refresh()
    had = packages.available([*names, *headers])
    _, chosen = choose(wish, spec, given["packages"], had, kernel)
    if not chosen:
        raise DriverFailed(_none(wish, spec, names, had))
    built_for = Path(f"/lib/modules/{kernel}/build")
    if headers and not built_for.exists() and not had.get(headers[0]):
        raise DriverFailed(
            f"DKMS could not build for kernel {kernel}: {built_for} is not there, and {headers[0]} cannot be had. "
            "Install the kernel's headers, boot a kernel that has some, or set node_driver.modules: prebuilt."
        )
    done = drain(given["services"])
    if headers and not built_for.exists():
        chosen = {**chosen, headers[0]: had[headers[0]][0]}
    return done + install(chosen, old, undo.Journal(ROLE)), chosen


def _none(wish: Wish, spec: str, names: Sequence[str], had: Mapping[str, Sequence[str]]) -> str:
    kinds = f"{'open ' if wish.open_modules else ''}kernel modules, {wish.modules}"
    there = sorted({packages.upstream(text) for name in names for text in had.get(name, ())}, key=numbers)
    lacking = [name for name in names if not had.get(name)]
    return (
        f"no set of packages brings driver {spec} ({kinds}). Versions that can be had: "
        f"{', '.join(there) or 'none'}; not to be had: {', '.join(lacking[:6]) or 'nothing'}. Name another "
        "version, or an archive or repository that has it, in node_driver."
    )


def _initramfs(changed: Sequence[str], journal: undo.Journal | None) -> list[str]:
    """Module options count from the first file system on: it is made again when they changed."""
    tool = next(
        (path for path in ("/usr/sbin/update-initramfs", "/sbin/update-initramfs") if Path(path).exists()), ""
    )
    if not tool or not any(path.startswith("/etc/modprobe.d/") for path in changed):
        return []
    if journal is not None:
        journal.remember_after([tool, "-u"])
        undo.run([tool, "-u"])
    return ["update-initramfs"]


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Waits until the driver shows all GPUs and, where there are switches, the fabric manager is up and of
    the driver's version. Raises DriverFailed with all that is wrong."""
    wish, gpus = Wish(**given["wish"]), int(given["gpus"])
    end = time.monotonic() + float(given["limit_s"])
    while True:
        wrong = list(_wrong(wish, gpus, look(given["packages"])))
        if not wrong:
            return {"changed": False, "gpus": gpus}
        if time.monotonic() > end:
            raise DriverFailed(
                "; ".join(wrong) + ". The other nodes are left as they are: look at this one first."
            )
        time.sleep(ANSWER_EVERY_S)


def _wrong(wish: Wish, gpus: int, now: Now) -> Iterable[str]:
    count, said = shown()
    if count != gpus:
        yield f"the driver shows {count} of {gpus} GPUs{f' ({said})' if said else ''}"
    yield from reboot_reasons(wish, now)
    if wish.fabric and not undo.unit_state(FABRIC)[1]:
        yield "the fabric manager is not up"
    elif wish.fabric and fabric_version() != now.running:
        yield f"the fabric manager is {fabric_version()}, the driver {now.running}"


def guard(given: Mapping[str, Any], check_only: bool) -> dict[str, Any]:
    """Before a reboot or an undo: a node that serves is drained when asked for, else refused."""
    busy = serving(given["services"], int(given["gpus"]))
    if busy and given["while_serving"] != "drain":
        raise DriverRefused(refusal(busy, "what was asked for"))
    done = [] if check_only else drain(given["services"])
    still = [] if check_only else serving(given["services"], int(given["gpus"]))
    if still:
        raise DriverFailed(
            f"the servers are stopped, and GPUs are still in use: {'; '.join(still)}. Stop those first."
        )
    return {"changed": bool(done), "done": done}
