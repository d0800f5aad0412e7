"""Intent: few variables, each checked, and none that nobody reads."""

from __future__ import annotations

from typing import Any

import pytest

from bringup import intent
from bringup.entries import build
from bringup.errors import UsageError
from bringup.intent import Intent
from bringup.yamlfile import Vaulted

SERVICE = {"name": "glm", "profile": "p", "port": 8000}


def problems(**keys: Any) -> str:
    with pytest.raises(UsageError) as error:
        build(Intent, {"node_platform": "cpu", **keys}, "here")
    return str(error.value)


def test_a_name_a_profile_and_a_port_are_enough() -> None:
    made = build(Intent, {"node_platform": "cpu", "node_services": [SERVICE]}, "here")
    assert made.node_services[0].bind == "127.0.0.1"
    assert made.node_model_folder == "/srv/models"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"port": 0}, "node_services.0.port"),
        ({"port": 65536}, "node_services.0.port"),
        ({"port": "eight"}, "node_services.0.port"),
        ({"name": "GLM 5"}, "node_services.0.name"),
        ({"name": "a" * 33}, "node_services.0.name"),
        ({"bind": "eth0"}, '"eth0" is no IP address'),
        ({"bind": "localhost"}, '"localhost" is no IP address'),
        ({"api_key": "hunter2"}, "node_services.0.api_key"),
        ({"gpus": [-1]}, "node_services.0.gpus.0"),
        ({"served_name": "two words"}, "node_services.0.served_name"),
        ({"user": "Root"}, "node_services.0.user"),
        ({"environment": {"A": True}}, "write the text in quotes"),
        ({"restart": {"calender": "daily"}}, 'unknown key. Did you mean "calendar"?'),
        ({"restart": {"calendar": "daily\nUser=root"}}, "node_services.0.restart.calendar"),
        ({"logs": {"mode": "syslog"}}, "node_services.0.logs.mode"),
        ({"prot": 1}, 'node_services.0.prot: unknown key. Did you mean "port"?'),
    ],
)
def test_a_wrong_service_is_refused(keys: dict[str, Any], said: str) -> None:
    assert said in problems(node_services=[{**SERVICE, **keys}])


@pytest.mark.parametrize("folder", ["models", "/a b", "/a/../b", '/a"b', "/a$b", "/a%b", ""])
def test_a_folder_that_units_cannot_hold_is_refused(folder: str) -> None:
    assert "node_model_folder" in problems(node_model_folder=folder)


@pytest.mark.parametrize(
    ("kind", "locator", "said"),
    [
        ("http", "models.example/{name}", "https:// before it"),
        ("node", "10.0.0.5:7421", "https:// before it"),
        ("http", "https://models.example/a b", "https:// before it"),
        ("path", "models/{name}", "a path from the root on"),
        ("huggingface", "owner/a name", "OWNER/NAME@REVISION"),
        ("modelscope", "", "OWNER/NAME@REVISION"),
        ("controller", " ", "a folder"),
        ("torrent", "x", "node_model_sources.0.kind"),
    ],
)
def test_a_source_that_cannot_be_asked_is_refused(kind: str, locator: str, said: str) -> None:
    assert said in problems(node_model_sources=[{"kind": kind, "locator": locator}])


@pytest.mark.parametrize("name", ["swappiness", "/etc/passwd", "vm swappiness", ""])
def test_a_setting_that_is_none_of_the_kernels_is_refused(name: str) -> None:
    assert "node_settings" in problems(node_settings={name: 1})


@pytest.mark.parametrize("size", [0, -1, float("inf"), float("nan"), 1e300])
def test_a_size_that_cannot_be_is_refused(size: float) -> None:
    assert "node_log_rotation.size_mib" in problems(node_log_rotation={"size_mib": size})


def test_all_mistakes_come_at_once() -> None:
    found = problems(node_services=[{"name": "glm", "port": -1}], node_user="x y", node_servces=[])
    assert found.count("\n") == 3


def test_a_variable_that_nobody_reads_is_named_with_the_one_meant() -> None:
    names = {"node_servics": 1, "ansible_user": 1, "vault_key": 1, "node_user": 1, "preflight_lmit_s": 1}
    found = [str(problem) for problem in intent.strangers(names, "here")]
    assert len(found) == 2
    assert (
        'here: node_servics: no role and no plan reads this variable. Did you mean "node_services"?' in found
    )


def test_an_option_that_a_role_declares_may_be_set() -> None:
    options = intent.role_options()
    assert len(options) > 10
    assert intent.strangers(dict.fromkeys(options), "here") == []


def test_what_the_plan_cannot_read_is_refused() -> None:
    wish = [{"name": Vaulted("$ANSIBLE"), "profile": "{{ profile }}", "flags": {"--a": ["{% if x %}"]}}]
    found = [str(problem) for problem in intent.closed(wish, "node_services")]
    assert [line.split(": ")[0] for line in found] == [
        "node_services.0.name",
        "node_services.0.profile",
        "node_services.0.flags.--a.0",
    ]
