"""A model's folder ends ready with the right bytes, or not ready with a cause in one line."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bringup import ROOT, stores
from bringup.errors import HostFailed
from bringup.node import contents, download, store, web
from tests.standin.hub import REPOSITORY, REVISION, Hub, serving
from tests.standin.models import IMPATIENT, lock_of

BIG = random.Random(1).randbytes(300_000)
FILES = {"config.json": b'{"architectures": ["Demo"]}', "parts/big.bin": BIG, "empty.txt": b""}


def model_in(folder: Path, address: str, files: dict[str, bytes] | None = None) -> store.Model:
    source = store.Source("huggingface", f"{REPOSITORY}@{REVISION}")
    return store.Model("demo", folder / "demo", lock_of(FILES if files is None else files), (source,))


def access(address: str, token: str = "") -> store.Access:
    return store.Access(huggingface=address, huggingface_token=token, limits=IMPATIENT)


@pytest.fixture(autouse=True)
def _progress_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PROGRESS", tmp_path / "progress")


def contents_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and store.OURS not in path.parts
    }


def test_a_model_becomes_ready_and_a_second_look_finds_nothing_to_do(tmp_path: Path) -> None:
    hub = Hub(dict(FILES))
    with serving(hub) as address:
        model = model_in(tmp_path, address)
        first = store.ensure(model, access(address))
        asked = len(hub.asked)
        second = store.ensure(model, access(address))
    assert (first["changed"], first["ready"], sorted(first["fetched"])) == (True, True, sorted(FILES))
    assert (second["changed"], second["ready"], len(hub.asked)) == (False, True, asked)
    assert contents_of(model.folder) == FILES
    assert store.look(model, deep=True)["ready"]


RECOVERS = [
    "429",
    "500",
    "503",
    "stall",
    "cut",
    "truncated",
    "wrong_bytes",
    "new_revision",
    "slow",
    "no_range",
    "cut no_range",
    "stall cut 503",
]


@pytest.mark.parametrize("faults", RECOVERS)
def test_a_hub_that_misbehaves_for_a_while_is_survived(faults: str, tmp_path: Path) -> None:
    hub = Hub(dict(FILES), {"parts/big.bin": faults.split()})
    with serving(hub) as address:
        model = model_in(tmp_path, address)
        answer = store.ensure(model, access(address))
    assert answer["ready"]
    assert contents_of(model.folder) == FILES


FAILS = {
    "401": "not authorised",
    "403": "licence",
    "404": "not there",
    "truncated": "of 300000 bytes",
    "429": "answered 429",
    "500": "answered 500",
    "503": "answered 503",
    "new_revision": "sha256 differs",
    "cut": "connection ended",
    "stall": "no byte for",
    "wrong_bytes": "sha256 differs",
    "slow": "bytes a second",
}


@pytest.mark.parametrize("fault", FAILS)
def test_a_hub_that_goes_on_misbehaving_ends_with_the_cause_and_nothing_ready(
    fault: str, tmp_path: Path
) -> None:
    lock = {"config.json": FILES["config.json"], "parts/big.bin": BIG}
    hub = Hub(dict(lock), {"parts/big.bin": fault.split() * 50})
    with serving(hub) as address:
        model = model_in(tmp_path, address, lock)
        with pytest.raises(store.StoreFailed) as caught:
            store.ensure(model, access(address))
    assert FAILS[fault] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (model.folder / store.READY).exists()
    assert not (model.folder / "parts/big.bin").exists()
    assert contents_of(model.folder)["config.json"] == FILES["config.json"]


@pytest.mark.parametrize("fault", ["401", "403", "404"])
def test_a_hub_that_refuses_is_left_for_the_next_source_at_once(fault: str, tmp_path: Path) -> None:
    hub, other = Hub(dict(FILES), {"parts/big.bin": [fault] * 9}), Hub(dict(FILES))
    with serving(hub) as first, serving(other) as second:
        sources = (
            store.Source("huggingface", f"{REPOSITORY}@{REVISION}"),
            store.Source("http", f"{second}/{REPOSITORY}/resolve/main"),
        )
        model = store.Model("demo", tmp_path / "demo", lock_of(FILES), sources)
        answer = store.ensure(model, access(first))
    assert answer["ready"]
    assert answer["came"]["parts/big.bin"].startswith("http (after")
    assert [code for _, path, _, code in hub.asked if path.endswith("big.bin")] == [int(fault)]
    assert contents_of(model.folder) == FILES


def test_a_stamp_that_was_half_written_when_its_writer_was_killed_goes_and_a_living_writers_stays(
    tmp_path: Path,
) -> None:
    with serving(Hub(dict(FILES))) as address:
        model = model_in(tmp_path, address)
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait(120)
        beside = [model.folder / f".bringup/.ready.json.{pid}.tmp" for pid in (gone.pid, os.getppid())]
        beside[0].parent.mkdir(parents=True)
        for path in beside:
            path.write_text("{")
        store.ensure(model, access(address))
    assert [path.exists() for path in beside] == [False, True]


def test_no_lock_file_stays_beside_the_folder(tmp_path: Path) -> None:
    with serving(Hub(dict(FILES))) as address:
        store.ensure(model_in(tmp_path, address), access(address))
        bad = store.Source("path", str(tmp_path / "nowhere"))
        with pytest.raises(store.StoreFailed, match="No such file"):
            store.ensure(store.Model("bad", tmp_path / "bad", lock_of(FILES), (bad,)), access(address))
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".lock")] == []


def test_with_a_cap_on_the_rate_the_client_that_knows_none_is_not_used(tmp_path: Path) -> None:
    hub = Hub(dict(FILES))
    with serving(hub) as address:
        model = model_in(tmp_path, address)
        capped = store.Access(
            huggingface=address,
            client="/nowhere/python",
            limits=dataclasses.replace(IMPATIENT, bytes_s=600_000),
        )
        began = time.monotonic()
        answer = store.ensure(model, capped)
        took = time.monotonic() - began
    assert set(answer["came"].values()) == {"huggingface"}
    assert took >= len(BIG) / 600_000 * 0.8


@pytest.mark.parametrize(
    ("grown", "words"), [(0, "no byte for"), (1000, "fewer than 1000 bytes a second"), (20_000, "")]
)
def test_a_client_that_stalls_or_drips_is_told_from_one_that_works(grown: int, words: str) -> None:
    said = store._too_slow(grown, 10, download.Limits(slowest_bytes_s=1000))
    assert said.startswith(words)
    assert bool(said) == bool(words)


def test_a_client_that_only_drips_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CLIENT_STALL_S", 0.5)
    monkeypatch.setattr(store, "CLIENT_LOOK_S", 0.05)
    drip = "while True: file.write(b'x' * 4096); file.flush(); time.sleep(0.01)"
    code = f"import sys, time\nfile = open(sys.argv[1], 'wb')\n{drip}"
    argv = [sys.executable, "-c", code, str(tmp_path / "part")]
    limits = download.Limits(slowest_bytes_s=1e12)
    done, said = store.run_client(argv, {}, dict(os.environ), tmp_path, lambda size: None, limits)
    assert done == 124
    assert said.startswith(("no byte for", "fewer than"))


def test_when_the_hours_for_downloads_end_what_is_there_stays_and_the_next_run_goes_on(
    tmp_path: Path,
) -> None:
    hub = Hub(dict(FILES), {"parts/big.bin": ["slow"]})
    with serving(hub) as address:
        model = model_in(tmp_path, address)
        patient = dataclasses.replace(IMPATIENT, slow_window_s=60, until=time.monotonic() + 0.5)
        with pytest.raises(store.StoreFailed, match="hours in which models may be fetched are over"):
            store.ensure(model, store.Access(huggingface=address, limits=patient))
        assert not (model.folder / store.READY).exists()
        left = (model.folder / "parts/big.bin.partial").stat().st_size
        assert store.ensure(model, access(address))["ready"]
    ranges = [wanted for _, path, wanted, _ in hub.asked if path.endswith("big.bin")]
    assert ranges == ["", f"bytes={left}-"]


def test_a_broken_connection_is_resumed_and_not_started_anew(tmp_path: Path) -> None:
    hub = Hub(dict(FILES), {"parts/big.bin": ["cut"]})
    with serving(hub) as address:
        store.ensure(model_in(tmp_path, address), access(address))
    ranges = [wanted for _, path, wanted, _ in hub.asked if path.endswith("big.bin")]
    assert ranges == ["", "bytes=150000-"]


def test_a_hub_that_asks_for_too_much_patience_is_left_for_the_next_source(tmp_path: Path) -> None:
    (tmp_path / "second/parts").mkdir(parents=True)
    for path, data in FILES.items():
        (tmp_path / "second" / path).write_bytes(data)
    hub = Hub(dict(FILES), {"parts/big.bin": ["429"] * 9})
    with serving(hub) as address:
        sources = (
            store.Source("huggingface", f"{REPOSITORY}@x"),
            store.Source("path", str(tmp_path / "second")),
        )
        model = store.Model("demo", tmp_path / "demo", lock_of(FILES), sources)
        hasty = store.Access(huggingface=address, limits=download.Limits(retry_after_longest_s=0.5))
        answer = store.ensure(model, hasty)
    assert answer["ready"]
    assert answer["came"]["config.json"] == "huggingface"
    assert answer["came"]["parts/big.bin"].startswith("path (after http://127.0.0.1:")
    assert contents_of(model.folder) == FILES


def test_the_token_is_sent_and_never_said(tmp_path: Path) -> None:
    hub = Hub(dict(FILES), token="s3cret%token")
    with serving(hub) as address:
        model = model_in(tmp_path, address)
        with pytest.raises(store.StoreFailed) as caught:
            store.ensure(model, access(address, "wr0ng"))
        assert "wr0ng" not in str(caught.value)
        assert store.ensure(model, access(address, "s3cret%token"))["ready"]
    assert "s3cret" not in (model.folder / store.READY).read_text()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(BIG[:-1]),
        lambda path: path.write_bytes(b"x" + BIG[1:]),
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
    ],
    ids=["cut off", "one byte", "gone", "empty"],
)
def test_a_damaged_file_is_fetched_again_alone(damage: Callable[[Path], object], tmp_path: Path) -> None:
    hub = Hub(dict(FILES))
    with serving(hub) as address:
        model = model_in(tmp_path, address)
        store.ensure(model, access(address))
        hub.asked.clear()
        damage(model.folder / "parts/big.bin")
        assert not store.look(model, deep=False)["ready"]
        answer = store.ensure(model, access(address))
    assert answer["fetched"] == ["parts/big.bin"]
    assert [path.rsplit("/", 1)[1] for _, path, _, _ in hub.asked] == ["big.bin"]
    assert contents_of(model.folder) == FILES


def test_damage_that_keeps_size_and_time_is_seen_by_a_deep_look_only(tmp_path: Path) -> None:
    hub = Hub(dict(FILES))
    with serving(hub) as address:
        model = model_in(tmp_path, address)
        store.ensure(model, access(address))
        path = model.folder / "parts/big.bin"
        before = path.stat()
        path.write_bytes(b"x" + BIG[1:])
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.verify(model, deep=False) == {}
    assert store.verify(model, deep=True) == {
        "parts/big.bin": "has other bytes than the lock says (sha256 differs)"
    }


def test_a_touched_file_with_the_right_bytes_is_stamped_anew_and_not_fetched(tmp_path: Path) -> None:
    hub = Hub(dict(FILES))
    with serving(hub) as address:
        model = model_in(tmp_path, address)
        store.ensure(model, access(address))
        hub.asked.clear()
        os.utime(model.folder / "parts/big.bin")
        answer = store.ensure(model, access(address))
    assert (answer["changed"], answer["fetched"], hub.asked) == (True, [], [])
    assert store.is_stamped(model)


def test_a_file_that_the_new_lock_does_not_have_goes(tmp_path: Path) -> None:
    hub = Hub(dict(FILES))
    with serving(hub) as address:
        store.ensure(model_in(tmp_path, address), access(address))
        fewer = {"config.json": FILES["config.json"]}
        model = model_in(tmp_path, address, fewer)
        assert store.ensure(model, access(address))["changed"]
    assert contents_of(model.folder) == fewer


def test_a_disk_that_is_too_small_fails_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "DISK_RESERVE_BYTES", 1 << 60)
    hub = Hub(dict(FILES))
    with serving(hub) as address, pytest.raises(store.StoreFailed, match=r"too full .* free, .* needed"):
        store.ensure(model_in(tmp_path, address), access(address))
    assert hub.asked == []


def test_a_model_without_a_lock_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(store.StoreFailed, match=r"invoke models\.lock"):
        store.ensure(model_in(tmp_path, "", {}), access(""))


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../b", ".bringup/ready.json", ""])
def test_a_lock_cannot_name_a_path_outside_the_folder(path: str) -> None:
    data = {"name": "demo", "folder": "/x", "files": [{"path": path, "size": 1, "sha256": "0"}]}
    with pytest.raises(store.StoreFailed, match="leaves the folder"):
        store.Model.of(data)


@pytest.mark.parametrize(
    ("paths", "bad"), [(["a", "b", "a"], "a"), (["w", "w/x"], "w"), (["a/b/c", "a"], "a")]
)
def test_a_lock_cannot_name_a_path_twice_or_as_file_and_folder(paths: list[str], bad: str) -> None:
    rows = [{"path": path, "size": 1, "sha256": "0" * 64} for path in paths]
    with pytest.raises(store.StoreFailed, match=f"twice, or as file and as folder: {bad}$"):
        store.Model.of({"name": "demo", "folder": "/srv/demo", "files": rows})


NOBODY = {
    "no address": store.Source("http", "hub.example/files"),
    "another scheme": store.Source("http", "file:///etc"),
    "a space in it": store.Source("http", "http://127.0.0.1:9/a b"),
    "a client that is gone": store.Source("huggingface", f"{REPOSITORY}@{REVISION}"),
    "no such folder": store.Source("path", "/nowhere/at/all"),
    "no folder": store.Source("path", "/etc/hostname"),
}


@pytest.mark.parametrize("what", NOBODY)
def test_a_source_that_cannot_even_be_asked_is_said_and_left_for_the_next(what: str, tmp_path: Path) -> None:
    with serving(Hub(dict(FILES))) as address:
        good = store.Source("http", f"{address}/{REPOSITORY}/resolve/{REVISION}")
        model = dataclasses.replace(model_in(tmp_path, address), sources=(NOBODY[what], good))
        hub = dataclasses.replace(access(address), client="/nowhere/python")
        came = store.ensure(model, hub)["came"]
    assert contents_of(model.folder) == FILES
    assert all("(after " in text for path, text in came.items() if FILES[path]), came


def test_what_nobody_expected_is_not_lost_while_files_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "fetch", lambda *given: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        store.ensure(model_in(tmp_path, "http://127.0.0.1:9"), access("http://127.0.0.1:9"))


@pytest.mark.parametrize("token", ["secret\n", " secret"])
def test_the_line_end_of_a_file_with_a_token_is_no_part_of_it(token: str, tmp_path: Path) -> None:
    with serving(Hub(dict(FILES), token="secret")) as address:
        model = model_in(tmp_path, address)
        assert store.ensure(model, access(address, token))["ready"]


def test_a_token_that_cannot_be_sent_is_never_said(tmp_path: Path) -> None:
    with serving(Hub(dict(FILES), token="secret")) as address:
        with pytest.raises(store.StoreFailed, match="a character, or its token has one") as failure:
            store.ensure(model_in(tmp_path, address), access(address, "sec\nret"))
        assert "sec" not in str(failure.value).replace("second", "")


def test_a_copy_says_which_of_its_two_ends_failed(tmp_path: Path) -> None:
    file = store.File("w", 4, hashlib.sha256(b"abcd").hexdigest())
    (tmp_path / "w").write_bytes(b"abcd")
    (tmp_path / "full.partial").symlink_to("/dev/full")
    with pytest.raises(store.StoreFailed, match=r"full\.partial: No space left"):
        store.copy(tmp_path / "w", tmp_path / "full", file)
    with pytest.raises(store.StoreFailed, match="/proc/self/mem: "):
        store.copy(Path("/proc/self/mem"), tmp_path / "here", file)


def test_files_from_the_controller_are_asked_for_and_taken_when_they_are_right(tmp_path: Path) -> None:
    model = store.Model("demo", tmp_path / "demo", lock_of(FILES), (store.Source("controller", "x"),))
    first = store.ensure(model, access(""))
    assert (first["ready"], sorted(first["send"])) == (False, sorted(FILES))
    for index, file in enumerate(model.files):
        (Path(first["incoming"]) / store.incoming_name(index)).write_bytes(FILES[file.path])
    second = store.ensure(model, access(""))
    assert (second["ready"], second["changed"]) == (True, True)
    assert contents_of(model.folder) == FILES


def test_a_wrong_file_from_the_controller_is_not_taken(tmp_path: Path) -> None:
    model = store.Model("demo", tmp_path / "demo", lock_of(FILES), (store.Source("controller", "x"),))
    incoming = Path(store.ensure(model, access(""))["incoming"])
    (incoming / store.incoming_name(1)).write_bytes(b"x" * len(BIG))
    with pytest.raises(
        store.StoreFailed, match=r"parts/big\.bin as it came from the controller has other bytes"
    ):
        store.ensure(model, access(""))
    assert not (model.folder / "parts/big.bin").exists()


RUN = """
import sys
from pathlib import Path
from bringup.node import store, download
store.PROGRESS = Path(sys.argv[3])
files = tuple(store.File(*row) for row in {rows!r})
model = store.Model("demo", Path(sys.argv[2]), files, (store.Source("http", sys.argv[1]),))
store.ensure(model, store.Access(limits=download.Limits(back_off_s=0.01)))
"""


def test_a_client_killed_at_any_moment_goes_on_where_it_was_and_ends_right(tmp_path: Path) -> None:
    files = {f"part-{number}.bin": random.Random(number).randbytes(400_000) for number in range(6)}
    rows = [(file.path, file.size, file.sha256) for file in lock_of(files)]
    choice = random.Random(7)
    hub = Hub(dict(files))
    with serving(hub) as address:
        where = f"{address}/{REPOSITORY}/resolve/main"
        argv = [
            sys.executable,
            "-c",
            RUN.format(rows=rows),
            where,
            str(tmp_path / "demo"),
            str(tmp_path / "p"),
        ]
        for _ in range(8):
            hub.faults = {name: ["slow"] for name in files}
            client = subprocess.Popen(argv, cwd=ROOT)
            time.sleep(choice.uniform(0.1, 0.6))
            client.send_signal(signal.SIGKILL)
            client.wait(120)
            assert not (tmp_path / "demo" / store.READY).exists()
        hub.faults = {}
        assert subprocess.run(argv, cwd=ROOT, timeout=240, check=False).returncode == 0
    assert contents_of(tmp_path / "demo") == files


# --- what files say of themselves ---------------------------------------------------------------------------


def safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes]]) -> Path:
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))
    return path


def test_a_whole_safetensors_file_has_nothing_to_say(tmp_path: Path) -> None:
    path = safetensors(
        tmp_path / "a.safetensors", {"w": ("BF16", [2, 3], bytes(12)), "b": ("F8_E4M3", [4], bytes(4))}
    )
    assert contents.check_file(path) == []


def test_a_safetensors_file_that_is_cut_off_is_found_out(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "a.safetensors", {"w": ("F32", [1000], bytes(4000))})
    path.write_bytes(path.read_bytes()[:-1])
    assert "its header says" in contents.check_file(path)[0]
    path.write_bytes(path.read_bytes()[:20])
    assert "cut off" in contents.check_file(path)[0]
    path.write_bytes(b"abc")
    assert "so short" in contents.check_file(path)[0]


def test_a_tensor_whose_length_does_not_fit_its_shape_is_found_out(tmp_path: Path) -> None:
    path = safetensors(tmp_path / "a.safetensors", {"w": ("F32", [2], bytes(4))})
    assert contents.check_file(path) == ["a.safetensors: w has not the length of F32 [2]"]


def test_an_index_must_name_what_is_there_and_all_of_it(tmp_path: Path) -> None:
    safetensors(tmp_path / "one.safetensors", {"a": ("F32", [1], bytes(4)), "b": ("F32", [1], bytes(4))})
    index = tmp_path / contents.INDEX

    def check(weight_map: dict[str, str]) -> list[str]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        return contents.check_index(tmp_path)

    assert check({"a": "one.safetensors", "b": "one.safetensors"}) == []
    assert "not there: two.safetensors" in check({"a": "two.safetensors"})[0]
    assert "does not name: b" in check({"a": "one.safetensors"})[0]
    assert (
        "not in their files: c"
        in check({"a": "one.safetensors", "b": "one.safetensors", "c": "one.safetensors"})[0]
    )


def test_a_pointer_in_place_of_a_file_is_found_out(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    assert "git-lfs pointer" in contents.check_file(path)[0]


@pytest.mark.parametrize(
    ("start", "problem"),
    [
        (b"GGUF\x03\0\0\0", None),
        (b"GGUF\x01\0\0\0", "version 1"),
        (b"GGML\x03\0\0\0", "does not start with GGUF"),
    ],
)
def test_a_gguf_files_magic_and_version_are_looked_at(
    start: bytes, problem: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(start + bytes(100))
    found = contents.check_file(path)
    assert found == [] if problem is None else problem in found[0]


def test_the_configuration_must_be_what_the_plan_expects(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"architectures": ["Demo"], "text_config": {"layers": 3}, "quantization_config": {"bits": 8}}
        )
    )
    good = {"architecture": "Demo", "config": {"layers": 3, "quantization_config.bits": 8}}
    assert contents.check_config(tmp_path, good) == []
    bad = contents.check_config(tmp_path, {"architecture": "Other", "config": {"layers": 4}})
    assert bad == [
        "config.json is of architecture Demo, the plan needs Other",
        "config.json says layers = 3, the plan needs 4",
    ]


def test_tensors_that_drafting_needs_must_be_there(tmp_path: Path) -> None:
    safetensors(
        tmp_path / "one.safetensors",
        {"model.layers.2.w": ("F32", [1], bytes(4)), "a": ("F32", [1], bytes(4))},
    )
    assert contents.check_config(tmp_path, {"tensors": {"model.layers.2.": 1}}) == []
    assert contents.check_config(tmp_path, {"tensors": {"model.layers.2.": None}}) == []
    assert contents.check_config(tmp_path, {"tensors": {"model.layers.3.": None}}) == [
        "0 tensors start with model.layers.3., the plan needs some"
    ]


def test_a_model_that_makes_no_sense_is_not_ready_though_its_bytes_are_right(tmp_path: Path) -> None:
    files = {"model.safetensors": b"\xff" * 100}
    with serving(Hub(dict(files))) as address:
        model = model_in(tmp_path, address, files)
        with pytest.raises(store.StoreFailed, match="makes no sense"):
            store.ensure(model, access(address))
    assert not (model.folder / store.READY).exists()


# --- on the controller --------------------------------------------------------------------------------------


def test_a_lab_model_is_made_once_and_must_be_what_the_lock_says(tmp_path: Path) -> None:
    script = tmp_path / "make.py"
    script.write_text(
        "import sys, pathlib\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "(folder / 'w').write_bytes(b'abcd')\n"
        "(folder / 'times').open('a').write('x')\n"
    )
    right = {"path": "w", "size": 4, "sha256": hashlib.sha256(b"abcd").hexdigest()}
    model = {"name": "demo", "made_by": str(script), "files": [right], "sources": []}
    folder = stores.controller_folder(model, ["w"], tmp_path / "cache")
    stores.controller_folder(model, ["w"], tmp_path / "cache")
    assert (folder / "times").read_text() == "x"
    with pytest.raises(HostFailed, match="sha256 differs"):
        stores.controller_folder(
            {**model, "files": [{**right, "sha256": "0" * 64}]}, ["w"], tmp_path / "cache"
        )


def test_a_script_that_fails_is_said_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "make.py"
    script.write_text("raise SystemExit('no luck')")
    model = {"name": "demo", "made_by": str(script), "files": [{"path": "w", "size": 1, "sha256": "0"}]}
    with pytest.raises(HostFailed, match="ended with 1: no luck"):
        stores.controller_folder(model, ["w"], tmp_path / "cache")


@pytest.mark.parametrize(
    ("value", "seconds"), [(None, None), ("7", 7.0), ("Thu, 01 Jan 1970 00:01:40 GMT", 90.0), ("soon", None)]
)
def test_retry_after_is_a_number_or_a_date(value: str | None, seconds: float | None) -> None:
    assert web.parse_retry_after(value, 10.0) == seconds


# --- who reads from whom ------------------------------------------------------------------------------------

HOSTS = {
    "a": {"ansible_host": "10.0.0.1"},
    "b": {"ansible_host": "10.0.0.2"},
    "c": {},
    "d": {"ansible_host": "10.0.0.4"},
}


@pytest.mark.parametrize(
    ("ready", "before"),
    [
        (
            "....",
            {"a": [], "b": ["10.0.0.1"], "c": ["10.0.0.2", "10.0.0.1"], "d": ["c", "10.0.0.2", "10.0.0.1"]},
        ),
        ("++++", {"a": None, "b": None, "c": None, "d": None}),
        (
            "...+",
            {
                "a": ["10.0.0.4"],
                "b": ["10.0.0.1", "10.0.0.4"],
                "c": ["10.0.0.2", "10.0.0.1", "10.0.0.4"],
                "d": [],
            },
        ),
        ("+++.", {"a": [], "b": [], "c": None, "d": ["10.0.0.2", "10.0.0.1"]}),
    ],
    ids=["nobody has it", "all have it", "the last has it", "all but the last have it"],
)
def test_who_lacks_a_model_reads_from_the_one_before_it_behind_those_that_have_it(
    ready: str, before: dict[str, list[str] | None]
) -> None:
    state = dict(zip(HOSTS, (sign == "+" for sign in ready), strict=True))
    places = {host: stores.place(host, state, HOSTS) for host in HOSTS}
    assert {host: place and place["before"] for host, place in places.items()} == before


@pytest.mark.parametrize(
    ("state", "before"),
    [
        # Racks r and s; each has one that has it: nobody reads from the other rack while its own lives.
        ("r+ r- s+ s-", {0: [], 1: [0, 2], 2: [], 3: [2, 1, 0]}),
        # Nobody of rack s has it: its first one follows the last of rack r, so the link carries it once.
        ("r+ r- s- s-", {0: [], 1: [0], 2: [1, 0], 3: [2, 1, 0]}),
        # Rack r lacks nothing, so one of its own is enough beside the one in rack s, and the third has no place.
        ("r+ r+ r+ s+ s-", {0: [], 1: None, 2: None, 3: [], 4: [3, 0]}),
        ("r- s+ s-", {0: [1], 1: [], 2: [1, 0]}),
    ],
)
def test_who_lacks_a_model_reads_from_its_own_rack_first(
    state: str, before: dict[int, list[int] | None]
) -> None:
    signs = state.split()
    known = {
        f"n{index}": {"ansible_host": f"10.0.0.{index}", "node_rack": sign[0]}
        for index, sign in enumerate(signs)
    }
    ready = {f"n{index}": sign[1] == "+" for index, sign in enumerate(signs)}
    places = {index: stores.place(f"n{index}", ready, known) for index in range(len(signs))}
    numbers = {
        index: place and [int(address.rpartition(".")[2]) for address in place["before"]]
        for index, place in places.items()
    }
    assert numbers == before


def test_only_hosts_that_play_and_were_looked_at_count() -> None:
    row = {"item": {"name": "demo"}, "ready": True}
    hostvars = {
        "a": {"seen": {"results": [row]}},
        "b": {"seen": {"results": [{**row, "ready": False}]}},
        "c": {},
    }
    model = {"name": "demo", "chain": ["a", "b", "c"]}
    assert stores.readiness(model, "a", hostvars, ["a", "b", "c"], "seen") == {"a": True, "b": False}
    assert stores.readiness(model, "a", hostvars, ["a"], "seen") == {"a": True}
    assert stores.readiness({"name": "demo", "chain": []}, "b", hostvars, ["a", "b"], "seen") == {"b": False}
