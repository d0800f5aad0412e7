"""Locks are made from what hubs say, and compared; what is on a node is seen, and only garbage goes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bringup import hubs, models
from bringup.catalog import Catalog
from bringup.errors import HostFailed, UsageError
from bringup.node import graft, shelf, store
from bringup.planned import ModelFile
from tests.standin.hub import OTHER_REVISION, REPOSITORY, REVISION, Hub, serving

BIG = random.Random(2).randbytes(5000)
FILES = {"config.json": b"{}", "model.safetensors": BIG, "README.md": b"read me", "figures/a.png": b"png"}
LOADED = ["config.json", "model.safetensors"]


@pytest.fixture
def hub() -> Iterator[tuple[Hub, str]]:
    made = Hub(dict(FILES))
    with serving(made) as address:
        yield made, address


def catalog(folder: Path, **hub: Any) -> Catalog:
    (folder / "models").mkdir(parents=True)
    entry = {
        "title": "Demo",
        "family": "demo",
        "licence": "Apache-2.0",
        "hub": hub,
        "format": "safetensors",
        "quantisation": "bf16",
        "weights": {"total_gib": 1},
        "shape": {"layers": 1, "hidden": 8, "vocab": 8, "heads": 1},
        "context": 8,
    }
    (folder / "models" / "demo.yml").write_text(yaml.safe_dump(entry))
    return Catalog(folder)


@pytest.mark.parametrize("kind", ["huggingface", "modelscope"])
def test_a_listing_has_every_file_that_engines_load_with_its_sha256(kind: str, hub: tuple[Hub, str]) -> None:
    found = hubs.listing(hubs.Hub(kind, hub[1]), REPOSITORY, "main")
    assert found.commit == (REVISION if kind == "huggingface" else OTHER_REVISION)
    assert [(file.path, file.size, file.sha256) for file in found.files] == [
        (path, len(FILES[path]), hashlib.sha256(FILES[path]).hexdigest()) for path in LOADED
    ]


def test_only_what_was_asked_for_is_listed(hub: tuple[Hub, str]) -> None:
    found = hubs.listing(hubs.Hub("huggingface", hub[1]), REPOSITORY, "main", ["*.safetensors"])
    assert [file.path for file in found.files] == ["model.safetensors"]
    with pytest.raises(UsageError, match=r"no file matches \*\.gguf"):
        hubs.listing(hubs.Hub("huggingface", hub[1]), REPOSITORY, "main", ["*.gguf"])


def test_a_lock_is_written_once_and_read_back(tmp_path: Path, hub: tuple[Hub, str]) -> None:
    known = catalog(tmp_path / "catalog", huggingface=REPOSITORY)
    access = {"huggingface": hubs.Hub("huggingface", hub[1])}
    first = models.lock("demo", access, catalog=known, root=tmp_path)
    second = models.lock("demo", access, catalog=known, root=tmp_path)
    revision, files = models.read_lock(tmp_path / first.path)
    assert (first.changed, second.changed, first.files) == (True, False, 2)
    assert (revision, [file.path for file in files]) == (REVISION, LOADED)
    assert first.notes == ("add to catalog/models/demo.yml: lock: catalog/models/locks/demo.yml",)


def test_hubs_that_have_the_same_files_confirm_each_other(tmp_path: Path, hub: tuple[Hub, str]) -> None:
    known = catalog(tmp_path / "catalog", huggingface=REPOSITORY, modelscope=REPOSITORY)
    access = {kind: hubs.Hub(kind, hub[1]) for kind in ("huggingface", "modelscope")}
    assert (
        "the same on huggingface and modelscope"
        in models.lock("demo", access, catalog=known, root=tmp_path).notes
    )


def test_hubs_that_differ_are_an_error_that_names_the_file_and_no_lock_is_written(tmp_path: Path) -> None:
    known = catalog(tmp_path / "catalog", huggingface=REPOSITORY, modelscope=REPOSITORY)
    with serving(Hub(dict(FILES))) as one, serving(Hub({**FILES, "model.safetensors": BIG[::-1]})) as other:
        access = {"huggingface": hubs.Hub("huggingface", one), "modelscope": hubs.Hub("modelscope", other)}
        with pytest.raises(UsageError, match=r"model\.safetensors: huggingface has 5000 bytes"):
            models.lock("demo", access, catalog=known, root=tmp_path)
    assert not (tmp_path / models.LOCKS).exists()


def test_a_check_compares_and_writes_nothing(tmp_path: Path, hub: tuple[Hub, str]) -> None:
    access = {"huggingface": hubs.Hub("huggingface", hub[1])}
    known = catalog(tmp_path, huggingface=REPOSITORY)
    assert models.lock("demo", access, catalog=known, root=tmp_path, check=True).changed
    assert not list(tmp_path.rglob("locks"))
    with pytest.raises(UsageError, match="no hub left to ask: huggingface left out"):
        models.lock("demo", {}, catalog=known, root=tmp_path)


def test_a_model_that_is_made_here_has_no_hub_to_be_locked_from() -> None:
    with pytest.raises(UsageError, match=r"is made here by catalog/models/make/words\.py"):
        models.lock("words", {})


@pytest.mark.parametrize(
    ("token", "path", "words"),
    [("wr0ng", REPOSITORY, "not authorised"), ("right", "stand/in", "")],
)
def test_a_hub_that_refuses_is_named_with_the_cause_and_without_the_token(
    token: str, path: str, words: str
) -> None:
    with serving(Hub(dict(FILES), token="right")) as address:
        if words:
            with pytest.raises(HostFailed, match=words) as caught:
                hubs.listing(hubs.Hub("huggingface", address, token), path, "main")
            assert token not in str(caught.value)
        else:
            assert hubs.listing(hubs.Hub("huggingface", address, token), path, "main").files


@pytest.mark.parametrize("kind", ["huggingface", "modelscope"])
@pytest.mark.parametrize("answer", [b"{}", b"[]", b'{"sha": "x", "siblings": [{"rfilename": "w"}]}', b"null"])
def test_a_mirror_that_lists_nothing_as_the_hub_does_is_said(
    kind: str, answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubs, "_read", lambda hub, where: answer)
    with pytest.raises(HostFailed, match=f"does not list the files of {REPOSITORY} as {kind} does"):
        hubs.listing(hubs.Hub(kind, "http://mirror.example"), REPOSITORY, "main")


def test_a_hub_that_answers_with_another_commit_than_was_asked_for_is_refused(hub: tuple[Hub, str]) -> None:
    with pytest.raises(
        HostFailed, match=f"was asked for commit {OTHER_REVISION} and answers with {REVISION}"
    ):
        hubs.listing(hubs.Hub("huggingface", hub[1]), REPOSITORY, OTHER_REVISION)


def test_a_hub_that_is_not_there_is_said() -> None:
    with pytest.raises(HostFailed, match="cannot be reached"):
        hubs.listing(hubs.Hub("huggingface", "http://127.0.0.1:9"), REPOSITORY, "main")


@pytest.mark.parametrize(
    "path", ["a b.bin", "1.json", "x: y", "ü.bin", "sub/dir/f-1_2.safetensors", "#x", "null", "0x10"]
)
def test_a_lock_keeps_odd_file_names(path: str, tmp_path: Path) -> None:
    text = models.lock_text("main", [ModelFile(path, 1, "0" * 64)], "here")
    (tmp_path / "lock.yml").write_text(text)
    assert models.read_lock(tmp_path / "lock.yml")[1][0].path == path


# --- on a node ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"path": "../w"}, "no relative path"),
        ({"path": ".bringup/ready.json"}, "no relative path"),
        ({"size": -1}, "greater than or equal to 0"),
        ({"sha256": "AB" * 32}, "sha256"),
        ({"sha256": ""}, "sha256"),
        ({"path": "there"}, "twice"),
        ({"path": "there/below"}, "as file and as folder"),
    ],
)
def test_a_lock_that_nobody_can_fulfil_is_refused_when_it_is_read(
    row: dict[str, Any], words: str, tmp_path: Path
) -> None:
    right = {"path": "there", "size": 1, "sha256": "0" * 64}
    path = tmp_path / "lock.yml"
    path.write_text(json.dumps({"revision": "r", "files": [right, {**right, "path": "w", **row}]}))
    with pytest.raises(UsageError, match=words):
        models.read_lock(path)


def test_a_token_that_cannot_be_sent_to_a_hub_is_never_said(hub: tuple[Hub, str]) -> None:
    with pytest.raises(UsageError, match="what is in HF_TOKEN has one") as failure:
        hubs.listing(hubs.Hub("huggingface", hub[1], "sec\nret"), REPOSITORY, "main")
    assert "sec\nret" not in str(failure.value)
    assert "sec\\nret" not in str(failure.value)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three models: planned, forgotten, and a folder that is none of ours."""
    for name in ("planned", "forgotten", "strange"):
        (tmp_path / "models" / name).mkdir(parents=True)
        (tmp_path / "models" / name / "w").write_bytes(b"abcd")
        if name != "strange":
            (tmp_path / "models" / name / store.OURS).mkdir()
    return tmp_path / "models"


