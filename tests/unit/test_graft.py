"""A graft is whole or not there; what does not fit is refused, and undo leaves no trace."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from bringup.node import contents, graft

HIDDEN = 4
Tensors = dict[str, tuple[str, list[int]]]
BASE: Tensors = {
    "model.embed.weight": ("BF16", [8, HIDDEN]),
    "model.layers.0.w": ("BF16", [HIDDEN]),
    "model.layers.1.w": ("BF16", [HIDDEN]),
}
DELTA: Tensors = {
    "model.layers.2.w": ("F8_E4M3", [HIDDEN]),
    "model.layers.2.hnorm.weight": ("BF16", [HIDDEN]),
}
WIDTH = {"BF16": 2, "F8_E4M3": 1, "F32": 4}


def write(folder: Path, tensors: Tensors, files: int = 1, config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True)
    names = list(tensors)
    weight_map = {}
    for number in range(files):
        name = f"model-{number + 1:05d}.safetensors"
        header: dict[str, Any] = {}
        data = b""
        for tensor in names[number::files]:
            dtype, shape = tensors[tensor]
            count = WIDTH[dtype]
            for side in shape:
                count *= side
            header[tensor] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + count]}
            data += hashlib.sha256(tensor.encode()).digest()[:1] * count
            weight_map[tensor] = name
        text = json.dumps(header).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / contents.INDEX).write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def wish(tmp_path: Path) -> graft.Wish:
    base = write(
        tmp_path / "base",
        BASE,
        2,
        {"num_hidden_layers": 2, "hidden_size": HIDDEN, "quantization_config": {"bits": 4}},
    )
    return graft.Wish(base, write(tmp_path / "delta", DELTA), tmp_path / "out", tensors=2)


def tree(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.rglob("*")
        if p.is_file()
    }


def changed(wish: graft.Wish, **changes: Any) -> graft.Wish:
    return dataclasses.replace(wish, **changes)


def test_the_overlay_holds_all_tensors_and_a_configuration_that_says_so(wish: graft.Wish) -> None:
    before = tree(wish.base), tree(wish.delta)
    answer = graft.graft(changed(wish, config={"quantization_config.draft": "fp8"}))
    assert (answer["changed"], answer["layer"], answer["tensors"]) == (True, 2, 2)
    assert sorted(contents.tensor_names(wish.out)) == sorted([*BASE, *DELTA])
    assert contents.check_index(wish.out) == []
    config = json.loads((wish.out / "config.json").read_text())
    assert (config["num_nextn_predict_layers"], config["quantization_config"]) == (
        1,
        {"bits": 4, "draft": "fp8"},
    )
    assert contents.check_config(wish.out, {"tensors": {"model.layers.2.": 2}}) == []
    assert (wish.out / "tokenizer.json").samefile(wish.base / "tokenizer.json")
    assert (tree(wish.base), tree(wish.delta)) == before


def test_a_second_graft_of_the_same_changes_nothing_and_of_another_base_makes_it_anew(
    wish: graft.Wish,
) -> None:
    graft.graft(wish)
    assert graft.graft(wish)["changed"] is False
    (wish.base / "tokenizer.json").write_text('{"new": 1}')
    assert graft.graft(wish)["changed"] is True
    assert json.loads((wish.out / "tokenizer.json").read_text()) == {"new": 1}


def test_check_only_makes_nothing(wish: graft.Wish) -> None:
    assert graft.graft(wish, check_only=True)["changed"] is True
    assert not wish.out.exists()


def test_undo_removes_the_overlay_and_nothing_else(wish: graft.Wish, tmp_path: Path) -> None:
    before = tree(tmp_path)
    graft.graft(wish)
    assert graft.undo(wish.out) is True
    assert tree(tmp_path) == before
    assert graft.undo(wish.out) is False


@pytest.mark.parametrize(
    ("delta", "change", "words"),
    [
        ({"model.layers.3.w": ("BF16", [HIDDEN])}, {"tensors": None}, "wrong layer: the delta brings"),
        (DELTA, {"layer": 1, "tensors": None}, "wrong layer: the base has 2 layers"),
        (DELTA, {"tensors": 1569}, "wrong count: the delta brings 2 tensors of layer 2, expected 1569"),
        (DELTA, {"dtypes": ("BF16",)}, "dtype surprise: F8_E4M3 where BF16 is expected: model.layers.2.w"),
        (
            {"model.layers.2.w": ("BF16", [HIDDEN]), "model.layers.2.enorm.weight": ("BF16", [HIDDEN * 2])},
            {},
            "another width: model.layers.2.enorm.weight",
        ),
    ],
    ids=["other layer's tensors", "wrong layer wished", "count", "dtype", "width"],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    delta: Tensors, change: dict[str, Any], words: str, wish: graft.Wish, tmp_path: Path
) -> None:
    other = changed(wish, delta=write(tmp_path / "other", delta), **change)
    with pytest.raises(graft.GraftRefused) as caught:
        graft.graft(other)
    assert words in str(caught.value)
    assert not wish.out.exists()


def test_a_base_that_has_the_layer_already_is_refused(wish: graft.Wish, tmp_path: Path) -> None:
    base = write(tmp_path / "full", {**BASE, "model.layers.2.w": ("BF16", [1])}, 1, {"num_hidden_layers": 2})
    with pytest.raises(graft.GraftRefused, match="the base has 1 tensors of layer 2 already"):
        graft.graft(changed(wish, base=base))


def test_all_reasons_come_at_once(wish: graft.Wish) -> None:
    with pytest.raises(graft.GraftRefused) as caught:
        graft.graft(changed(wish, layer=7, tensors=9, dtypes=("F32",)))
    assert len(str(caught.value).splitlines()) == 4


def test_a_folder_that_no_graft_made_is_never_touched(wish: graft.Wish) -> None:
    wish.out.mkdir()
    (wish.out / "mine").write_text("mine")
    with pytest.raises(graft.GraftRefused, match="not made by a graft"):
        graft.graft(wish)
    with pytest.raises(graft.GraftRefused, match="not made by a graft"):
        graft.undo(wish.out)
    assert (wish.out / "mine").read_text() == "mine"


def test_files_of_the_same_name_do_not_hide_each_other(wish: graft.Wish) -> None:
    graft.graft(wish)
    files = sorted(path.name for path in wish.out.glob("*.safetensors"))
    assert files == ["draft-model-00001.safetensors", "model-00001.safetensors", "model-00002.safetensors"]


def test_an_engine_without_the_needed_patch_is_told(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "config.py").write_text("mtp_quantization_config = None\n")
    needs = {
        "an override for the draft layer": "mtp_quantization_config",
        "mixed names skipped": "skip_mixed",
    }
    assert graft.missing_words(needs, tmp_path) == ["mixed names skipped"]


def test_the_command_says_what_it_did_and_why_it_refused(
    wish: graft.Wish, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(wish.base), str(wish.delta), str(wish.out)]
    assert graft.main([*argv, "--tensors", "3"]) == 2
    assert "wrong count" in capsys.readouterr().err
    assert graft.main(argv) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 2
    assert graft.main(["--undo", str(wish.out)]) == 0
