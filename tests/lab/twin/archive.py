"""Makes the package archive of a twin: small packages with the real names, versions, relations and files.

They really install, conflict and upgrade; what they hold is links to the stand-ins of `node/`, units, and a
driver library that links and loads. Packages are written here without dpkg, so that any controller can.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bringup.errors import HostFailed, Problem

HERE = Path(__file__).resolve().parent
STANDIN = "/usr/lib/twin/tests/lab/twin/node/standin"
COMPILE_LIMIT_S = 60

BRANCHES: Mapping[str, tuple[str, ...]] = {
    "550": ("550.144.03", "550.163.01"),
    "570": ("570.158.01", "570.195.03"),
    "580": ("580.105.08", "580.159.04"),
}
"""Two versions of each of three driver branches: enough for an upgrade within one, and from one to the next."""

CUDA: Mapping[str, str] = {"12-4": "12.4.131-1", "12-8": "12.8.93-1", "13-0": "13.0.88-1"}
CUDA_NUMBER = {"550": 12040, "570": 12080, "580": 13000}
TRIPLETS = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
COMPILERS = {
    "amd64": ("x86_64-linux-gnu-gcc", "gcc-x86-64-linux-gnu"),
    "arm64": ("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu"),
}
"""Architecture -> its compiler, and the package that has it on whatever machine."""

UNIT = """[Unit]
Description={title} (stand-in of a bringup twin)
After=basic.target
{condition}
[Service]
Type=simple
ExecStart={program}
Restart=no
TimeoutStopSec=10

[Install]
WantedBy=multi-user.target
"""


@dataclass(frozen=True)
class Package:
    """One package: `relations` are control fields, `files` path -> text or bytes, `links` path -> target."""

    name: str
    version: str
    title: str
    relations: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes | str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    scripts: Mapping[str, str] = field(default_factory=dict)


def driver_packages(version: str, cuda: bytes, management: bytes, triplet: str) -> Iterable[Package]:
    """The packages of one driver version, named as Ubuntu and NVIDIA's own repository name them."""
    branch = version.partition(".")[0]
    full = f"{version}-0twin1"
    same = f"(= {full})"

    def package(
        name: str,
        title: str,
        relations: Mapping[str, str] | None = None,
        files: Mapping[str, bytes | str] | None = None,
        links: Mapping[str, str] | None = None,
        scripts: Mapping[str, str] | None = None,
    ) -> Package:
        return Package(name, full, title, relations or {}, files or {}, links or {}, scripts or {})

    def only(what: str) -> dict[str, str]:
        return {"Provides": what, "Conflicts": what, "Replaces": what}

    for flavour, suffix in (("open", "-open"), ("closed", "")):
        yield package(
            f"nvidia-dkms-{branch}{suffix}",
            f"kernel module, {flavour}",
            {"Depends": f"nvidia-kernel-common-{branch} {same}", **only("nvidia-dkms-kernel")},
            {f"/usr/src/nvidia-{version}/README.twin": "stand-in\n"},
            scripts={
                "postinst": '#!/bin/sh\nset -e\n[ "$1" = configure ] || exit 0\n'
                f"/usr/local/bin/dkms-build {version} {flavour}\n",
                "prerm": '#!/bin/sh\n[ "$1" = remove ] && /usr/local/bin/dkms-build --remove\nexit 0\n',
            },
        )
        needed = ("nvidia-dkms", "nvidia-utils", "nvidia-compute-utils", "libnvidia-compute")
        names = [f"nvidia-dkms-{branch}{suffix}", *(f"{name}-{branch}" for name in needed[1:])]
        depends = ", ".join(f"{name} {same}" for name in names)
        for meta in (f"nvidia-driver-{branch}{suffix}", f"nvidia-headless-{branch}{suffix}"):
            yield package(meta, f"driver, {flavour}", {"Depends": depends})
    yield package(f"nvidia-open-{branch}", "driver, open", {"Depends": f"nvidia-driver-{branch}-open {same}"})
    yield package(f"cuda-drivers-{branch}", "driver, closed", {"Depends": f"nvidia-driver-{branch} {same}"})
    yield package(
        f"nvidia-kernel-common-{branch}",
        "module options",
        only("nvidia-kernel-common"),
        {f"/lib/modprobe.d/nvidia-{branch}.conf": "# stand-in\nblacklist nouveau\n"},
    )
    folder = f"/usr/lib/{triplet}"
    yield package(
        f"libnvidia-compute-{branch}",
        "driver library",
        only("libnvidia-compute"),
        {f"{folder}/libcuda.so.{version}": cuda, f"{folder}/libnvidia-ml.so.{version}": management},
        {
            f"{folder}/libcuda.so.1": f"libcuda.so.{version}",
            f"{folder}/libnvidia-ml.so.1": f"libnvidia-ml.so.{version}",
        },
        {
            "postinst": "#!/bin/sh\nldconfig\n",
            "postrm": "#!/bin/sh\nldconfig\n",
        },
    )
    yield package(
        f"nvidia-utils-{branch}",
        "nvidia-smi",
        {"Depends": f"libnvidia-compute-{branch} {same}", **only("nvidia-utils")},
        links={"/usr/bin/nvidia-smi": STANDIN},
    )
    yield package(
        f"nvidia-compute-utils-{branch}",
        "persistence daemon",
        only("nvidia-compute-utils"),
        {
            "/lib/systemd/system/nvidia-persistenced.service": unit(
                "Persistence daemon", "/usr/bin/nvidia-persistenced"
            )
        },
        {"/usr/bin/nvidia-persistenced": STANDIN},
        daemon("nvidia-persistenced"),
    )
    yield package(
        f"nvidia-fabricmanager-{branch}",
        "fabric manager",
        only("nvidia-fabricmanager"),
        {
            "/lib/systemd/system/nvidia-fabricmanager.service": unit(
                "Fabric manager", "/usr/bin/nv-fabricmanager", "After=nvidia-persistenced.service\n"
            ),
            "/usr/share/nvidia/nvswitch/stand-in.json": f'{{"stand_in": true, "version": "{version}"}}\n',
            "/usr/share/nvidia/nvswitch/fabricmanager.cfg": "# stand-in\nLOG_LEVEL=4\n",
        },
        {"/usr/bin/nv-fabricmanager": STANDIN},
        daemon("nvidia-fabricmanager"),
    )