def rows(root: Path, units: Path | None = None) -> list[dict[str, Any]]:
    return shelf.shelf(root, [str(root / "planned")], Path("/proc"), units or root / "none")


def test_only_what_nobody_plans_has_open_or_names_may_go(root: Path) -> None:
    assert [row["model"] for row in rows(root) if shelf.may_go(row)] == ["forgotten"]


def test_a_model_that_a_stopped_service_names_stays(root: Path, tmp_path: Path) -> None:
    units = tmp_path / "units"
    units.mkdir()
    (units / "old.service").write_text(f"[Service]\nExecStart=/bin/serve --model {root}/forgotten/w\n")
    found = {row["model"]: row for row in rows(root, units)}
    assert found["forgotten"]["units"] == ["old"]
    assert not any(shelf.may_go(row) for row in found.values())


def test_garbage_is_shown_first_and_removed_only_when_told(root: Path) -> None:
    found = rows(root)
    assert [row["model"] for row in shelf.collect(found, remove=False)] == ["forgotten"]
    assert (root / "forgotten").exists()
    shelf.collect(found, remove=True)
    assert sorted(path.name for path in root.iterdir()) == ["planned", "strange"]


def test_a_file_with_two_names_takes_its_room_once_in_a_folder(root: Path) -> None:
    once = {row["model"]: row for row in rows(root)}
    os.link(root / "forgotten" / "w", root / "forgotten" / "again")
    twice = {row["model"]: row for row in rows(root)}
    assert twice["forgotten"]["bytes"] == twice["forgotten"]["frees"] == once["forgotten"]["bytes"] > 0


