"""How the hubs' own clients, and we around them, stand a hub that misbehaves: every way, for a while and for ever.

    .venv/bin/python bench/models/clients.py --client PYTHON [--kinds huggingface,modelscope] [--faults 401,cut,...]

PYTHON is the interpreter of an environment with the clients: `python -m venv X; X/bin/pip install --require-hashes -r
roles/model_store/files/hub-client.txt`. Each case is a hub stand-in on this machine that does one thing wrong with
one of three files: once, or always. Files are fetched as on a node: by the client, then by plain http.
Every case must end with a ready folder whose bytes are right, or with an error of one line and nothing ready. Prints
one JSON object, and a line a case on stderr; exit code 1 when a case ended in another way.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from bringup.node import download, store  # noqa: E402 (the checkout must be on the path first)
from tests.standin.hub import REPOSITORY, REVISION, Hub, serving  # noqa: E402
from tests.standin.models import lock_of  # noqa: E402

FAULTS = (
    "401",
    "403",
    "404",
    "429",
    "500",
    "503",
    "stall",
    "cut",
    "truncated",
    "wrong_bytes",
    "new_revision",
    "slow",
    "no_range",
)
PATH = "parts/big.bin"
FILES = {
    "config.json": b'{"architectures": ["Demo"]}',
    PATH: random.Random(1).randbytes(300_000),
}
ALWAYS = 1000
LIMITS = download.Limits(
    stall_s=2, slowest_bytes_s=100_000, slow_window_s=1, tries=3, back_off_s=0.05, retry_after_longest_s=5
)
CLIENT_STALL_S = 45.0
"""Longer than a client needs to start on a busy machine: it shall get as far as the fault."""


def one(kind: str, fault: str, often: str, client: str) -> dict[str, Any]:
    """One case: how it ended, who brought the file, how long it took, and what is wrong with that."""
    hub = Hub(dict(FILES), {PATH: [fault] * (1 if often == "once" else ALWAYS)})
    wrong: list[str] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, serving(hub) as address:
        revision = REVISION if kind == "huggingface" else "master"
        source = store.Source(kind, f"{REPOSITORY}@{revision}")
        model = store.Model("demo", Path(folder) / "demo", lock_of(FILES), (source,))
        access = store.Access(
            huggingface=address,
            modelscope=address,
            client=client,
            limits=LIMITS,
            progress=Path(folder) / "progress",
        )
        try:
            said = store.ensure(model, access)["came"][PATH]
            ended = "ready"
            if store.verify(model, deep=True) or not store.is_stamped(model):
                wrong.append("ready, and not right")
        except store.StoreFailed as error:
            ended, said = "refused", str(error)
            if "\n" in said:
                wrong.append("an error of more than one line")
            if (model.folder / store.READY).exists():
                wrong.append("refused, and marked ready")
        if ended == "refused" and often == "once" and fault not in ("401", "403", "404"):
            wrong.append("given up for one fault")
    seconds = round(time.monotonic() - started, 1)
    return {
        "kind": kind,
        "fault": fault,
        "often": often,
        "ended": ended,
        "seconds": seconds,
        "said": said,
        "wrong": wrong,
    }


def main() -> None:
    """Runs every case and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--client", required=True, help="interpreter with huggingface_hub and modelscope")
    parser.add_argument("--kinds", default="huggingface,modelscope")
    parser.add_argument("--faults", default=",".join(FAULTS))
    given = parser.parse_args()
    store.CLIENT_STALL_S = CLIENT_STALL_S
    cases = []
    for kind in given.kinds.split(","):
        for fault in given.faults.split(","):
            for often in ("once", "always"):
                cases.append(one(kind, fault, often, given.client))
                case = cases[-1]
                told = "; ".join(case["wrong"]) or case["ended"]
                head = f"{kind} {fault} {often}: {told} ({case['seconds']} s)"
                print(f"{head}: {case['said'][:300]}", file=sys.stderr, flush=True)
    bad = [case for case in cases if case["wrong"]]
    print(json.dumps({"schema_version": 1, "cases": len(cases), "wrong": len(bad), "rows": cases}))
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
