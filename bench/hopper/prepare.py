"""Makes everything that travels to a GPU machine without a network: `.hop/part0`, `.hop/part1` ...

The node's root file system (the lab's image with a compiler, Python and uv), the controller's environment, and the
engine's wheels as its lock has them: each an archive, packed tightly, one after the other, cut into parts of a size that
one transfer takes. Needs root, a network, and a Python of the engine's version here. What is made already is kept.

The last commit lies beside them (`.hop/commit`), so that what others change meanwhile is not half of it there.
"""

# ruff: noqa: E501 (lists of paths)
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.hopper import prune
from bringup import ROOT, catalog, lab
from bringup.yamlfile import read_yaml

HOP = ROOT / ".hop"
STOCK = HOP / "stock"
CARRIED = Path(__file__).with_name("carried.yml")
LEVEL = "-12"
MANIFEST = "parts.json"
TRANSFER_MIB = 64
"""What one transfer takes: a part, and the checkout with it."""
SPARE_KIB = 640
GLIBC_NEWEST = 36
"""Wheels for glibc 2.5 up to this one run on the node (Debian 12)."""
COMMAND_LIMIT_S = 3600
UNWANTED = (
    "usr/share/doc usr/share/man usr/share/locale usr/share/info var/cache/apt var/lib/apt/lists usr/share/bash-completion "
    "usr/lib/python3.11/test usr/lib/python3.11/idlelib boot usr/bin/*lto-dump* usr/lib/gcc/*/*/lto1 "
    "usr/lib/x86_64-linux-gnu/lib?san.so* usr/lib/gcc/*/*/lib?san* usr/lib/x86_64-linux-gnu/libc.a "
    "usr/lib/x86_64-linux-gnu/libm-*.a usr/lib/x86_64-linux-gnu/perl"
).split()
LIBRARY_UNWANTED = (
    "test idlelib tkinter turtledemo site-packages lib2to3 config-3.12-x86_64-linux-gnu".split()
)
"""Of the interpreter that is carried."""
COLLECTIONS = ("ansible/posix",)
"""Of the 90 collections that come with Ansible, those that a role uses."""
CONTROLLER = "opt/controller"
CHECKOUT = "/checkout"
"""Where the controller has this project there (node.sh)."""


def say(text: str) -> None:
    """A line at once."""
    print(f"[hopper] {text}", file=sys.stderr, flush=True)


def command(*argv: str | Path, **kwargs: Any) -> None:
    """A command that must succeed."""
    subprocess.run([str(word) for word in argv], check=True, timeout=COMMAND_LIMIT_S, **kwargs)


def wanted() -> Mapping[str, Any]:
    """What travels (carried.yml)."""
    said: Mapping[str, Any] = read_yaml(CARRIED)
    return said


# --- wheels ------------------------------------------------------------------------------------------------


def locked(text: str) -> dict[str, list[str]]:
    """Package -> its requirement line and hashes, of a lock."""
    found: dict[str, list[str]] = {}
    for block in re.split(r"\n(?=\S)", text.replace("\\\n", " ")):
        if match := re.match(r"([A-Za-z0-9._-]+)==\S+", block):
            found[match[1].lower()] = block.split()
    return found


def wheels() -> Path:
    """The folder with every wheel that travels, verified against the lock by pip."""
    said, folder = wanted(), STOCK / "wheels"
    lock = (ROOT / catalog.lazy().engine(said["engine"]).install.locks["x86_64"]).read_text(encoding="utf-8")
    away = {*said["from_machine"], *said["left_out"]}
    rows = [row for name, row in locked(lock).items() if name not in away]
    tags = [f"manylinux_2_{minor}_x86_64" for minor in range(5, GLIBC_NEWEST + 1)]
    tags += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64", "linux_x86_64"]
    common = [
        "--only-binary=:all:",
        "--no-deps",
        "--dest",
        str(folder),
        "--quiet",
        "--python-version",
        said["python"],
    ]
    common += ["--implementation", "cp", *(word for tag in tags for word in ("--platform", tag))]
    common += [
        word for abi in (f"cp{said['python'].replace('.', '')}", "abi3", "none") for word in ("--abi", abi)
    ]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("\n".join(" ".join(row) for row in rows))
        listed.flush()
        command(sys.executable, "-m", "pip", "download", *common, "--require-hashes", "-r", listed.name)
    command(sys.executable, "-m", "pip", "download", *common, *said["tools"])
    return folder


def normal(wheel: Path) -> str:
    """The package of a wheel, as locks name it."""
    return re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower()


