"""The memory arithmetic reproduces what was measured, and reads the headers of weight files."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bringup import catalog, fit
from bringup.entries import build
from bringup.errors import UsageError
from bringup.planned import Finding, Fit
from bringup.yamlfile import read_yaml

CASES = Path(__file__).parents[1] / "cases" / "fit"
FACTS = read_yaml(CASES / "facts.yml")
RATES = ("hbm", "host", "host_local", "host_remote", "peer")
NAMES = sorted(path.stem for path in CASES.glob("*.yml") if path.stem != "facts")


def in_bytes(values: dict[str, Any]) -> dict[str, Any]:
    """Facts with `_gib` and `_gb` turned into bytes."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        for unit, factor in (("_gib", fit.GIB), ("_gb", fit.GB)):
            if key.endswith(unit):
                key, value = key.removesuffix(unit), _times(value, factor)
        result[key] = value
    return result


def _times(value: Any, factor: int) -> Any:
    return tuple(item * factor for item in value) if isinstance(value, list) else value * factor


def model(name: str) -> fit.ModelFacts:
    facts = dict(FACTS["models"][name])
    below = FACTS["models"].get(facts.pop("like", ""), {})
    return fit.ModelFacts(name=name, **in_bytes({**below, **facts}))


def platform(name: str) -> fit.PlatformFacts:
    facts = in_bytes(FACTS["platforms"][name])
    rates = {path: facts.pop(path) * fit.GB for path in RATES if path in facts}
    return fit.PlatformFacts(name=name, bandwidth=rates, **facts)


def bounds(wanted: dict[str, float]) -> tuple[float, float]:
    if "value" in wanted:
        return wanted["value"] - wanted["within"], wanted["value"] + wanted["within"]
    return wanted["low"], wanted["high"]


def measures(name: str, case: dict[str, Any]) -> dict[str, Any]:
    facts, machine = model(case["model"]), platform(case["platform"])
    serving = fit.ServingFacts(**in_bytes(case["serving"]))
    sizing = fit.size(facts, machine, serving)
    others = [platform(other) for other in FACTS["platforms"]]
    found = fit.findings(name, facts, machine, serving, others, measured=case.get("measured", False))
    return {
        "fits": sizing.fits,
        "tokens": sizing.tokens,
        "kv_gib": sizing.kv / fit.GIB,
        "kv_bytes_a_token": sizing.kv_per_token,
        "headroom_gib": sizing.headroom / fit.GIB,
        "needed_gib_all": sizing.needed * max(serving.gpus, 1) / fit.GIB,
        "stream_gib": fit.expert_stream(facts) / fit.GIB,
        "findings": sorted(finding.code for finding in found),
        "instead": " ".join(finding.instead for finding in found),
        "estimates": fit.decode_estimates(facts, machine, serving),
        "page": serving.page,
    }


@pytest.mark.parametrize("name", NAMES)
def test_the_arithmetic_agrees_with_what_is_known(name: str) -> None:
    case = read_yaml(CASES / f"{name}.yml")
    got, expected = measures(name, case), dict(case["expect"])
    pool = expected.pop("tokens_in_gib", None)
    if pool:
        pages = pool["gib"] * fit.GIB // (got["kv_bytes_a_token"] * got["page"])
        assert pages * got["page"] == pool["tokens"]
    for label, wanted in expected.pop("estimates", {}).items():
        low, high = bounds(wanted)
        assert low <= got["estimates"][label] <= high, label
    for key, wanted in expected.items():
        if isinstance(wanted, dict):
            low, high = bounds(wanted)
            assert low <= got[key] <= high, (key, got[key])
        elif isinstance(wanted, str):
            assert wanted in got[key]
        else:
            assert got[key] == wanted, key


def test_there_is_a_case_for_every_verdict() -> None:
    codes = {code for name in NAMES for code in read_yaml(CASES / f"{name}.yml")["expect"]["findings"]}
    assert codes == {"FIT_TOO_BIG", "FIT_THIN", "FIT_CLOSE", "FIT_NO_HOST_MEMORY"}


def test_a_refusal_names_both_sums_and_what_would_do() -> None:
    serving = fit.ServingFacts("sglang", gpus=8, tp=8, fraction=0.88)
    machine, bigger = platform("h20-96gb"), platform("h20-141gb")
    finding = fit.findings("h20-01", model("glm-5.1-fp8"), machine, serving, [machine, bigger])[0]
    assert finding.what.startswith("needs ")
    assert "this node has 8 x 95.6 = 765" in finding.what
    assert "GiB usable - " in finding.reason
    assert finding.instead.startswith("Use h20-141gb nodes")


