"""Explicit locks: what they may say, packages that are verified before anything installs them, and mirrors."""

from __future__ import annotations

from pathlib import Path

import pytest

from bringup.node import conda, environment
from bringup.node.conda import CondaFailed, Package, parse
from tests.standin import channel

MD5 = "0" * 32
SHA256 = "1" * 64
LINE = f"https://channel.example/demo/linux-64/engine-1.0-0.tar.bz2#{MD5}"


def quiet(text: str) -> None:
    """No log."""


def test_a_lock_names_packages_with_their_hashes() -> None:
    text = (
        f"# made by hand\n@EXPLICIT\n{LINE}\n\nhttps://channel.example/x/noarch/a-1-0.conda#sha256:{SHA256}\n"
    )
    found = parse(text, "x86_64")
    assert [(one.file_name, one.subdir, one.algorithm) for one in found] == [
        ("engine-1.0-0.tar.bz2", "linux-64", "md5"),
        ("a-1-0.conda", "noarch", "sha256"),
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{LINE}\n", "no line @EXPLICIT"),
        ("@EXPLICIT\n", "names no package"),
        ("@EXPLICIT\nhttps://channel.example/linux-64/engine-1.0-0.tar.bz2\n", "line 2 is no address"),
        (f"@EXPLICIT\n{LINE}0\n", "line 2 is no address"),
        (f"@EXPLICIT\nhttps://channel.example/linux-64/engine.whl#{MD5}\n", "line 2 is no address"),
        (f"@EXPLICIT\n{LINE.replace('linux-64', 'osx-arm64')}\n", "is for osx-arm64, this node is linux-64"),
        ("name: engine\ndependencies: [python]\n", "no line @EXPLICIT"),
    ],
)
def test_a_lock_that_would_not_make_the_same_environment_twice_is_refused(text: str, why: str) -> None:
    with pytest.raises(CondaFailed, match=why):
        parse(text, "x86_64")


def test_every_wrong_line_is_named() -> None:
    with pytest.raises(CondaFailed, match=r"line 2.*line 3"):
        parse("@EXPLICIT\none\ntwo\n", "x86_64")


def test_a_lock_of_another_architecture_is_refused_before_anything_is_fetched(tmp_path: Path) -> None:
    text = channel.make(tmp_path, "1.0", tmp_path.as_uri())
    assert len(parse(text, "x86_64")) == 3
    with pytest.raises(
        CondaFailed, match=r"python-3.12.99-0.tar.bz2 is for linux-64, this node is linux-aarch64"
    ):
        parse(text, "aarch64")


@pytest.mark.parametrize(
    ("mirrors", "address"),
    [
        ("", "https://channel.example/a/b.conda"),
        ("https://other/=https://mirror/", "https://channel.example/a/b.conda"),
        ("https://x/=y https://channel.example/=file:///srv/mirror/", "file:///srv/mirror/a/b.conda"),
    ],
)
def test_a_mirror_takes_the_place_of_the_beginning_of_an_address(mirrors: str, address: str) -> None:
    assert conda.mirrored("https://channel.example/a/b.conda", mirrors) == address


def test_packages_are_fetched_from_a_mirror_and_verified(tmp_path: Path) -> None:
    text = channel.make(tmp_path / "channel", "1.0", "https://channel.example/demo")
    mirrors = f"https://channel.example/demo={(tmp_path / 'channel').as_uri()}"
    listed = parse(text, "x86_64")
    files = conda.fetch(listed, tmp_path / "cache", mirrors, quiet)
    assert [path.name for path in files] == [package.file_name for package in listed]
    assert [conda.digest_of(path, "md5") for path in files] == [package.digest for package in listed]
    said: list[str] = []
    assert conda.fetch(listed, tmp_path / "cache", mirrors, said.append) == files
    assert said == []


def test_a_package_of_another_content_is_not_installed(tmp_path: Path) -> None:
    text = channel.make(tmp_path / "channel", "1.0", (tmp_path / "channel").as_uri())
    damaged = tmp_path / "channel/noarch/engine-1.0-0.tar.bz2"
    damaged.write_bytes(damaged.read_bytes() + b"x")
    with pytest.raises(CondaFailed, match=r"engine-1\.0-0\.tar\.bz2 .* the lock says .* is not installed"):
        conda.fetch(parse(text, "x86_64"), tmp_path / "cache", "", quiet)
    assert [path.name for path in (tmp_path / "cache").rglob("*engine*")] == []


def test_a_package_that_is_nowhere_is_named_with_its_address(tmp_path: Path) -> None:
    missing = Package((tmp_path / "noarch/none-1-0.conda").as_uri(), "md5", MD5)
    with pytest.raises(CondaFailed, match=r"none-1-0\.conda cannot be fetched from file:"):
        conda.fetch([missing], tmp_path / "cache", "", quiet)


def test_installers_get_the_files_that_were_verified() -> None:
    first = Package("https://c/linux-64/a-1-0.conda", "md5", MD5)
    second = Package("https://c/noarch/b-1-0.conda", "sha256", SHA256)
    text = conda.explicit_text([first, second], [Path("/cache/a-1-0.conda"), Path("/cache/b-1-0.conda")])
    assert text.splitlines() == ["@EXPLICIT", f"file:///cache/a-1-0.conda#{MD5}", "file:///cache/b-1-0.conda"]


@pytest.mark.parametrize("provider", conda.INSTALLERS)
def test_an_environment_is_filled_by_the_installer_of_the_site(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installer is a stand-in that keeps its arguments and copies what the lock names."""
    program = tmp_path / "bin" / provider
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\nset -e\n"
        "prefix=; file=; for word; do case $last in --prefix) prefix=$word;; --file) file=$word;; esac;"
        " last=$word; done\n"
        'test -f "$prefix/conda-meta/history"\n'
        'for package in $(sed -n "s,^file://\\([^#]*\\)#.*,\\1,p" "$file"); do\n'
        '  tar -C "$prefix" -xjf "$package"\n'
        '  touch "$prefix/conda-meta/$(basename "$package" .tar.bz2).json"\n'
        "done\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    wanted = environment.Wanted(
        name="demo",
        provider=provider,
        prefix=str(tmp_path / "env" / "demo-1"),
        lock=channel.make(tmp_path / "channel", "1.0", (tmp_path / "channel").as_uri()),
        digest="one",
        checks=[["engine"]],
        cache=str(tmp_path / "cache"),
        log=str(tmp_path / "log"),
    )
    assert environment.ensure(wanted)["built"]
    assert environment.manifest(Path(wanted.prefix))["packages"] == {
        "conda:engine": "1.0-0",
        "conda:libstdcxx": "16.2.0-0",
        "conda:python": "3.12.99-0",
    }
    assert not environment.ensure(wanted)["changed"]


def test_without_the_installer_a_way_without_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CondaFailed, match=r"no micromamba on the node.*provider rattler"):
        conda.installer("micromamba")
