"""The image for AWX is described so that ansible-builder takes it, and holds the locked packages."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bringup import ROOT

FILE = ROOT / "execution-environment.yml"
LIMIT_S = 300


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ansible-builder itself makes of the file: the context that a container engine builds from."""
    folder = tmp_path_factory.mktemp("builder") / "context"
    builder = Path(sys.executable).with_name("ansible-builder")
    done = subprocess.run(
        [
            str(builder),
            "create",
            "--file",
            str(FILE),
            "--context",
            str(folder),
            "--output-filename",
            "Containerfile",
        ],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_image_is_made_of_the_locked_packages_with_their_hashes(context: Path) -> None:
    recipe = (context / "Containerfile").read_text()
    lock = context / "_build" / "project" / "requirements.lock"
    assert lock.read_bytes() == (ROOT / "requirements.lock").read_bytes()
    assert "COPY _build/project/requirements.lock /tmp/requirements.lock" in recipe
    assert "pip install --no-cache-dir --require-hashes -r /tmp/requirements.lock" in recipe
    assert "openssh-client" in recipe


def test_nothing_of_it_needs_a_package_manager_that_the_image_has_not(context: Path) -> None:
    """ansible-builder's own steps are written for dnf: with apt `clean all` and an install without lists would fail."""
    recipe = (context / "Containerfile").read_text()
    assert "clean all" not in recipe
    before, found, _ = recipe.partition("apt-get update")
    assert found
    assert "$PKGMGR install" not in before


def test_ansible_is_the_one_of_the_lock() -> None:
    wanted = yaml.safe_load(FILE.read_text())
    python = tuple(map(int, re.findall(r"python:(\d+)\.(\d+)", wanted["images"]["base_image"]["name"])[0]))
    lines = re.findall(
        r"^(ansible-core|ansible-runner)==(\S+)(?: ; python_full_version (<|>=) '(\d+)\.(\d+)')?",
        (ROOT / "requirements.lock").read_text(),
        re.MULTILINE,
    )
    locked = {
        name: f"{name}=={version}"
        for name, version, sign, *number in lines
        if not sign or (python < tuple(map(int, number))) == (sign == "<")
    }
    names = {key: wanted["dependencies"][key]["package_pip"] for key in ("ansible_core", "ansible_runner")}
    assert names == {"ansible_core": locked["ansible-core"], "ansible_runner": locked["ansible-runner"]}