def test_a_context_longer_than_the_pool_is_said_before_a_user_finds_out() -> None:
    serving = fit.ServingFacts("sglang", gpus=8, tp=8, fraction=0.70)
    found = fit.findings("h20", model("glm-5.1-fp8"), platform("h20-141gb"), serving)
    assert [finding.code for finding in found] == ["FIT_CONTEXT_CUT"]
    assert "202,752" in found[0].what


def test_more_offload_never_leaves_less_room_for_tokens() -> None:
    serving = fit.ServingFacts("vllm", gpus=2, tp=2, max_context=4096)
    pools = [
        fit.size(model("glm-5.2-fp8"), platform("gh200-2x"), replace(serving, offload=gib * fit.GIB)).tokens
        for gib in range(0, 420, 20)
    ]
    assert pools == sorted(pools)
    assert pools[-1] == pools[-2], "all experts are in host memory from some point on"


@pytest.mark.parametrize(("every", "offset", "layers"), [(1, 3, 78), (4, 3, 21), (4, 1, 20)])
def test_layers_that_share_an_index_keep_none(every: int, offset: int, layers: int) -> None:
    assert fit.index_layers(78, every, offset) == layers


def test_an_eight_bit_latent_row_holds_its_scales_and_a_wide_rope_part() -> None:
    facts = replace(model("glm-5.2-fp8"), layers=1, index_layers=0)
    assert fit.kv_bytes_a_token(facts, "fp8_ds_mla") == 512 + 16 + 128
    assert fit.kv_bytes_a_token(facts, "bf16") == 1152


def test_plain_attention_divides_its_heads_over_the_ranks() -> None:
    facts = fit.ModelFacts("plain", weights=1, layers=32, kv_heads=8, head_dim=128)
    assert fit.kv_bytes_a_token(facts, "auto") == 32 * 2 * 8 * 128 * 2
    assert fit.kv_bytes_a_token(facts, "fp8", tp=4) == 32 * 2 * 2 * 128
    assert fit.kv_bytes_a_token(facts, "auto", tp=16) == 32 * 2 * 1 * 128 * 2, "a head is not divided"


# --- headers -----------------------------------------------------------------------------------------------

TENSORS = {
    "model.embed_tokens.weight": 64,
    "model.layers.0.mlp.experts.0.gate_proj.weight": 32,
    "model.layers.0.mlp.shared_experts.gate_proj.weight": 16,
    "model.layers.1.mlp.experts.0.gate_proj.weight": 32,
    "model.layers.1.eh_proj.weight": 8,
}


def write_safetensors(path: Path, tensors: dict[str, int]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, length in tensors.items():
        header[name] = {"dtype": "U8", "shape": [length], "data_offsets": [offset, offset + length]}
        offset += length
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


def write_model(folder: Path, *, files: int = 2) -> None:
    names = [f"model-{number}.safetensors" for number in range(files)]
    placed = {name: names[at % files] for at, name in enumerate(TENSORS)}
    for file in names:
        write_safetensors(folder / file, {n: TENSORS[n] for n, f in placed.items() if f == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 1}))


def test_headers_tell_experts_and_the_draft_layer_apart(tmp_path: Path) -> None:
    write_model(tmp_path)
    weights = fit.weights_from_headers(tmp_path)
    assert weights == fit.HeaderWeights(152, experts=32, mtp=40, mtp_experts=32, tensors=5, mtp_tensors=2)
    assert weights.applied(model("glm-5.2-fp8")).mtp == 40


def test_every_damaged_file_is_named_at_once(tmp_path: Path) -> None:
    write_model(tmp_path, files=3)
    whole = (tmp_path / "model-0.safetensors").read_bytes()
    (tmp_path / "model-0.safetensors").write_bytes(whole[:-1])
    (tmp_path / "model-1.safetensors").write_bytes(b"\xff" * 64)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(UsageError) as caught:
        fit.weights_from_headers(tmp_path)
    text = str(caught.value)
    assert "cut short within its tensors" in text
    assert "more than the format's" in text
    assert "named in the index and not there" in text


@pytest.mark.parametrize(
    "content",
    [b"", b"\x02\0\0\0\0\0\0\0[]", b"\x09\0\0\0\0\0\0\0{}", b'\x07\0\0\0\0\0\0\0{"a":1}'],
    ids=["empty", "list", "short", "no offsets"],
)
def test_a_file_that_is_no_safetensors_is_no_traceback(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match="not a whole safetensors file"):
        fit.weights_from_headers(tmp_path)