def cuda_packages(branch: str, cuda: bytes, runtime: bytes, driver: str) -> Iterable[Package]:
    """Toolkit packages of one CUDA version."""
    version = CUDA[branch]
    dotted = branch.replace("-", ".")
    base = f"/usr/local/cuda-{dotted}"
    yield Package(f"cuda-nvcc-{branch}", version, "compiler", links={f"{base}/bin/nvcc": STANDIN})
    yield Package(
        f"cuda-cudart-{branch}",
        version,
        "runtime library",
        files={f"{base}/lib64/libcudart.so.{dotted}": runtime},
        links={f"{base}/lib64/libcudart.so.{dotted.partition('.')[0]}": f"libcudart.so.{dotted}"},
    )
    yield Package(
        f"cuda-driver-dev-{branch}", version, "link stubs", files={f"{base}/lib64/stubs/libcuda.so": cuda}
    )
    yield Package(
        f"cuda-toolkit-{branch}",
        version,
        "toolkit",
        {"Depends": f"cuda-nvcc-{branch}, cuda-cudart-{branch}, cuda-driver-dev-{branch}"},
    )
    yield Package(
        f"cuda-compat-{branch}",
        f"{driver}-0twin1",
        "forward compatibility",
        files={f"{base}/compat/libcuda.so.{driver}": cuda},
        links={f"{base}/compat/libcuda.so.1": f"libcuda.so.{driver}"},
    )


def unit(title: str, program: str, condition: str = "") -> str:
    """A unit file of a stand-in daemon."""
    return UNIT.format(title=title, program=program, condition=condition)


def daemon(name: str) -> dict[str, str]:
    """Maintainer scripts of a package with a daemon: enabled and started at its installation and restarted at an
    upgrade, as a package made with debhelper does."""
    start = f"systemctl daemon-reload\nsystemctl enable -q {name}\n"
    start += f'[ -n "$2" ] && action=restart || action=start\nsystemctl $action {name} || true\n'
    return {
        "postinst": f'#!/bin/sh\n[ -d /run/systemd/system ] && [ "$1" = configure ] || exit 0\n{start}exit 0\n',
        "prerm": '#!/bin/sh\n[ -d /run/systemd/system ] && [ "$1" = remove ] || exit 0\n'
        f"systemctl disable -q --now {name}\n",
        "postrm": "#!/bin/sh\n[ -d /run/systemd/system ] && systemctl daemon-reload\nexit 0\n",
    }


# --- writing ------------------------------------------------------------------------------------------------