def stored(wheel: Path, into: Path, said: Mapping[str, Any]) -> None:
    """The same wheel without compression (the archive around all of them packs better), pruned where that is said."""
    with tempfile.TemporaryDirectory(dir=STOCK) as place:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(place)
            order = [item.filename for item in packed.infolist() if not item.is_dir()]
        if normal(wheel) == said["package"]:
            for path in sorted(Path(place).rglob("*.so")):
                inside = str(path.relative_to(place))
                with contextlib.suppress(ValueError):  # a library without GPU code
                    stays, went = prune.prune(path, said["arch"], said["keep"].get(inside, ()))
                    say(f"{inside}: {stays / 1e6:.0f} MB of GPU code stay, {went / 1e6:.0f} MB went")
            rewrite_record(Path(place))
        with zipfile.ZipFile(into / wheel.name, "w", zipfile.ZIP_STORED) as out:
            for item in order:
                out.write(Path(place) / item, item)


def rewrite_record(place: Path) -> None:
    """The wheel's own list of files with the hashes that they have now."""
    import base64

    (record,) = place.glob("*.dist-info/RECORD")
    lines = []
    for line in record.read_text(encoding="utf-8").splitlines():
        path, known, _ = line.rsplit(",", 2)
        if known and path.endswith(".so"):
            data = (place / path).read_bytes()
            code = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            line = f"{path},sha256={code},{len(data)}"
        lines.append(line)
    record.write_text("\n".join(lines) + "\n", encoding="utf-8")


def wheel_archive() -> Path:
    """All wheels but the tools', stored, in one archive."""
    said, folder, into = wanted(), STOCK / "wheels", STOCK / "stored"
    away = {*said["tools"], *said["from_machine"], *said["left_out"]}
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    for wheel in sorted(folder.glob("*.whl")):
        if normal(wheel) not in away:
            stored(wheel, into, said["pruned"])
    return into


# --- the node ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def entered(root: Path) -> Iterator[None]:
    """A root file system in which commands can run."""
    with contextlib.ExitStack() as undo:
        for kind in ("proc", "dev"):
            command("mount", "--bind", f"/{kind}", root / kind)
            undo.callback(command, "umount", root / kind)
        shutil.copy("/etc/resolv.conf", root / "etc/resolv.conf")
        yield


def node_root(python: str) -> Path:
    """The lab's node as a folder, with a compiler, the engine's Python and uv."""
    root = STOCK / "root"
    if (root / ".ready").is_file():
        return root
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    engine = lab.ensure_engine()
    image = lab.ensure_image(engine=engine)
    save = subprocess.Popen(engine.argv("save", image), stdout=subprocess.PIPE)
    assert save.stdout is not None
    with tarfile.open(fileobj=save.stdout, mode="r|") as layers:
        for member in layers:
            if member.name.endswith("layer.tar"):
                layers.extract(member, STOCK, filter="data")
                command("tar", "-xf", STOCK / member.name, "-C", root)
    save.wait(COMMAND_LIMIT_S)
    with entered(root):
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        command("chroot", root, "apt-get", "update", "-qq")
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *wanted()["packages"]]
        command("chroot", root, *install, env=quiet, stdout=subprocess.DEVNULL)
    # What the lab's node has of this machine's network: there is none where it goes.
    (root / "etc/pip.conf").unlink(missing_ok=True)
    add_python(root, python)
    (root / ".ready").touch()
    return root


def add_python(root: Path, python: str) -> None:
    """The engine's Python and uv."""
    asked = [python, "-c", "import sys; print(sys.base_prefix, '%d.%d' % sys.version_info[:2])"]
    prefix, version = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    if version != wanted()["python"]:
        raise SystemExit(
            f"{python} is Python {version}, the engine needs {wanted()['python']}: --python PATH"
        )
    # Where a Python that was built from source is: it finds its library from its own place.
    home = root / "usr/local"
    shutil.rmtree(home / f"lib/python{version}", ignore_errors=True)
    skip = shutil.ignore_patterns("__pycache__", "*.a", *LIBRARY_UNWANTED)
    for part in ("lib", "include"):
        shutil.copytree(f"{prefix}/{part}", home / part, symlinks=True, ignore=skip, dirs_exist_ok=True)
    shutil.copy(f"{prefix}/bin/python{version}", home / "bin")
    command("strip", "--strip-debug", *home.glob("lib/libpython3*.so.*"))
    command("chroot", root, "ldconfig")
    (tool,) = (STOCK / "wheels").glob("uv-*.whl")
    with zipfile.ZipFile(tool) as packed:
        inside = next(name for name in packed.namelist() if name.endswith("/scripts/uv"))
        (root / "usr/local/bin/uv").write_bytes(packed.read(inside))
    (root / "usr/local/bin/uv").chmod(0o755)


