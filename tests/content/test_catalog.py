"""Every entry of the shipped catalog keeps the promises that the sources make about it."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bringup import ROOT, catalog, flags, plan
from bringup.catalog import Profile
from bringup.errors import UsageError
from bringup.inventory import Host, Inventory
from bringup.planned import Plan

KNOWN = catalog.load()
PAIRS = [(name, platform) for name in KNOWN.names("profiles") for platform in KNOWN.profile(name).platforms]
OLD_LADDER = "glm-5.1-fp8-sglang-0.5.10"
CURRENT_LADDER = "glm-5.1-fp8-sglang"


def of_profile(name: str, platform: str) -> Plan:
    variables = {"node_platform": platform, "node_services": [{"name": "s", "profile": name, "port": 8000}]}
    return plan.resolve(Inventory("one", Path("one"), (Host("node", (), variables),)), KNOWN)


def ladder(name: str) -> list[Profile]:
    rungs = [profile for one in KNOWN.names("profiles") if (profile := KNOWN.profile(one)).ladder]
    return sorted((one for one in rungs if one.ladder and one.ladder.name == name), key=rung_of)


def rung_of(profile: Profile) -> int:
    assert profile.ladder
    return profile.ladder.rung


@pytest.mark.parametrize(("name", "platform"), PAIRS)
def test_every_profile_resolves_on_each_of_its_platforms(name: str, platform: str) -> None:
    made = of_profile(name, platform)
    assert made.hosts[0].services[0].profile == name
    assert not [finding for finding in made.findings if finding.severity == "error"]


@pytest.mark.parametrize(("name", "platform"), PAIRS)
def test_no_profile_carries_a_flag_that_does_nothing_or_another_thing(name: str, platform: str) -> None:
    wrong = (
        "FLAG_NEVER_READ",
        "FLAG_RENAMED",
        "FLAG_REMOVED",
        "FLAG_DEPRECATED",
        "ENV_REMOVED",
        "FLAG_PREFIX",
    )
    assert [one for one in of_profile(name, platform).findings if one.code in wrong] == []


@pytest.mark.parametrize("name", KNOWN.names("profiles"))
def test_a_profile_is_called_after_a_platform_its_model_and_its_engine(name: str) -> None:
    profile = KNOWN.profile(name)
    family = KNOWN.engine(profile.engine).engine
    assert any(name.startswith(f"{platform}-") for platform in profile.platforms) or profile.based_on
    assert profile.model in name
    assert family in name


@pytest.mark.parametrize("name", KNOWN.names("profiles"))
def test_every_measurement_names_its_source(name: str) -> None:
    for expectation in KNOWN.profile(name).expectations:
        # The last is what `invoke tune --write` says: a run's record.
        assert expectation.source.startswith(("https://", "a published", "docs/", "invoke tune on "))


@pytest.mark.parametrize("name", KNOWN.names("engines"))
def test_an_engine_has_a_flag_table_and_its_own_flags_are_in_it(name: str) -> None:
    engine = KNOWN.engine(name)
    table = flags.load_table(engine.engine, engine.version)
    launch = engine.launch
    named = [launch.model, launch.host, launch.port, launch.served_name, *launch.always]
    named += [flag for flag in (launch.context,) if flag]
    if launch.api_key and launch.api_key.how != "environment":
        named.append(launch.api_key.name)
    assert [flag for flag in named if flag not in table.options] == []


@pytest.mark.parametrize("name", KNOWN.names("engines"))
def test_an_engine_has_hashed_locks_without_an_index_for_every_architecture(name: str) -> None:
    engine = KNOWN.engine(name)
    assert sorted(engine.install.locks) == sorted(engine.arches)
    for lock in engine.install.locks.values():
        text = (ROOT / lock).read_text()
        pins = re.findall(r"^[a-z0-9][\w.-]*(?:\[[\w,-]+\])?==", text, re.M)
        assert pins
        assert text.count("--hash=sha256:") >= len(pins)
        assert not re.search(r"https?://|--(extra-)?index|--find-links", text)
        package, _, version = engine.install.requires[0].partition("==")
        assert f"\n{package}=={version} " in f"\n{text}"


@pytest.mark.parametrize("name", [name for name in KNOWN.names("models") if KNOWN.model(name).made_by])
def test_a_lab_model_is_made_byte_for_byte_as_locked(name: str, tmp_path: Path) -> None:
    model = KNOWN.model(name)
    assert model.made_by
    assert model.lock
    command = [sys.executable, "-I", str(ROOT / model.made_by), str(tmp_path)]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    for file in yaml.safe_load((ROOT / model.lock).read_text())["files"]:
        data = (tmp_path / file["path"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["size"], file["sha256"])


def test_no_model_trusts_the_code_of_its_repository_unpinned() -> None:
    trusting = [name for name in KNOWN.names("models") if KNOWN.model(name).trust_remote_code]
    assert all(KNOWN.model(name).hub.revision for name in trusting)


# --- what the sources say ----------------------------------------------------------------------------------


def test_the_whole_ladder_of_the_first_source_is_there_with_its_numbers() -> None:
    speeds = [(one.expectations[0].value, one.expectations[0].low) for one in ladder(OLD_LADDER)]
    assert speeds == [(2.3, None), (31, None), (None, 52), (None, 71), (None, 118)]
    assert any(
        one.value == 1355 and one.workload.concurrent == 32 for one in ladder(OLD_LADDER)[-1].expectations
    )


def test_each_rung_changes_few_things() -> None:
    for name in (OLD_LADDER, CURRENT_LADDER):
        rungs = ladder(name)
        assert [rung_of(rung) for rung in rungs] == list(range(len(rungs)))
        assert all(rung.based_on for rung in rungs[1:])


def test_the_current_ladder_holds_no_setting_that_died() -> None:
    dead = {"--enable-single-batch-overlap", "--num-continuous-decode-steps", "--attention-backend"}
    for rung in ladder(CURRENT_LADDER):
        assert not dead & set(rung.flags)
        assert rung.flags.get("--fp8-gemm-backend") != "cutlass"
        assert "SGLANG_ENABLE_SPEC_V2" not in rung.environment


def test_draft_tokens_are_written_as_the_engine_takes_them() -> None:
    for name in KNOWN.names("profiles"):
        flags_of = KNOWN.profile(name).flags
        if flags_of.get("--speculative-eagle-topk") == 1:
            steps = flags_of["--speculative-num-steps"]
            assert isinstance(steps, int)
            assert flags_of["--speculative-num-draft-tokens"] == steps + 1


def test_the_steady_choice_of_the_second_source_is_mtp_3() -> None:
    stable = KNOWN.profile("gh200-2x-glm-5.2-awq-int4-fp8-mtp-vllm")
    other = KNOWN.profile("gh200-2x-glm-5.2-awq-int4-fp8-mtp-vllm-mtp-4")
    assert (stable.flags["--spec-tokens"], other.flags["--spec-tokens"]) == (3, 4)
    pairs = list(zip(stable.expectations[:4], other.expectations[:4], strict=True))
    assert all(one.cv and two.cv and one.cv < two.cv for one, two in pairs)
    assert any((one.value or 0) < (two.value or 0) for one, two in pairs)


def test_8_x_96_gb_is_refused_for_fp8_and_8_x_141_gb_is_not() -> None:
    entry = KNOWN.profile("h20-141gb-glm-5.1-fp8-sglang-0.5.10-tuned")
    assert of_profile("h20-141gb-glm-5.1-fp8-sglang-0.5.10-tuned", "h20-141gb").hosts[0].fits[0].fits
    with pytest.raises(UsageError, match=r"is for h20-141gb, not h20-96gb"):
        of_profile("h20-141gb-glm-5.1-fp8-sglang-0.5.10-tuned", "h20-96gb")
    assert entry.platforms == ("h20-141gb",)


def test_experts_read_for_a_token_are_as_the_second_source_computes() -> None:
    model = KNOWN.model("glm-5.2-fp8")
    share = model.shape.active_experts / model.shape.experts
    assert abs(model.weights.routed_experts_gib * share - 21.38) < 0.02
    assert model.mtp
    assert (model.mtp.layer, model.mtp.tensors) == (78, 1569)
