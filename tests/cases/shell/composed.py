"""A shell's text that is put together from several strings of one file."""

FIRST = "ls | head -1"  # early
WHOLE = """
ls | tail -1
ls | grep -q x  # early
"""


def shell(text: str) -> list[str]:
    return ["bash", "-c", f"set -eo pipefail; {text}"]
