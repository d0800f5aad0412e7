"""The catalog's files: read once, checked whole, every mistake named with its file and key."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from bringup import ROOT, catalog
from bringup.catalog import Catalog
from bringup.errors import UsageError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped catalog that a test may break."""
    ignored = shutil.ignore_patterns("failures", "rules", "suites")
    shutil.copytree(ROOT / "catalog", tmp_path / "catalog", ignore=ignored)
    (tmp_path / "bringup" / "node").mkdir(parents=True)
    shutil.copy(ROOT / "bringup/node/llama_serve.py", tmp_path / "bringup/node")
    return tmp_path / "catalog"


def change(folder: Path, name: str, **keys: Any) -> None:
    """Sets keys of an entry; None takes one out."""
    path = folder / f"{name}.yml"
    data = {**yaml.safe_load(path.read_text()), **keys}
    path.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not None}))


def problems(folder: Path) -> list[str]:
    return [str(problem) for problem in Catalog(folder).everything()]


def test_the_shipped_catalog_has_no_problem() -> None:
    assert catalog.load().names("platforms")


def test_problems_of_all_files_come_at_once(folder: Path) -> None:
    change(folder, "platforms/cpu", arch="sparc")
    change(folder, "models/words", contxt=5)
    change(folder, "engines/vllm-0.33.0", launch=None)
    found = "\n".join(problems(folder))
    assert "catalog/platforms/cpu.yml: arch" in found
    assert 'catalog/models/words.yml: contxt: unknown key. Did you mean "context"?' in found
    assert "catalog/engines/vllm-0.33.0.yml: launch: is required and missing" in found
    with pytest.raises(UsageError) as error:
        catalog.load(folder)
    assert len(error.value.problems) >= 3


def test_a_misspelt_key_deep_inside_is_found_with_a_suggestion(folder: Path) -> None:
    data = yaml.safe_load((folder / "platforms/gh200-2x.yml").read_text())
    data["host"]["numa"][0]["cpu"] = "0-71"
    (folder / "platforms/gh200-2x.yml").write_text(yaml.safe_dump(data))
    assert 'catalog/platforms/gh200-2x.yml: host.numa.0.cpu: unknown key. Did you mean "cpus"?' in problems(
        folder
    )


@pytest.mark.parametrize(
    ("entry", "keys", "message"),
    [
        (
            "models/glm-5.2-awq-int4-fp8-mtp",
            {"graft": {"base": "glm-5.2-awq", "tensors": 1, "delta": {}}},
            'graft.base: unknown model "glm-5.2-awq". Did you mean "glm-5.2-awq-int4"?',
        ),
        ("models/glm-5.2-awq-int4-fp8-mtp", {"mtp": None}, "a graft adds an MTP layer"),
        ("models/glm-5.2-dspark", {"draft_for": ["glm-9"]}, 'draft_for: unknown model "glm-9"'),
        ("models/glm-5.1-fp8", {"hub": None}, "needs a place to come from"),
        ("models/glm-5.1-fp8", {"trust_remote_code": True}, "code is only trusted at a pinned revision"),
        (
            "models/words",
            {"lock": "catalog/models/locks/word.yml"},
            "there is no file catalog/models/locks/word.yml",
        ),
        (
            "models/glm-5.1-fp8",
            {"mtp": {"layer": 3, "prefix": "x", "precision": "fp8"}},
            "does not follow the 78 layers",
        ),
        ("engines/sglang-0.5.23", {"flag_table": "sglang-0.5.99"}, "invoke flags.table"),
        ("engines/sglang-0.5.23", {"version": "0.5.24"}, "should be called sglang-0.5.24.yml"),
        (
            "engines/llama-server-2026.10.11549",
            {"programs": ["bringup/node/nothing.py"]},
            "there is no file bringup/node/nothing.py",
        ),
        ("platforms/h200-1x", {"driver": None}, "a platform with gpus needs driver"),
        (
            "profiles/cpu-words-llama-server",
            {"model": "word"},
            'model: unknown model "word". Did you mean "words"?',
        ),
        (
            "profiles/cpu-words-llama-server",
            {"platforms": ["cpus"]},
            'unknown platform "cpus". Did you mean "cpu"?',
        ),
        ("profiles/cpu-words-llama-server", {"engine": "llama-server-2026.10.11548"}, "unknown engine"),
        (
            "profiles/cpu-words-llama-server",
            {"unmeasured": None},
            "needs expectations (a measurement) or unmeasured",
        ),
        ("profiles/cpu-words-llama-server", {"model": "glm-5.1-fp8"}, "glm-5.1-fp8 is safetensors"),
        (
            "profiles/h200-8x-glm-5.2-fp8-vllm",
            {"platforms": ["cpu"]},
            "vllm-0.33.0 needs GPUs, and platform cpu has none",
        ),
        (
            "profiles/h200-8x-glm-5.2-fp8-vllm",
            {"platforms": ["gh200-2x"], "gpus": 4},
            "wants 4 GPUs, and platform gh200-2x has 2",
        ),
        (
            "profiles/h200-8x-glm-5.2-fp8-vllm",
            {"model": "glm-5.2-awq-int4"},
            "MTP is on, and glm-5.2-awq-int4 has no MTP tensors",
        ),
        ("profiles/h200-8x-glm-5.2-fp8-vllm", {"draft": "words"}, "words drafts for"),
        (
            "profiles/h200-8x-glm-5.2-fp8-sglang",
            {"engine": "sglang-0.5.10.post1"},
            "too old for glm-5.2-fp8. It needs sglang 0.5.13.post1",
        ),
        ("profiles/gh200-2x-glm-5.2-fp8-vllm", {"engine": "sglang-0.5.10.post1"}, "does not run on aarch64"),
        (
            "profiles/gh200-2x-glm-5.2-ud-iq2-xxs-llama-server",
            {"placement": {"bind": "node", "node": 2}},
            "gh200-2x has no NUMA node 2 with CPUs. Nodes with CPUs: 0, 1.",
        ),
        (
            "profiles/gh200-2x-glm-5.2-fp8-vllm-mtp-3",
            {"based_on": "gh200-2x-glm-5.2-fp8"},
            'based_on: unknown profile "gh200-2x-glm-5.2-fp8"',
        ),
        ("profiles/gh200-2x-glm-5.2-fp8-vllm-mtp-3", {"flags": {"spec-tokens": 3}}, 'should start with "--"'),
        (
            "profiles/gh200-2x-glm-5.2-fp8-vllm-mtp-3",
            {"environment": {"A": True}},
            "write the text in quotes",
        ),
    ],
)
def test_a_wrong_entry_is_refused(folder: Path, entry: str, keys: dict[str, Any], message: str) -> None:
    change(folder, entry, **keys)
    assert message in "\n".join(problems(folder))


