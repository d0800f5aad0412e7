"""Intent and catalog in, plan out: what follows, and every mistake at once before any node is touched."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from bringup import ROOT, catalog, plan
from bringup.errors import UsageError
from bringup.inventory import Host, Inventory
from bringup.planned import ApiKey, Plan, Service
from bringup.rolevars import model_store

WORDS = {"name": "words", "profile": "cpu-words-llama-server", "port": 8000}
GLM = {"name": "glm", "profile": "h200-8x-glm-5.2-w4a16-mtp-vllm", "port": 8000}
TUNED = {"name": "glm", "profile": "h20-141gb-glm-5.1-fp8-sglang-0.5.10-tuned", "port": 8000}
KNOWN = catalog.lazy()


def site(*services: dict[str, Any], platform: str = "cpu", hosts: int = 1, **keys: Any) -> Inventory:
    variables = {"node_platform": platform, "node_services": list(services), **keys}
    named = tuple(Host(f"node-{number:02}", ("all",), variables) for number in range(1, hosts + 1))
    return Inventory("site", Path("site"), named)


def resolved(*services: dict[str, Any], **keys: Any) -> Plan:
    return plan.resolve(site(*services, **keys), KNOWN)


def first(*services: dict[str, Any], **keys: Any) -> Service:
    return resolved(*services, **keys).hosts[0].services[0]


def refused(*services: dict[str, Any], **keys: Any) -> str:
    with pytest.raises(UsageError) as error:
        resolved(*services, **keys)
    return str(error.value)


# --- what follows ------------------------------------------------------------------------------------------


def test_a_service_is_resolved_to_its_last_word() -> None:
    service = first(WORDS)
    prefix = plan.ENVIRONMENTS + "/llama-server-"
    assert service.argv[0].startswith(prefix)
    assert service.argv[0].endswith("/bin/python")
    assert service.argv[1:] == tuple(
        "/opt/bringup/lib/llama_serve.py --model /srv/models/words/words.gguf --alias words --host 127.0.0.1 "
        "--port 8000 --metrics --ctx-size 65536 --parallel 4 --threads 1 --predict 64".split()
    )
    assert service.context_tokens == 16384
    assert service.environment["HOME"] == "/var/cache/bringup/words"


def test_flags_of_the_service_win_over_the_profile_and_false_takes_one_out() -> None:
    service = first({**WORDS, "flags": {"--parallel": 2, "--predict": False}})
    assert "--predict" not in service.argv
    assert service.argv[service.argv.index("--parallel") + 1] == "2"


def test_json_and_lists_become_words() -> None:
    words = plan.words_of({"--a": {"b": 1}, "--c": [1, True, "x y"], "--d": True, "--e": False, "--f": 0.5})
    assert words == ["--a", '{"b":1}', "--c", "1", "true", "x y", "--d", "--f", "0.5"]


def test_a_draft_is_brought_to_the_node_and_named_in_the_command() -> None:
    service = {"name": "glm", "profile": "h20-141gb-glm-5.2-fp8-vllm", "port": 8000}
    host = resolved(service, platform="h20-141gb").hosts[0]
    assert [model.name for model in host.models] == ["glm-5.2-fp8", "glm-5.2-dspark"]
    assert any('"model":"/srv/models/glm-5.2-dspark"' in word for word in host.services[0].argv)


def test_services_get_the_first_free_gpus() -> None:
    two = resolved(GLM, {**GLM, "name": "second", "port": 8001}, platform="h200-8x").hosts[0].services
    assert [service.gpus for service in two] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert two[1].environment["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"


def test_a_service_on_all_gpus_sees_them_in_the_engines_own_order() -> None:
    service = first(TUNED, platform="h20-141gb")
    assert service.gpus == tuple(range(8))
    assert "CUDA_VISIBLE_DEVICES" not in service.environment


def test_each_rank_is_bound_to_the_grace_of_its_gpu() -> None:
    service = {"name": "glm", "profile": "gh200-2x-glm-5.2-awq-int4-vllm", "port": 8000}
    made = first(service, platform="gh200-2x")
    assert made.placement.per_rank == (("0-71", "0"), ("72-143", "1"))
    at = made.argv.index("--numa-bind-nodes")
    assert made.argv[at + 1 : at + 3] == ("0", "1")


def test_a_cpu_server_is_bound_to_one_node() -> None:
    service = {"name": "planner", "profile": "gh200-2x-glm-5.2-ud-iq2-xxs-llama-server", "port": 8001}
    made = first(service, platform="gh200-2x")
    assert (made.placement.cpus, made.placement.memory_nodes) == ("72-143", "1")
    assert made.gpus == ()
    assert made.environment["CUDA_VISIBLE_DEVICES"] == ""


def test_the_engine_raises_the_least_driver_that_will_do() -> None:
    old = resolved(TUNED, platform="h20-141gb").hosts[0].expected["driver"]["minimum"]
    new = {"name": "glm", "profile": "h20-141gb-glm-5.1-fp8-sglang", "port": 8000}
    assert old == "535.161.07"
    assert resolved(new, platform="h20-141gb").hosts[0].expected["driver"]["minimum"] == "580.65.06"


def test_quiet_hours_hold_for_all_and_a_service_may_differ() -> None:
    night = {"calendar": "*-*-* 02:00:00", "spread_s": 60}
    second = {**WORDS, "name": "b", "port": 8001, "restart": {"drain_s": 5}}
    one, two = resolved(WORDS, second, node_quiet_hours=night).hosts[0].services
    assert (one.restart.calendar, one.restart.spread_s, one.restart.drain_s) == ("*-*-* 02:00:00", 60, 120)
    assert (two.restart.calendar, two.restart.drain_s) == ("*-*-* 02:00:00", 5)


def test_logs_are_cut_as_the_service_says_else_the_node_else_the_default() -> None:
    made = first({**WORDS, "logs": {"keep": 3}}, node_log_rotation={"size_mib": 1, "keep": 9}).logs
    assert (made.size_bytes, made.age_s, made.keep) == (2**20, 86_400, 3)


def test_an_engine_is_told_how_much_to_log_in_its_own_words() -> None:
    words = first({**WORDS, "logs": {"level": "warning"}})
    assert words.argv[words.argv.index("--verbosity") + 1] == "2"
    own = first({**WORDS, "logs": {"level": "warning"}, "flags": {"--verbosity": 5}})
    assert own.argv[own.argv.index("--verbosity") + 1] == "5", "a flag that the service sets wins"
    old = first({"name": "glm", "profile": "h20-141gb-glm-5.2-fp8-vllm", "port": 8000}, platform="h20-141gb")
    assert not any("LOG" in name and "LEVEL" in name for name in old.environment)
    tuned = first({**TUNED, "logs": {"level": "error", "lines_per_s": 200}}, platform="h20-141gb")
    assert tuned.argv[tuned.argv.index("--log-level") + 1] == "error"
    assert tuned.logs.lines_per_s == 200


def test_hours_and_signs_of_drift_come_key_by_key() -> None:
    service = first(
        {**WORDS, "restart": {"drift": {"memory_ratio": 1.5}, "never": ["Mon..Fri 08:00-20:00"]}},
        node_quiet_hours={"hours": ["01:00-05:00"], "calendar": "02:00", "hours_wait_s": 3600},
    )
    assert service.restart.hours == ("01:00-05:00",)
    assert service.restart.never == ("Mon..Fri 08:00-20:00",)
    assert (service.restart.calendar, service.restart.hours_wait_s) == ("02:00", 3600)
    assert (service.restart.drift.memory_ratio, service.restart.drift.for_s) == (1.5, 600)
    assert not first(WORDS).restart.drift.watched


def test_two_services_share_a_node_and_no_gpu_port_cpu_or_user_folder_of_it() -> None:
    """GH200: one model on both GPUs, and a planner on the CPU of one Grace."""
    host = resolved(
        {"name": "glm", "profile": "gh200-2x-glm-5.2-awq-int4-fp8-mtp-vllm", "port": 8000},
        {"name": "planner", "profile": "gh200-2x-glm-5.2-ud-iq2-xxs-llama-server", "port": 8001},
        platform="gh200-2x",
    ).hosts[0]
    glm, planner = host.services
    assert (glm.gpus, planner.gpus) == ((0, 1), ())
    assert (glm.port, planner.port) == (8000, 8001)
    assert planner.placement.memory_nodes, "the planner stays on one Grace"
    assert planner.placement.cpus
    assert glm.unit != planner.unit
    assert set(glm.writable).isdisjoint(planner.writable)


def test_services_that_do_not_fit_into_a_memory_node_together_are_refused() -> None:
    planner = {"name": "planner", "profile": "gh200-2x-glm-5.2-ud-iq2-xxs-llama-server", "port": 8001}
    fits = resolved(planner, platform="gh200-2x").hosts[0].fits[0]
    assert fits.fits, "one alone has room"
    said = refused(planner, {**planner, "name": "second", "port": 8002}, platform="gh200-2x")
    assert "GiB of planner and" in said
    assert "do not fit together into the 447 GiB of memory node 1" in said


def test_a_key_opens_the_address_and_never_reaches_the_command_line() -> None:
    service = first({**WORDS, "bind": "0.0.0.0", "api_key": "vault_words"})
    assert service.api_key == ApiKey("vault_words", "file_flag", "--api-key-file")
    assert not any("vault" in word or "api-key" in word for word in service.argv)


def test_nasty_values_arrive_as_they_are() -> None:
    nasty = '100% $HOME "quoted" \u00fc'
    service = first({**WORDS, "environment": {"NOTE": nasty}})
    assert service.environment["NOTE"] == nasty


def test_equal_hosts_have_equal_plans_and_the_digest_sees_every_change() -> None:
    base = resolved(WORDS, hosts=3)
    assert [host.name for host in base.hosts] == ["node-01", "node-02", "node-03"]
    assert base.hosts[0].services == base.hosts[2].services
    assert base.digest == resolved(WORDS, hosts=3).digest
    assert base.digest != resolved({**WORDS, "port": 8001}, hosts=3).digest
    assert base.digest != resolved(WORDS, hosts=2).digest


def test_a_model_without_a_lock_previews_and_says_what_makes_one() -> None:
    made = resolved(TUNED, platform="h20-141gb")
    assert [str(problem) for problem in plan.unprovisionable(made)] == [
        "model glm-5.1-fp8: no lock yet: this previews, and does not provision. "
        "Make it: invoke models.lock --model glm-5.1-fp8"
    ]
    assert plan.unprovisionable(resolved(WORDS)) == []


def test_a_sites_own_source_comes_first() -> None:
    own = [{"kind": "http", "locator": "https://models.example/{repository}/{revision}"}]
    model = resolved(TUNED, platform="h20-141gb", node_model_sources=own).hosts[0].models[0]
    assert [(source.kind, source.locator) for source in model.sources] == [
        ("http", "https://models.example/zai-org/GLM-5.1-FP8/main"),
        ("huggingface", "zai-org/GLM-5.1-FP8@main"),
        ("modelscope", "ZhipuAI/GLM-5.1-FP8@master"),
    ]


def test_the_files_of_a_model_with_mtp_must_hold_its_tensors() -> None:
    model = resolved(TUNED, platform="h20-141gb").hosts[0].models[0]
    assert model.expects["architecture"] == "GlmMoeDsaForCausalLM"
    assert model.expects["tensors"] == {"model.layers.78.": 1569}


def test_a_grafted_model_comes_after_the_two_that_it_is_made_of() -> None:
    service = {"name": "glm", "profile": "gh200-2x-glm-5.2-awq-int4-fp8-mtp-vllm", "port": 8000}
    made = resolved(service, platform="gh200-2x")
    base, delta, whole = made.hosts[0].models
    assert [base.name, delta.name, whole.name] == [
        "glm-5.2-awq-int4",
        "glm-5.2-awq-int4-fp8-mtp-delta",
        "glm-5.2-awq-int4-fp8-mtp",
    ]
    assert whole.graft is not None
    assert (whole.graft.base, whole.graft.delta, whole.graft.layer) == (base.name, delta.name, 78)
    assert (whole.files, whole.sources, whole.size) == ((), (), 0)
    assert delta.sources[0].locator == "dnhkng/GLM-5.2-AWQ-INT4-FP8-MTP-delta@main"
    assert delta.size < base.size / 10
    lacking = {problem.where: problem.remedy for problem in plan.unprovisionable(made)}
    assert lacking[f"model {delta.name}"] == f"Make it: invoke models.lock --model {whole.name}"
    assert f"model {whole.name}" not in lacking
    row = model_store.variables(made.hosts[0], made)["model_store_models"][-1]
    assert (row["graft"]["base"]["folder"], row["graft"]["tensors"]) == (base.folder, 1569)
    assert row["chain"] == []
    assert row["graft"]["engines"] == [made.hosts[0].environments[0].prefix]
    assert list(row["graft"]["words"].values()) == ["mtp_quantization_config"]


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("services", "keys", "said"),
    [
        (
            [{**WORDS, "profile": "cpu-word-llama-server"}],
            {},
            'unknown profile "cpu-word-llama-server". Did you mean',
        ),
        ([WORDS], {"node_platform": "cpus"}, 'unknown platform "cpus". Did you mean "cpu"?'),
        ([WORDS, {**WORDS, "name": "b"}], {}, "b wants port 8000, which words has"),
        ([WORDS, {**WORDS, "port": 8001}], {}, '"words" is the name of another service already'),
        ([{**WORDS, "port": 7766}], {}, "which bringup itself (scheduled restarts) has"),
        ([{**WORDS, "bind": "0.0.0.0"}], {}, "for everybody, without an API key"),
        ([{**WORDS, "bind": "::"}], {}, "for everybody, without an API key"),
        ([TUNED], {"node_platform": "h20-96gb"}, "is for h20-141gb, not h20-96gb"),
        (
            [GLM, {**GLM, "name": "b", "port": 1, "gpus": [3, 4, 5, 6]}],
            {"node_platform": "h200-8x"},
            "GPU 3 belongs to service glm already",
        ),
        (
            [{**GLM, "gpus": [0, 1, 2, 8]}],
            {"node_platform": "h200-8x"},
            "there is no GPU 8: the platform has 8",
        ),
        ([{**GLM, "gpus": [0, 0, 1, 2]}], {"node_platform": "h200-8x"}, "names a GPU twice"),
        (
            [{**GLM, "name": f"s{n}", "port": 8000 + n} for n in range(3)],
            {"node_platform": "h200-8x"},
            "belongs to service s0 already",
        ),
        ([{**WORDS, "flags": {"--port": 1}}], {}, "--port: is not set here: it is the service's port"),
        ([{**WORDS, "flags": {"--api-key-file": "/k"}}], {}, "never on a command line"),
        (
            [{**TUNED, "flags": {"--trust-remote-code": True}}],
            {"node_platform": "h20-141gb"},
            "it is the model's decision",
        ),
        (
            [{**TUNED, "flags": {"--kv-cache-dtype": "fp8_e5m2"}}],
            {"node_platform": "h20-141gb"},
            "--kv-cache-dtype",
        ),
        (
            [{**TUNED, "flags": {"--enable-auto-tool-choice": True}}],
            {"node_platform": "h20-141gb"},
            "--enable-auto-tool-choice",
        ),
        ([{**TUNED, "flags": {"--speculative-eagle-topk": False}}], {"node_platform": "h20-141gb"}, "topk"),
        (
            [
                {
                    **TUNED,
                    "profile": "h20-141gb-glm-5.1-fp8-sglang",
                    "flags": {"--enable-single-batch-overlap": True},
                }
            ],
            {"node_platform": "h20-141gb"},
            "--enable-single-batch-overlap",
        ),
        (
            [
                {
                    **TUNED,
                    "profile": "h20-141gb-glm-5.1-fp8-sglang",
                    "flags": {"--fp8-gemm-backend": "cutlass"},
                }
            ],
            {"node_platform": "h20-141gb"},
            "cutlass",
        ),
        ([WORDS], {"node_servces": []}, 'Did you mean "node_services"?'),
        ([{**WORDS, "profile": "{{ it }}"}], {}, "is a template, and the plan reads plain values"),
    ],
)
def test_a_mistake_in_intent_is_refused(
    services: list[dict[str, Any]], keys: dict[str, Any], said: str
) -> None:
    variables = {"node_platform": "cpu", "node_services": services, **keys}
    with pytest.raises(UsageError) as error:
        plan.resolve(Inventory("site", Path("site"), (Host("node-01", (), variables),)), KNOWN)
    assert said in str(error.value)


def test_every_mistake_of_every_host_comes_at_once() -> None:
    wrong = {"node_platform": "cpu", "node_services": [{**WORDS, "profile": "nothing", "port": 7766}]}
    worse = {"node_platform": "h200", "node_services": [GLM, {**GLM, "bind": "0.0.0.0"}]}
    hosts = (Host("a", (), wrong), Host("b", (), worse))
    with pytest.raises(UsageError) as error:
        plan.resolve(Inventory("site", Path("site"), hosts), KNOWN)
    text = str(error.value)
    said = ("unknown profile", "port 7766", "unknown platform", "without an API key", "the name of another")
    assert all(word in text for word in said)
    assert "site (a)" in text
    assert "site (b)" in text


def test_what_is_too_big_is_refused_with_what_would_do() -> None:
    flags = {"--cpu-offload-gb": 100}
    service = {"name": "glm", "profile": "gh200-2x-glm-5.2-fp8-vllm", "port": 8000, "flags": flags}
    text = refused(service, platform="gh200-2x")
    assert "service glm" in text
    assert "GiB" in text
    assert "h200-8x" in text


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "a variable contains itself" in refused(WORDS, something=loop)


# --- adding ------------------------------------------------------------------------------------------------


def test_a_new_platform_model_and_profile_are_three_new_files(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "catalog", tmp_path / "catalog")
    shutil.copytree(ROOT / "bringup" / "node", tmp_path / "bringup" / "node")
    new = tmp_path / "catalog"
    platform = yaml.safe_load((new / "platforms" / "h200-1x.yml").read_text())
    platform["title"], platform["gpus"]["count"] = "Four H200", 4
    model = yaml.safe_load((new / "models" / "glm-5.2-w4a16-mtp.yml").read_text())
    model["title"], model["hub"] = "Another", {"huggingface": "example/another"}
    profile = {
        "title": "Another on four H200",
        "platforms": ["h200-4x"],
        "model": "another",
        "engine": "vllm-0.33.0",
        "flags": {"--tensor-parallel-size": 4, "--max-model-len": 32768},
        "unmeasured": "new",
    }
    added = {"platforms/h200-4x": platform, "models/another": model, "profiles/h200-4x-another-vllm": profile}
    for name, entry in added.items():
        (new / f"{name}.yml").write_text(yaml.safe_dump(entry))
    known = catalog.load(new)
    service = {"name": "new", "profile": "h200-4x-another-vllm", "port": 8000}
    made = plan.resolve(site(service, platform="h200-4x"), known)
    assert made.hosts[0].services[0].gpus == (0, 1, 2, 3)
    assert made.hosts[0].fits[0].fits
