"""The page of all known causes (docs/failures.md), made of catalog/failures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from bringup import ROOT, failures

PAGE = ROOT / "docs" / "failures.md"

_HEAD = """# Known failures

What `invoke diagnose` knows, one cause a section, from the metal up. This page is made of `catalog/failures/`
by `python -m bringup.failuredocs`; change the files there. How the rules work: [diagnose.md](diagnose.md).
"""


def page(causes: Mapping[str, failures.Failure]) -> str:
    """The whole page, in Markdown."""
    return "\n".join(_lines(causes)) + "\n"


def _lines(causes: Mapping[str, failures.Failure]) -> Iterator[str]:
    yield _HEAD
    for area in failures.AREAS:
        members = {cause: failure for cause, failure in causes.items() if failure.area == area}
        yield f"- [{area}](#{area}): " + ", ".join(f"[{cause}](#{cause})" for cause in members)
    for area in failures.AREAS:
        yield f"\n## {area}"
        for cause, failure in causes.items():
            if failure.area == area:
                yield from _section(cause, failure)


def _section(cause: str, failure: failures.Failure) -> Iterator[str]:
    yield f"\n### {cause}\n\n{failure.title} ({failure.severity}, {failure.kind}).\n"
    yield "```text"
    yield from failure.samples[0].splitlines()
    yield "```\n"
    yield f"- Means: {failure.meaning}"
    yield f"- Check: {failure.check}"
    yield f"- Do: {failure.remedy}"
    if failure.runbook:
        yield f"- Runbook: `{failure.runbook}`"
    if failure.preflight:
        yield f"- Found before a start by preflight: `{failure.preflight}`"
    if failure.explains:
        yield "- Explains: " + ", ".join(f"[{other}](#{other})" for other in failure.explains)
    yield "- Sources: " + ", ".join(f"<{source}>" for source in failure.sources)


def write(path: Path = PAGE) -> Path:
    """Write the page of the catalog's causes; returns its path."""
    path.write_text(page(failures.load()), encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write())
