"""What we want of a host: the few variables that an inventory sets. Everything else follows from the
catalog."""

# ruff: noqa: RUF012 (pydantic copies a default for each instance)
from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from bringup import ROOT
from bringup.catalog import ChangeWindow, DraftingWish, FlagValue, Positive, RestartWish, Word
from bringup.entries import Entry
from bringup.errors import Problem, did_you_mean
from bringup.yamlfile import Vaulted, read_yaml

PASSED_THROUGH = ("ansible_", "vault_")
"""Beginnings of variables that are Ansible's or secrets: no plan reads them."""


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise ValueError(f'"{text}" is no IP address; a name can mean another address tomorrow') from None


def _folder(text: str) -> str:
    if not re.fullmatch(r"/[^\s\0%$\"'\\]+", text) or ".." in Path(text).parts:
        raise ValueError(f'"{text}" is no absolute path without spaces, quotes and dots')
    return text.rstrip("/") or text


ServiceName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,31}$")]
"""Ends up in the names of units, users' folders and log files."""
UserName = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_-]{0,30}$")]
Address = Annotated[str, AfterValidator(_address)]
Folder = Annotated[str, AfterValidator(_folder)]
VaultName = Annotated[str, Field(pattern=r"^vault_[a-z0-9_]+$")]
SettingName = Annotated[str, Field(pattern=r"^(/sys/|[a-z0-9_]+[./])[\w.*/-]+$")]
"""A kernel value (vm.swappiness) or a file under /sys."""
Port = Annotated[int, Field(ge=1, le=65535)]


class LogWish(Entry):
    """How logs are cut, and how much is logged; what is not given comes from the level above (see
    planned.LogRotation)."""

    size_mib: Positive | None = None
    age_hours: Positive | None = None
    keep: PositiveInt | None = None
    mode: Literal["file", "journal"] | None = None
    level: Literal["debug", "info", "warning", "error"] | None = None
    lines_per_s: Annotated[int, Field(ge=0)] | None = None


class ServiceIntent(Entry):
    """One server: its name, its profile and its port; the rest has defaults."""

    name: ServiceName
    profile: str
    port: Port
    bind: Address = "127.0.0.1"
    served_name: Annotated[str, Field(pattern=r"^[\w.:/@+-]{1,128}$")] | None = None
    api_key: VaultName | None = None
    gpus: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    flags: dict[str, FlagValue] = {}
    environment: dict[str, Word] = {}
    restart: RestartWish = RestartWish()
    drafting: DraftingWish = DraftingWish()
    logs: LogWish = LogWish()
    user: UserName | None = None


LOCATORS = {
    "http": (r"https?://\S+", "an address, with http:// or https:// before it"),
    "node": (r"https?://\S+", "an address, with http:// or https:// before it"),
    "path": (r"/.*", "a path from the root on"),
    "controller": (r".*\S.*", "a folder"),
    "huggingface": (r"[^\s@]+(@\S+)?", "OWNER/NAME@REVISION"),
    "modelscope": (r"[^\s@]+(@\S+)?", "OWNER/NAME@REVISION"),
}
"""What the locator of a source of each kind looks like."""


class Source(Entry):
    """A place that models are fetched from before the hubs: `locator` may hold `{name}`, `{repository}`,
    `{revision}`."""

    kind: Literal["huggingface", "modelscope", "http", "path", "node", "controller"]
    locator: str

    @model_validator(mode="after")
    def _fits(self) -> Source:
        pattern, words = LOCATORS[self.kind]
        if not re.fullmatch(pattern, self.locator):
            raise ValueError(f'"{self.locator}" is no locator for {self.kind}: it is {words}')
        return self


class Repository(Entry):
    """A repository of packages: `uri`, `suite` (such as "./" or "noble"), `components`, and the path in this
    checkout of the key that signs it."""

    uri: Annotated[str, Field(pattern=r"^(https?|file|cdrom):\S+$")]
    suite: Annotated[str, Field(pattern=r"^\S+$")]
    components: tuple[Annotated[str, Field(pattern=r"^[\w.-]+$")], ...] = ()
    key: Annotated[str, Field(pattern=r"^[\w./-]+\.asc$")]


class DriverWish(Entry):
    """The GPU driver. Without `version` a driver that the platform can use stays as it is. Packages come from
    a `repository`, a folder of packages on the node (`archive`), or what the node's package manager knows.

    `clocks_mhz` (lowest, highest of the cores) and `power_w` (a GPU) are set at each boot; `manage` false:
    nothing is done.
    """

    version: Annotated[str, Field(pattern=r"^\d{3}(\.\d+){0,2}$")] | None = None
    archive: Folder | None = None
    repository: Repository | None = None
    modules: Literal["dkms", "prebuilt"] = "dkms"
    clocks_mhz: tuple[PositiveInt, PositiveInt] | None = None
    power_w: PositiveInt | None = None
    manage: bool = True


class Intent(Entry):
    """All intent of one host."""

    node_platform: str
    node_services: tuple[ServiceIntent, ...] = ()
    node_model_folder: Folder = "/srv/models"
    node_model_sources: tuple[Source, ...] = ()
    node_download_hours: tuple[ChangeWindow, ...] = ()
    node_rack: Annotated[str, Field(min_length=1)] | None = None
    node_change_windows: tuple[ChangeWindow, ...] = ()
    node_user: UserName = "bringup"
    node_log_rotation: LogWish = LogWish()
    node_quiet_hours: RestartWish = RestartWish()
    node_sysctl: bool = True
    node_settings: dict[SettingName, Word | None] = {}
    node_driver: DriverWish = DriverWish()


def of_variables(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a host's variables that is intent."""
    return {name: value for name, value in variables.items() if name in Intent.model_fields}


def strangers(variables: Mapping[str, Any], where: str) -> list[Problem]:
    """Variables that nobody reads: neither intent, nor Ansible's, nor a secret, nor declared by a role.

    Ansible ignores a misspelt variable without a word, so each is a problem here.
    """
    odd = [
        name for name in variables if name not in Intent.model_fields and not name.startswith(PASSED_THROUGH)
    ]
    if not odd:
        return []
    declared = role_options()
    known = [*Intent.model_fields, *declared]
    return [
        Problem(f"{where}: {name}", "no role and no plan reads this variable", did_you_mean(name, known))
        for name in odd
        if name not in declared
    ]


@cache
def role_options(roles: Path = ROOT / "roles") -> tuple[str, ...]:
    """Every option that a role declares."""
    found: list[str] = []
    for path in sorted(roles.glob("*/meta/argument_specs.yml")):
        specs = read_yaml(path).get("argument_specs", {})
        for spec in specs.values():
            found += spec.get("options", {})
    return tuple(found)


def closed(value: Any, where: str) -> Iterator[Problem]:
    """Problems for what a plan cannot read: values of the vault, and templates."""
    if isinstance(value, Vaulted):
        yield Problem(where, "is encrypted, and the plan must read it", "Name a vault_ variable instead.")
    elif isinstance(value, str) and ("{{" in value or "{%" in value):
        yield Problem(where, "is a template, and the plan reads plain values", "Write the value.")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from closed(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from closed(inner, f"{where}.{index}")
