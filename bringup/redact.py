"""Takes secrets out of text and data before either reaches a record, a report or a terminal.

Two rules: what a name says (a key such as `api_key`, `vault_x`, `password`), and what a value looks like
(well-known token prefixes, bearer headers, private key blocks, passwords inside addresses).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

_NAMES = (
    r"(?:passw(?:or)?d|passphrase|secret|credential|(?<![a-z])token"
    r"|api[_-]?key|private[_-]?key|access[_-]?key)"
)
_SECRET_NAME = re.compile(rf"(?:^vault_)|(?:{_NAMES}$)", re.IGNORECASE)
_ASSIGNED = re.compile(
    rf"""(?P<name>(?:\bvault_[\w-]*|[\w-]*{_NAMES})["']?\s*[:=]\s*)"""
    r"""(?:"[^"\n]*"|'[^'\n]*'|(?!\*\*\*)[^\s"',}\]]+)""",
    re.IGNORECASE,
)
_FLAG = re.compile(rf"(?P<name>--[\w-]*{_NAMES})(?P<gap>\s+)(?P<value>(?!-)\S+)", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(?:-----END \1-----|\Z)", re.DOTALL)
_ADDRESS_PASSWORD = re.compile(r"(://[^\s/:@]+:)[^\s/@]+@")
_LOOKS_SECRET = re.compile(
    r"""\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{12,}
    |eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)|(?<=Bearer\ )(?!\*\*\*)[^\s"',]+|(?<=Basic\ )[A-Za-z0-9+/=]{12,}""",
    re.VERBOSE,
)


def is_secret_name(name: str) -> bool:
    """Does a variable of this name hold a secret (`api_key`, `hf_token`, `vault_anything`)?"""
    return bool(_SECRET_NAME.search(name))


def text(value: str) -> str:
    """`value` with everything that is or looks like a secret replaced by `***`."""
    if len(value) < 6:
        return value
    value = _PRIVATE_KEY.sub(rf"-----BEGIN \1-----{HIDDEN}", value)
    value = _ADDRESS_PASSWORD.sub(rf"\g<1>{HIDDEN}@", value)
    value = _ASSIGNED.sub(rf"\g<name>{HIDDEN}", value)
    value = _FLAG.sub(rf"\g<name>\g<gap>{HIDDEN}", value)
    return _LOOKS_SECRET.sub(HIDDEN, value)


def data(value: Any, name: str = "") -> Any:
    """A copy of JSON-able data without secrets; `name` is the key under which `value` stood."""
    if isinstance(value, Mapping):
        return {str(key): data(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [data(item, name) for item in value]
    if name and is_secret_name(name) and isinstance(value, (str, int)) and value not in ("", True, False):
        return HIDDEN
    return text(value) if isinstance(value, str) else value