def test_what_a_graft_shares_with_its_base_is_counted_once_and_frees_nothing(root: Path) -> None:
    overlay = root / "a-graft"
    (overlay / store.OURS).mkdir(parents=True)
    (overlay / graft.RECORD).write_text("{}")
    own = (overlay / graft.RECORD).stat().st_blocks * 512
    os.link(root / "planned" / "w", overlay / "w")
    found = {row["model"]: row for row in rows(root)}
    size = (root / "planned" / "w").stat().st_blocks * 512
    assert [found["planned"][name] for name in ("bytes", "shared", "frees")] == [size, 0, 0]
    assert [found["a-graft"][name] for name in ("bytes", "shared", "frees")] == [own, size, own]


HOLDERS = {
    "open": "f = open(sys.argv[1])",
    "mapped": "import mmap; f = open(sys.argv[1], 'rb'); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); f.close()",
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("called", ["itself", "a link to the root", "a second name elsewhere"])
def test_a_model_in_use_stays_whatever_its_user_calls_it(
    called: str, holder: str, root: Path, tmp_path: Path
) -> None:
    file = root / "forgotten" / "w"
    looked_at = root
    if called == "a link to the root":
        looked_at = tmp_path / "link"
        looked_at.symlink_to(root)
    if called == "a second name elsewhere":
        os.link(file, tmp_path / "w")
        file = tmp_path / "w"
    code = f"import sys, time; {HOLDERS[holder]}; print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = {row["model"]: row for row in rows(looked_at)}
        process.kill()
    assert found["forgotten"]["pids"] == [process.pid]
    assert not shelf.may_go(found["forgotten"])


def damaged(path: Path) -> None:
    path.write_bytes(b"abcx")


@pytest.mark.parametrize(
    ("change", "ready", "words"),
    [
        (lambda folder: None, True, ""),
        (lambda folder: damaged(folder / "w"), False, "sha256 differs"),
        (lambda folder: (folder / "w").unlink(), False, "is missing"),
        (lambda folder: (folder / "x.incomplete").touch(), False, "broken off: x.incomplete"),
    ],
    ids=["whole", "damaged", "gone", "leftover"],
)
def test_the_program_that_goes_to_a_node_says_what_is_wrong(
    change: Callable[[Path], None], ready: bool, words: str, tmp_path: Path
) -> None:
    folder = tmp_path / "demo"
    file = {"path": "w", "size": 4, "sha256": hashlib.sha256(b"abcd").hexdigest()}
    given = {"name": "demo", "folder": str(folder), "files": [file]}
    folder.mkdir()
    (folder / "w").write_bytes(b"abcd")
    store.finish(store.Model.of(given))
    change(folder)
    program = models.program({"what": "verify", "models": [given], "deep": True, "say_every_s": 0})
    done = subprocess.run(
        [sys.executable, "-I", "-"], input=program, capture_output=True, text=True, timeout=240, check=True
    )
    *how_far, answer = map(json.loads, done.stdout.splitlines())
    row = answer["rows"][0]
    assert row["ready"] is ready
    assert words in json.dumps(row)
    assert how_far == ([{"read": 4, "of": 4}] if (folder / "w").exists() else [])


def test_how_far_hosts_are_is_heard_while_they_read_the_slowest_first() -> None:
    seen: models.Seen = {"b": (2**30, 2**31), "c": (2**31, 2**31), "d": (2**31, 2**31), "e": (0, 0)}
    hearing = models.Hearing("a", seen)
    hearing('{"read": 0, "of": 10}\n{"read": 5368')
    hearing('70912, "of": 1073741824}\n{"rows": []}\n')
    assert json.loads(hearing.last) == {"rows": []}
    assert seen["a"] == (536870912, 1073741824)
    said = "e 0.0 of 0.0 GiB, a 0.5 of 1.0 GiB, b 1.0 of 2.0 GiB, c 2.0 of 2.0 GiB and 1 more"
    assert models.told(seen) == said
    assert models.told({}) == ""