def test_an_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Download the model first"):
        fit.weights_from_headers(tmp_path)


# --- from the catalog --------------------------------------------------------------------------------------

GLM: dict[str, Any] = {
    "title": "GLM-5.1 FP8",
    "family": "glm",
    "licence": "mit",
    "hub": {"huggingface": "zai-org/GLM-5.1-FP8"},
    "format": "safetensors",
    "quantisation": "fp8",
    "weights": {"total_gib": 703.1, "routed_experts_gib": 684, "mtp_gib": 9.25},
    "shape": {
        "layers": 78,
        "hidden": 6144,
        "vocab": 154880,
        "heads": 64,
        "experts": 256,
        "active_experts": 8,
        "moe_intermediate": 2048,
        "kv_lora_rank": 512,
        "q_lora_rank": 2048,
        "qk_rope_dim": 64,
    },
    "context": 202752,
    "sparse_attention": {"kind": "dsa", "topk": 2048, "index_dim": 128},
    "mtp": {"layer": 78, "prefix": "model.layers.78.", "precision": "fp8"},
}


def machine(memory_gib: float, gpus: int = 8) -> catalog.Platform:
    numa = [{"node": 0, "cpus": "0-47", "memory_gib": 1000}, {"node": 1, "cpus": "48-95", "memory_gib": 1000}]
    entry = {
        "title": f"{gpus} x {memory_gib}",
        "arch": "x86_64",
        "gpus": {
            "count": gpus,
            "names": ["NVIDIA H20"],
            "memory_gib": memory_gib,
            "sm": "9.0",
            "hbm_gbps": 4000,
        },
        "host": {"sockets": 2, "cores_per_socket": 48, "memory_gib_per_socket": 1000, "numa": numa},
        "driver": {"minimum": "550"},
    }
    return build(catalog.Platform, entry, "platform")


def profile(engine: str, flags: dict[str, Any], **more: Any) -> catalog.Profile:
    entry = {
        "title": "a profile",
        "platforms": ["h20"],
        "model": "glm",
        "engine": engine,
        "flags": flags,
        "unmeasured": "a test",
        **more,
    }
    return build(catalog.Profile, entry, "profile")


SGLANG_FLAGS = {
    "--tp": 8,
    "--mem-fraction-static": 0.88,
    "--speculative-algorithm": "EAGLE",
    "--speculative-num-steps": 4,
}


def test_a_catalog_entry_gives_the_facts_of_the_cases() -> None:
    got = fit.facts_of_model(build(catalog.Model, GLM, "model"), "glm-5.1-fp8")
    wanted = model("glm-5.1-fp8")
    for name in ("weights", "experts", "mtp", "mtp_experts", "replicated"):
        assert getattr(got, name) == pytest.approx(getattr(wanted, name), rel=0.01), name
    for name in ("layers", "mtp_layers", "latent", "rope", "index_layers", "index_dim", "context"):
        assert getattr(got, name) == getattr(wanted, name), name


@pytest.mark.parametrize(("memory_gib", "fits"), [(95.6, False), (140.4, True)])
def test_a_plan_is_told_in_one_call(memory_gib: float, fits: bool) -> None:
    glm, plan = build(catalog.Model, GLM, "model"), profile("sglang-0.5.10.post1", SGLANG_FLAGS)
    others = {"h20-141gb": machine(140.4), "cpu": build(catalog.Platform, {"title": "c", "arch": "any"}, "c")}
    verdict, found = fit.of_service(
        glm,
        machine(memory_gib),
        plan,
        plan.flags,
        range(8),
        service="glm",
        where="h20-01: glm",
        others=others,
    )
    assert verdict.fits is fits
    assert verdict.service == "glm"
    assert [item.code for item in found] == ([] if fits else ["FIT_TOO_BIG"])
    if not fits:
        assert found[0].where == "h20-01: glm"
        assert "h20-141gb" in found[0].instead


