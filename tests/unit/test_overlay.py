"""A grafted model is a folder of the store like any other: ready when verified, made anew when its parts change."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from bringup.node import overlay, shelf, store
from tests.unit.test_graft import BASE, DELTA, HIDDEN, write

CONFIG = {"num_hidden_layers": 2, "hidden_size": HIDDEN, "architectures": ["Demo"]}


def locked(folder: Path) -> list[dict[str, Any]]:
    """The lock of a folder as it is."""
    return [
        {
            "path": str(path.relative_to(folder)),
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file() and store.OURS not in path.relative_to(folder).parts
    ]


def ready(folder: Path) -> dict[str, Any]:
    """A folder whose files are right gets its stamp; returns its row."""
    row = {"name": folder.name, "folder": str(folder), "files": locked(folder)}
    store.finish(store.Model.of(row))
    return row


@pytest.fixture
def row(tmp_path: Path) -> dict[str, Any]:
    base = write(tmp_path / "base", BASE, 2, CONFIG)
    delta = write(tmp_path / "delta", DELTA)
    return {
        "name": "whole",
        "folder": str(tmp_path / "whole"),
        "expects": {"architecture": "Demo", "tensors": {"model.layers.2.": 2}},
        "graft": {
            "base": ready(base),
            "delta": ready(delta),
            "layer": 2,
            "tensors": 2,
            "config": {"a.b": "c"},
        },
    }


def test_it_is_ready_after_it_was_made_and_a_second_run_finds_nothing_to_do(row: dict[str, Any]) -> None:
    planned = overlay.Overlay.of(row)
    assert overlay.look(planned, deep=False)["faults"] == {"": "is not there or not whole"}
    first, second = overlay.ensure(planned), overlay.ensure(planned, deep=True)
    assert (first["changed"], first["ready"], second["changed"], second["ready"]) == (True, True, False, True)
    config = json.loads((planned.folder / "config.json").read_text())
    assert (config["a"], config["num_nextn_predict_layers"]) == ({"b": "c"}, 1)
    assert shelf.verified(row, deep=True)["ready"]
    assert len(overlay.stamped(planned).files) == len(store.stamp_of(planned.folder)) == 6


def test_an_engine_that_lacks_what_it_needs_is_named(row: dict[str, Any], tmp_path: Path) -> None:
    for name, text in (("patched", "draft_quantization = 1"), ("plain", "pass")):
        (tmp_path / name / "lib/python3/site-packages").mkdir(parents=True)
        (tmp_path / name / "lib/python3/site-packages/engine.py").write_text(text)
    prefixes = [str(tmp_path / "patched"), str(tmp_path / "plain")]
    row["graft"].update(words={"an override": "draft_quantization"}, engines=prefixes)
    assert overlay.ensure(overlay.Overlay.of(row))["warned"] == [
        f"the engine in {prefixes[1]} has not what the grafted model whole needs: an override"
    ]


def test_without_its_parts_it_is_not_made(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "delta" / store.READY).unlink()
    with pytest.raises(store.StoreFailed, match=r"^graft whole: delta in .* is not ready$"):
        overlay.ensure(overlay.Overlay.of(row))
    assert not (tmp_path / "whole").exists()


def test_what_does_not_fit_is_refused_in_one_line_and_nothing_is_there(
    row: dict[str, Any], tmp_path: Path
) -> None:
    row["graft"].update(tensors=3, layer=7)
    with pytest.raises(store.StoreFailed, match=r"refused: wrong layer.*wrong count") as caught:
        overlay.ensure(overlay.Overlay.of(row))
    assert "\n" not in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["base", "delta"]


def test_what_makes_no_sense_to_the_plan_is_refused(row: dict[str, Any], tmp_path: Path) -> None:
    row["expects"]["architecture"] = "Other"
    with pytest.raises(store.StoreFailed, match="the plan needs Other"):
        overlay.ensure(overlay.Overlay.of(row))
    assert not (tmp_path / "whole").exists()


def test_a_file_that_no_lock_has_does_not_get_in(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "base" / "strange.py").write_text("import os")
    with pytest.raises(store.StoreFailed, match=r"no lock has: strange\.py"):
        overlay.ensure(overlay.Overlay.of(row))


def test_a_changed_base_makes_it_anew(row: dict[str, Any], tmp_path: Path) -> None:
    overlay.ensure(overlay.Overlay.of(row))
    (tmp_path / "base" / "tokenizer.json").write_text('{"new": 1}')
    row["graft"]["base"] = ready(tmp_path / "base")
    planned = overlay.Overlay.of(row)
    assert "other files" in overlay.look(planned, deep=False)["faults"][""]
    assert overlay.ensure(planned)["changed"]
    assert (planned.folder / "tokenizer.json").read_text() == '{"new": 1}'


def test_a_damaged_configuration_is_seen_and_made_anew(row: dict[str, Any]) -> None:
    planned = overlay.Overlay.of(row)
    overlay.ensure(planned)
    before = (planned.folder / "config.json").read_text()
    (planned.folder / "config.json").write_text("{}")
    assert "config.json" in overlay.look(planned, deep=False)["faults"]
    assert overlay.ensure(planned)["changed"]
    assert (planned.folder / "config.json").read_text() == before


def test_it_is_shown_and_taken_away_unless_it_is_open_and_its_parts_stay(
    row: dict[str, Any], tmp_path: Path
) -> None:
    overlay.ensure(overlay.Overlay.of(row))
    proc, units = tmp_path / "proc", tmp_path / "units"
    descriptors = proc / "77" / "fd"
    descriptors.mkdir(parents=True)
    (descriptors / "3").symlink_to(tmp_path / "whole" / "config.json")

    def shown(undo: str) -> list[dict[str, Any]]:
        return shelf.grafts(shelf.shelf(tmp_path, [], proc, units), undo)

    assert [(one["model"], one["layer"], one["ready"]) for one in shown("")] == [("whole", 2, True)]
    assert shown("whole")[0]["refused"] == "is open in process 77: stop it first"
    assert (tmp_path / "whole").is_dir()
    (descriptors / "3").unlink()
    assert shown("whole")[0]["ready"] is False
    assert not (tmp_path / "whole").exists()
    assert store.is_stamped(overlay.Overlay.of(row).base)
    assert shown("") == []