def controller(root: Path) -> Path:
    """What runs Ansible beside the node: an environment of the lock, in a folder that is laid over the node's root."""
    place = STOCK / "controller"
    if (place / ".ready").is_file():
        return place
    shutil.rmtree(place, ignore_errors=True)
    home = root / CONTROLLER
    shutil.rmtree(home, ignore_errors=True)
    shutil.copy(ROOT / "requirements.lock", root / "tmp/requirements.lock")
    with entered(root):
        command("chroot", root, "python3", "-m", "venv", f"/{CONTROLLER}")
        pip = [
            f"/{CONTROLLER}/bin/python",
            "-m",
            "pip",
            "install",
            "-q",
            "--no-cache-dir",
            "--require-hashes",
        ]
        command("chroot", root, *pip, "-r", "/tmp/requirements.lock")
    (library,) = home.glob("lib/python3*/site-packages")
    kept = STOCK / "kept"
    for name in COLLECTIONS:
        shutil.copytree(library / "ansible_collections" / name, kept / name)
    shutil.rmtree(library / "ansible_collections")
    shutil.move(kept, library / "ansible_collections")
    # The lab's own engine is of no use here.
    for name in ("pip", "setuptools", "scipy/*/tests", "numpy/*/tests", "ansible_test", "xllamacpp"):
        for path in library.glob(name):
            shutil.rmtree(path)
    (library / "bringup-checkout.pth").write_text(f"{CHECKOUT}\n")
    shutil.move(home, place / CONTROLLER)
    (place / ".ready").touch()
    return place


# --- packing -----------------------------------------------------------------------------------------------


def packed(name: str, folder: Path, leave: Sequence[str] = ()) -> Path:
    """A folder as one archive in .hop/stock."""
    out = STOCK / f"{name}.tar.zst"
    options = [f"--exclude=./{path}" for path in (*leave, ".ready")]
    tar = [
        "tar",
        "--sort=name",
        "--numeric-owner",
        *options,
        "--exclude=__pycache__",
        "-C",
        str(folder),
        "-c",
        ".",
    ]
    with out.with_suffix(".new").open("wb") as file:
        made = subprocess.Popen(tar, stdout=subprocess.PIPE)
        command("zstd", "-q", "-T0", LEVEL, stdin=made.stdout, stdout=file)
        if made.wait(COMMAND_LIMIT_S):
            raise SystemExit(f"tar of {folder} ended with {made.returncode}")
    out.with_suffix(".new").replace(out)
    say(f"{out.name}: {out.stat().st_size / 1e6:.1f} MB")
    return out


def unpacker(root: Path) -> Path:
    """zstd with its own libraries and loader, which the machine it goes to may lack, as .hop/stock/unpacker.tar."""
    files = ["usr/bin/zstd", "lib64/ld-linux-x86-64.so.2"]
    files += [
        f"lib/x86_64-linux-gnu/{name}"
        for name in ("libc.so.6", "libm.so.6", "libz.so.1", "liblzma.so.5", "liblz4.so.1")
    ]
    out = STOCK / "unpacker.tar"
    with tarfile.open(out, "w") as archive:
        for name in files:
            archive.add(resolved(root, name), Path(name).name)
    return out


def resolved(root: Path, name: str) -> Path:
    """A library behind its links, none of which leaves the root file system."""
    path = root / "usr" / name.removeprefix("usr/")
    while path.is_symlink():
        target = str(path.readlink())
        path = root / target.lstrip("/") if target.startswith("/") else path.parent / target
    return path


def cut(archives: Sequence[Path], beside: int) -> list[Path]:
    """The archives one after the other, in parts that fit into a transfer with `beside` bytes more; `.hop/parts.json`
    says where each archive ends."""
    for old in HOP.glob("part[0-9]*"):
        shutil.rmtree(old)
    size = TRANSFER_MIB * 1024**2 - SPARE_KIB * 1024 - beside
    number, room, out = 0, 0, None
    parts: list[Path] = []
    rows = []
    for archive in archives:
        rows.append({"name": archive.name, "bytes": archive.stat().st_size})
        with archive.open("rb") as file:
            while data := file.read(min(room or size, 1024**2)):
                if not room:
                    folder = HOP / f"part{number}"
                    folder.mkdir(parents=True)
                    out = (folder / "part").open("wb")
                    parts.append(folder)
                    number, room = number + 1, size
                assert out is not None
                out.write(data)
                room -= len(data)
                if not room:
                    out.close()
    if out is not None:
        out.close()
    (HOP / MANIFEST).write_text(json.dumps({"parts": len(parts), "archives": rows}, indent=1) + "\n")
    for folder in parts:
        shutil.copy(HOP / MANIFEST, folder)
    return parts


def commit() -> Path:
    """The last commit as `.hop/commit/checkout.tar`; its folder."""
    folder = HOP / "commit"
    folder.mkdir(parents=True, exist_ok=True)
    command("git", "-C", ROOT, "archive", "--output", folder / "checkout.tar", "HEAD")
    return folder


def run(python: str) -> int:
    """Makes everything; prints what to carry."""
    STOCK.mkdir(parents=True, exist_ok=True)
    wheels()
    root = node_root(python)
    controller(root)
    archives = [
        unpacker(root),
        packed("root", root, UNWANTED),
        packed("controller", STOCK / "controller"),
        packed("wheels", wheel_archive()),
    ]
    checkout = commit()
    for folder in [*cut(archives, folder_bytes(checkout)), checkout]:
        print(f"{folder.relative_to(ROOT)}  {folder_bytes(folder) / 1e6:.1f} MB")
    return 0


def folder_bytes(folder: Path) -> int:
    """Bytes of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())