@pytest.mark.parametrize(
    "flags",
    [
        {"--tensor-parallel-size": 8, "--speculative-config": {"method": "mtp", "num_speculative_tokens": 3}},
        {
            "--tensor-parallel-size": "8",
            "--speculative-config": '{"method":"mtp","num_speculative_tokens":3}',
        },
        {"--tensor-parallel-size": 8, "--speculative-config.num_speculative_tokens": 3},
        {"--tensor_parallel_size": 8, "--spec-method": "mtp", "--spec-tokens": 3},
    ],
)
def test_every_spelling_of_the_same_flags_is_the_same_server(flags: dict[str, Any]) -> None:
    glm = build(catalog.Model, GLM, "model")
    serving = fit.facts_of_serving(profile("vllm-0.33.0", {}), flags, range(8), glm)
    assert (serving.tp, serving.speculates, serving.uses_mtp, serving.fraction) == (8, 3, True, 0.92)


def test_an_engine_that_chooses_its_context_is_not_refused_for_the_longest_one() -> None:
    glm = build(catalog.Model, {**GLM, "context": 10_000_000}, "model")
    flags = {"--tensor-parallel-size": 8, "--max-model-len": "auto"}
    plan = profile("vllm-0.33.0", flags)
    assert fit.of_service(glm, machine(140.4), plan, flags, range(8))[0].fits is True
    assert fit.of_service(glm, machine(140.4), plan, {"--tp": 8}, range(8))[0].fits is False


def test_values_that_are_no_numbers_are_left_to_the_flag_checker() -> None:
    glm = build(catalog.Model, GLM, "model")
    flags = {"--tp": "eight", "--max-model-len": -1, "--cpu-offload-gb": [1], "--speculative-config": "{"}
    serving = fit.facts_of_serving(profile("vllm-0.33.0", {}), flags, range(8), glm)
    assert (serving.tp, serving.max_context, serving.offload) == (1, None, 0)


def test_a_cpu_server_is_held_against_the_node_it_is_bound_to() -> None:
    entry = {**GLM, "format": "gguf", "weights": {"total_gib": 1100}, "mtp": None, "sparse_attention": None}
    big = build(catalog.Model, entry, "model")
    both = profile("llama-server-1", {"--ctx-size": 4096})
    one = profile("llama-server-1", {"--ctx-size": 4096}, placement={"bind": "node", "node": 1})
    assert fit.of_service(big, machine(96), both, both.flags, ())[0].fits is True
    verdict, found = fit.of_service(big, machine(96), one, one.flags, ())
    assert verdict.fits is False
    assert "GiB of host memory, may use 1000" in found[0].what


def test_a_machine_of_unknown_memory_is_not_judged() -> None:
    plan = profile("llama-server-1", {})
    anything = build(catalog.Platform, {"title": "any CPU", "arch": "any"}, "platform")
    verdict, found = fit.of_service(build(catalog.Model, GLM, "model"), anything, plan, {}, ())
    assert verdict.fits is None
    assert found == []


# --- the catalog itself ------------------------------------------------------------------------------------

CATALOG = catalog.lazy()
MEASURED = [name for name in CATALOG.names("profiles") if CATALOG.profile(name).expectations]


def judged(name: str, platform: str) -> tuple[Fit, list[Finding]]:
    entry, machine = CATALOG.profile(name), CATALOG.platform(platform)
    count = machine.gpus.count if machine.gpus else 0
    gpus = range(count if entry.gpus is None else entry.gpus)
    others = {known: CATALOG.platform(known) for known in CATALOG.names("platforms")}
    return fit.of_service(
        CATALOG.model(entry.model),
        machine,
        entry,
        entry.flags,
        gpus,
        draft=CATALOG.model(entry.draft) if entry.draft else None,
        others=others,
    )


@pytest.mark.parametrize("name", MEASURED)
def test_what_has_been_measured_is_never_refused_nor_warned_about_by_the_sum(name: str) -> None:
    for platform in CATALOG.profile(name).platforms:
        verdict, found = judged(name, platform)
        assert verdict.fits is not False
        assert [item.code for item in found if item.severity != "note"] == []


def test_the_tuned_profile_on_the_smaller_gpus_is_refused_and_the_larger_ones_named() -> None:
    verdict, found = judged("h20-141gb-glm-5.1-fp8-sglang", "h20-96gb")
    assert verdict.fits is False
    assert found[0].code == "FIT_TOO_BIG"
    assert "h20-141gb" in found[0].instead
    assert "h100-8x" not in found[0].instead


def test_the_context_profile_comes_out_within_two_percent() -> None:
    verdict, _ = judged("gh200-2x-glm-5.2-awq-int4-fp8-mtp-vllm-context", "gh200-2x")
    assert dict(verdict.rows)["KV cache"] / fit.GIB == pytest.approx(32.42, rel=0.02)