def deb(package: Package, arch: str) -> bytes:
    """The bytes of a package; the same for the same input."""
    fields = {
        "Package": package.name,
        "Version": package.version,
        "Architecture": arch,
        "Maintainer": "bringup twins <twins@example.invalid>",
        "Section": "misc",
        "Priority": "optional",
        **package.relations,
        "Description": f"stand-in of a bringup twin: {package.title}",
    }
    control = "".join(f"{key}: {value}\n" for key, value in fields.items())
    members = {"./control": (control.encode(), 0o644)}
    members |= {f"./{name}": (text.encode(), 0o755) for name, text in package.scripts.items()}
    files = {
        path: content.encode() if isinstance(content, str) else content
        for path, content in package.files.items()
    }
    parts = (
        ("debian-binary", b"2.0\n"),
        ("control.tar.gz", _tar({path: (content, mode, "") for path, (content, mode) in members.items()})),
        (
            "data.tar.gz",
            _tar(
                {f".{path}": (content, 0o644, "") for path, content in files.items()}
                | {f".{path}": (b"", 0o777, target) for path, target in package.links.items()}
            ),
        ),
    )
    out = io.BytesIO()
    out.write(b"!<arch>\n")
    for name, content in parts:
        out.write(f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n".encode())
        out.write(content + (b"\n" if len(content) % 2 else b""))
    return out.getvalue()


def _tar(entries: Mapping[str, tuple[bytes, int, str]]) -> bytes:
    """A gzipped tar of files and links (with a target), folders first."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.GNU_FORMAT) as tar:
        folders: dict[str, None] = {}
        for path in entries:
            parts = path.split("/")[:-1]
            folders.update({"/".join(parts[: depth + 1]): None for depth in range(len(parts))})
        for name in sorted(folders):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
        for path, (content, mode, target) in sorted(entries.items()):
            info = tarfile.TarInfo(path)
            info.mode = mode
            if target:
                info.type, info.linkname = tarfile.SYMTYPE, target
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if not target else None)
    return gzip.compress(raw.getvalue(), mtime=0)


def library(cuda: int, arch: str, folder: Path, soname: str = "libcuda.so.1") -> bytes:
    """A stand-in library for an architecture: `cuda` as the driver counts (13000), `soname` its name for the
    linker. Raises HostFailed without a compiler for it."""
    compiler, package = COMPILERS[arch]
    if shutil.which(compiler) is None:
        raise HostFailed(
            Problem("twins", f"there is no compiler for {arch}", f"Install it: apt-get install {package}")
        )
    target = folder / f".{soname}-{arch}-{cuda}"
    flags = [
        "-shared",
        "-fPIC",
        "-O1",
        "-nostdlib",
        "-fno-stack-protector",
        f"-Wl,-soname,{soname}",
        "-Wl,--build-id=none",
    ]
    argv = [compiler, *flags, f"-DCUDA_VERSION={cuda}", "-o", str(target), str(HERE / "libstub.c")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=COMPILE_LIMIT_S, check=False)
    if done.returncode:
        raise HostFailed(Problem("twins", f"{compiler} failed: {done.stderr.strip()[-300:]}"))
    content = target.read_bytes()
    target.unlink()
    return content


def digest(arch: str) -> str:
    """12 hex digits that change when the archive would."""
    total = hashlib.sha256(arch.encode())
    for name in ("archive.py", "libstub.c"):
        total.update((HERE / name).read_bytes())
    return total.hexdigest()[:12]


def build(parent: Path, arch: str) -> Path:
    """The archive's folder under `parent`, made when it is not there; it holds packages and `Packages`."""
    folder = parent / f"archive-{arch}-{digest(arch)}"
    if (folder / "Packages").is_file():
        return folder
    beside = parent / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    index = []
    for package in _all(arch, beside):
        content = deb(package, arch)
        name = f"{package.name}_{package.version}_{arch}.deb"
        (beside / name).write_bytes(content)
        index.append(_stanza(package, arch, name, content))
    (beside / "Packages").write_text("\n".join(index), encoding="utf-8")
    (beside / "Release").write_text(release((beside / "Packages").read_bytes()), encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    beside.rename(folder)
    return folder


def release(packages: bytes) -> str:
    """The text of `Release`. Without the index's sum in it, apt drops the index at every second update."""
    sums = f"SHA256:\n {hashlib.sha256(packages).hexdigest()} {len(packages)} Packages\n"
    return f"Origin: bringup-twins\nLabel: stand-in\nSuite: twin\nDate: Thu, 01 Jan 2026 00:00:00 UTC\n{sums}"


def _all(arch: str, work: Path) -> Iterable[Package]:
    for (branch, versions), toolkit in zip(BRANCHES.items(), CUDA, strict=True):
        number = CUDA_NUMBER[branch]
        cuda = library(number, arch, work)
        management = library(number, arch, work, "libnvidia-ml.so.1")
        for version in versions:
            yield from driver_packages(version, cuda, management, TRIPLETS[arch])
        runtime = library(number, arch, work, f"libcudart.so.{toolkit.partition('-')[0]}")
        yield from cuda_packages(toolkit, cuda, runtime, versions[-1])


def _stanza(package: Package, arch: str, name: str, content: bytes) -> str:
    fields = {
        "Package": package.name,
        "Version": package.version,
        "Architecture": arch,
        "Maintainer": "bringup twins <twins@example.invalid>",
        **package.relations,
        "Filename": f"./{name}",
        "Size": str(len(content)),
        "SHA256": hashlib.sha256(content).hexdigest(),
        "Description": f"stand-in of a bringup twin: {package.title}",
    }
    return "".join(f"{key}: {value}\n" for key, value in fields.items())