def test_a_circle_of_profiles_is_found(folder: Path) -> None:
    change(folder, "profiles/cpu-words-llama-server", based_on="cpu-words-llama-server")
    assert any("goes round in a circle" in problem for problem in problems(folder))


def test_a_key_given_twice_is_refused(folder: Path) -> None:
    path = folder / "platforms" / "cpu.yml"
    path.write_text(path.read_text() + "arch: x86_64\n")
    assert any('key "arch" is given twice' in problem for problem in problems(folder))


def test_a_profile_takes_what_it_does_not_say_from_the_one_below() -> None:
    known = catalog.lazy()
    careful = known.profile("h20-141gb-glm-5.1-fp8-sglang-0.5.10-mtp-careful")
    tuned = known.profile("h20-141gb-glm-5.1-fp8-sglang-0.5.10-tuned")
    assert tuned.flags["--tp-size"] == 8
    assert (careful.flags["--speculative-num-steps"], tuned.flags["--speculative-num-steps"]) == (3, 4)
    assert tuned.model == careful.model == "glm-5.1-fp8"
    assert careful.tune is None
    assert tuned.tune


def test_a_gpu_name_is_compared_in_whole_words() -> None:
    known = catalog.lazy()
    h200, gh200, h20 = (known.platform(name).gpus for name in ("h200-1x", "gh200-2x", "h20-96gb"))
    assert h200
    assert gh200
    assert h20
    assert h200.matches("NVIDIA H200")
    assert not h200.matches("NVIDIA GH200 480GB")
    assert gh200.matches("NVIDIA GH200 480GB")
    assert not gh200.matches("NVIDIA H200")
    assert not h20.matches("NVIDIA H200")
    assert not h20.matches("NVIDIA H20-3e")


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("0.5.10", "0.5.10.post1"),
        ("0.5.10.post1", "0.5.11"),
        ("0.9.0", "0.33.0"),
        ("535.161.07", "580.65.06"),
    ],
)
def test_versions_are_ordered_by_their_numbers(older: str, newer: str) -> None:
    assert catalog.version_key(older) < catalog.version_key(newer)


def test_only_what_is_asked_for_is_read(folder: Path) -> None:
    (folder / "profiles" / "h20-141gb-glm-5.1-fp8-sglang.yml").write_text("nonsense: [")
    assert Catalog(folder).profile("cpu-words-llama-server").model == "words"


def test_an_empty_folder_is_an_empty_catalog(tmp_path: Path) -> None:
    assert Catalog(tmp_path).everything() == []
    with pytest.raises(UsageError, match='unknown model "words"'):
        Catalog(tmp_path).model("words")
