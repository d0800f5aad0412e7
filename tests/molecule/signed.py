"""Makes a signed copy of the package archive of a scenario's node, and keeps its key and a stranger's here.

python -m tests.molecule.signed NODE       writes .cache/molecule/vendor.asc and stranger.asc (public keys)
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from bringup import ROOT
from tests.molecule.twin import docker

KEYS = ROOT / ".cache" / "molecule"
ARCHIVE = "/opt/twin/archive"
ON_NODE = "/opt/twin/signed"
"""Apart from the archive, which a twin trusts without a signature."""

LIMIT_S = 120


def gpg(home: Path, *words: str, stdin: bytes = b"") -> bytes:
    """What gpg says; its keys are in `home`. Raises CalledProcessError."""
    argv = [
        "gpg",
        "--homedir",
        str(home),
        "--batch",
        "--quiet",
        "--pinentry-mode",
        "loopback",
        "--passphrase",
        "",
    ]
    return subprocess.run(
        [*argv, *words], input=stdin, capture_output=True, check=True, timeout=LIMIT_S
    ).stdout


def main(words: list[str]) -> None:
    """Make two keys, and sign with the one."""
    node = words[0]
    with tempfile.TemporaryDirectory() as text:
        home = Path(text)
        home.chmod(0o700)
        for name in ("vendor", "stranger"):
            gpg(home, "--quick-generate-key", f"{name} of a scenario", "ed25519", "sign", "never")
            (KEYS / f"{name}.asc").write_bytes(gpg(home, "--armor", "--export", f"{name} of a scenario"))
        docker("exec", node, "cp", "--archive", ARCHIVE, ON_NODE)
        release = docker("exec", node, "cat", f"{ON_NODE}/Release").encode()
        signed = home / "InRelease"
        signed.write_bytes(gpg(home, "--local-user", "vendor of a scenario", "--clearsign", stdin=release))
        signed.chmod(0o644)
        docker("cp", str(signed), f"{node}:{ON_NODE}/InRelease")
        subprocess.run(["gpgconf", "--homedir", str(home), "--kill", "all"], check=False, timeout=LIMIT_S)


if __name__ == "__main__":
    main(sys.argv[1:])
