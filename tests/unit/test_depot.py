"""A depot speaks like a hub, gives away what was verified, and nothing else."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bringup import depots, hubs, models
from bringup.catalog import Catalog
from bringup.errors import HostFailed, UsageError
from bringup.node import depot, download, store
from bringup.planned import ModelFile
from tests.standin.hub import REPOSITORY, REVISION, Hub, serving
from tests.standin.models import rows_of

BIG = random.Random(3).randbytes(200_000)
FILES = {"config.json": b'{"a": 1}', "parts/big.bin": BIG, "empty.txt": b""}
OTHER = "f" * 40


def row(folder: Path) -> dict[str, Any]:
    for path, data in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return {
        "name": "demo",
        "folder": str(folder),
        "files": rows_of(FILES),
        "commit": REVISION,
        "repositories": [REPOSITORY],
    }


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str, int]]:
    about = row(tmp_path / "demo")
    store.finish(store.Model.of(about))
    with depot.Server(("127.0.0.1", 0), [depot.Shelf.of(about)]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        port = server.server_address[1]
        yield tmp_path / "demo", f"http://127.0.0.1:{port}", port
        server.shutdown()
        thread.join()


def ask(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("kind", ["huggingface", "modelscope", "http"])
def test_a_node_gets_a_model_from_it_as_from_a_hub(
    kind: str, served: tuple[Path, str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PROGRESS", tmp_path / "progress")
    _, address, _ = served
    locator = f"{address}/demo" if kind == "http" else f"{REPOSITORY}@{REVISION}"
    files = store.Model.of({**row(tmp_path / "again"), "folder": str(tmp_path / "new")}).files
    model = store.Model("demo", tmp_path / "new", files, (store.Source(kind, locator),))
    assert store.ensure(model, store.Access(huggingface=address, modelscope=address))["ready"]
    assert (tmp_path / "new/parts/big.bin").read_bytes() == BIG


@pytest.mark.parametrize("kind", ["huggingface", "modelscope"])
def test_a_lock_that_is_made_from_it_is_the_lock_that_it_serves(
    kind: str, served: tuple[Path, str, int]
) -> None:
    found = hubs.listing(hubs.Hub(kind, served[1]), REPOSITORY, "main")
    assert {file.path: file.sha256 for file in found.files} == {
        path: hashlib.sha256(data).hexdigest() for path, data in FILES.items()
    }
    assert kind == "modelscope" or found.commit == REVISION


@pytest.mark.parametrize(
    ("wanted", "status", "first"),
    [("bytes=150000-", 206, 150_000), ("bytes=10-19", 206, 10), ("bytes=300000-", 416, 0), ("", 200, 0)],
)
def test_a_part_of_a_file_can_be_had(
    wanted: str, status: int, first: int, served: tuple[Path, str, int]
) -> None:
    headers = {"Range": wanted} if wanted else {}
    path = f"/{REPOSITORY}/resolve/{REVISION}/parts/big.bin"
    code, told, data = ask(served[2], path, **headers)
    assert code == status
    if status != 416:
        last = 20 if wanted == "bytes=10-19" else len(BIG)
        assert data == BIG[first:last]
        assert told["ETag"] == f'"{hashlib.sha256(BIG).hexdigest()}"'
        assert ask(served[2], path, "HEAD", **headers)[1]["Content-Length"] == str(len(data))


@pytest.mark.parametrize(
    ("path", "why"),
    [
        (f"/{REPOSITORY}/resolve/{OTHER}/config.json", "RevisionNotFound"),
        (f"/api/models/{REPOSITORY}/revision/{OTHER}", "RevisionNotFound"),
        ("/other/model/resolve/main/config.json", "RepoNotFound"),
        (f"/{REPOSITORY}/resolve/main/../../etc/passwd", "EntryNotFound"),
        (f"/{REPOSITORY}/resolve/main/.bringup/ready.json", "EntryNotFound"),
        ("/demo/%2e%2e/%2e%2e/etc/passwd", "EntryNotFound"),
        ("/", "RepoNotFound"),
    ],
)
def test_what_it_has_not_it_says_and_nothing_outside_the_lock_is_given(
    path: str, why: str, served: tuple[Path, str, int]
) -> None:
    code, told, data = ask(served[2], path)
    assert (code, told["X-Error-Code"], data) == (404, why, b"")


def test_a_file_that_somebody_has_touched_is_not_given(served: tuple[Path, str, int]) -> None:
    (served[0] / "config.json").write_bytes(b'{"a": 2}')
    code, told, _ = ask(served[2], f"/{REPOSITORY}/resolve/main/config.json")
    assert (code, told["X-Error-Code"]) == (503, "NotVerified")


def test_two_models_can_be_parts_of_one_repository(tmp_path: Path) -> None:
    """As a base and a draft, or two sizes of one model, often are."""
    rows = []
    for name, path in (("one", "config.json"), ("two", "parts/big.bin")):
        about = row(tmp_path / name)
        files = [file for file in about["files"] if file["path"] == path]
        rows.append({**about, "name": name, "files": files})
        store.finish(store.Model.of(rows[-1]))
    with depot.Server(("127.0.0.1", 0), [depot.Shelf.of(about) for about in rows]) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        port = server.server_address[1]
        for path in ("config.json", "parts/big.bin"):
            for prefix in (f"{REPOSITORY}/resolve/{REVISION}", f"models/{REPOSITORY}/resolve/master"):
                code, _, body = ask(port, f"/{prefix}/{path}")
                assert (code, body) == (200, FILES[path])
        listed = json.loads(ask(port, f"/api/models/{REPOSITORY}/revision/main")[2])
        assert [file["rfilename"] for file in listed["siblings"]] == ["config.json", "parts/big.bin"]
        assert ask(port, "/one/parts/big.bin")[0] == 404
        assert (
            ask(port, f"/{REPOSITORY}/resolve/{OTHER}/config.json")[1]["X-Error-Code"] == "RevisionNotFound"
        )
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("allowed", "token", "headers", "status"),
    [
        ((), "", {}, 200),
        (("127.0.0.0/8",), "", {}, 200),
        (("10.0.0.0/8", "::1"), "", {}, 403),
        ((), "a b;c", {"Authorization": "Bearer a b;c"}, 200),
        ((), "secret", {"Cookie": "x=1; m_session_id=secret"}, 200),
        ((), "secret", {"Authorization": "Bearer secrex"}, 401),
        ((), "secret", {}, 401),
        (("10.0.0.0/8",), "secret", {"Authorization": "Bearer secret"}, 403),
    ],
)
def test_only_who_may_come_and_has_the_token_is_answered(
    allowed: tuple[str, ...], token: str, headers: dict[str, str], status: int, tmp_path: Path
) -> None:
    about = row(tmp_path / "demo")
    store.finish(store.Model.of(about))
    doors = depots.doors(allowed, token)
    with depot.Server(("127.0.0.1", 0), [depot.Shelf.of(about)], doors) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        for path in ("/demo/config.json", f"/api/models/{REPOSITORY}"):
            assert ask(server.server_address[1], path, **headers)[0] == status
        server.shutdown()
        thread.join()
    assert "secret" not in repr(doors)


def test_an_address_that_is_none_is_refused_before_anything_is_served() -> None:
    with pytest.raises(UsageError, match=r"--allow: .*10\.0\.0\.0/33"):
        depots.doors(["10.0.0.0/33"], "")


@pytest.mark.parametrize(("address", "port"), [("192.0.2.1", 0), ("127.0.0.1", 99999), ("no.invalid", 0)])
def test_where_it_cannot_listen_is_said(address: str, port: int) -> None:
    with pytest.raises(UsageError, match=f"cannot listen on {address}:{port}: "):
        depots.serve([], address, port)


def test_the_token_comes_from_a_credential_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    monkeypatch.delenv(depot.VARIABLE, raising=False)
    assert depot.token() == ""
    monkeypatch.setenv(depot.VARIABLE, "from the environment")
    assert depot.token() == "from the environment"
    (tmp_path / depot.CREDENTIAL).write_text("from a credential\n")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert depot.token() == "from a credential"


def test_how_far_a_model_is_can_be_read(tmp_path: Path) -> None:
    seen = tmp_path / "seen.json"
    assert depots.told("glm", seen) == "glm: looking at what is there"
    about = {"done": 12 * 2**30, "total": 700 * 2**30, "bytes_s": 250 * 2**20, "left_s": 2818}
    seen.write_text(json.dumps(about))
    assert depots.told("glm", seen) == "glm: 12.0 of 700.0 GiB, 250 MiB/s, 46 m 58 s left"


def known(folder: Path) -> Catalog:
    (folder / "models").mkdir(parents=True)
    entry = {
        "title": "Demo",
        "family": "demo",
        "licence": "Apache-2.0",
        "hub": {"huggingface": REPOSITORY},
        "lock": "demo.lock.yml",
        "format": "safetensors",
        "quantisation": "bf16",
        "weights": {"total_gib": 1},
        "shape": {"layers": 1, "hidden": 8, "vocab": 8, "heads": 1},
        "context": 8,
    }
    (folder / "models" / "demo.yml").write_text(yaml.safe_dump(entry))
    files = [ModelFile(p, len(d), hashlib.sha256(d).hexdigest()) for p, d in FILES.items()]
    (folder.parent / "demo.lock.yml").write_text(models.lock_text(REVISION, files, "demo"))
    return Catalog(folder)


def test_it_is_filled_from_a_hub_and_a_second_time_asks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PROGRESS", tmp_path / "progress")
    catalog = known(tmp_path / "catalog")
    hub = Hub(dict(FILES))
    with serving(hub) as address:
        access = store.Access(huggingface=address, limits=download.Limits(back_off_s=0.01))
        assert [one["ready"] for one in depots.wanted(tmp_path / "depot", ["demo"], catalog, tmp_path)] == [
            False
        ]
        assert [
            one["ready"] for one in depots.fill(tmp_path / "depot", ["demo"], access, catalog, tmp_path)
        ] == [True]
        asked = len(hub.asked)
        depots.fill(tmp_path / "depot", ["demo"], access, catalog, tmp_path)
        assert len(hub.asked) == asked
    assert (tmp_path / "depot/demo/parts/big.bin").read_bytes() == BIG


def test_what_cannot_be_had_or_served_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PROGRESS", tmp_path / "progress")
    catalog = known(tmp_path / "catalog")
    hub = Hub({})
    with serving(hub) as address, pytest.raises(HostFailed, match="is not there"):
        depots.fill(tmp_path / "depot", ["demo"], store.Access(huggingface=address), catalog, tmp_path)
    with pytest.raises(UsageError, match="no model is ready"):
        depots.ready(depots.shelves(tmp_path / "depot", catalog, tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UsageError, match="cannot listen on 127"):
            depots.serve([], "127.0.0.1", taken.getsockname()[1])
