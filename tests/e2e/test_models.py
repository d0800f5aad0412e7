"""The models on real nodes: looked at, mended where they are damaged, and only garbage goes."""

from __future__ import annotations

import pytest

from bringup.errors import Exit
from tests.e2e.site import Site, answers, on

MODEL = "/srv/models/words/words.gguf"
OLD = "/srv/models/old"
HOLDER = "bringup-e2e-holder"


@pytest.fixture(scope="module")
def served(pair: Site) -> Site:
    """The pair, provisioned when this file runs alone."""
    port = int(pair.service()["port"])
    if not all(answers(name, port) for name in pair.names):
        done = pair.provision()
        assert done.code == Exit.DONE, done.text
    return pair


def test_every_node_has_its_model_and_who_uses_it_is_seen(served: Site) -> None:
    deep = served.invoke("models.verify", "--deep", "--json")
    assert deep.code == Exit.DONE, deep.text
    assert [(row["host"], row["ready"]) for row in deep.data["rows"]] == [
        (name, True) for name in served.names
    ]
    space = served.invoke("models.space", "--json")
    rows = {(row["host"], row["model"]): row for row in space.data["rows"]}
    for name in served.names:
        row = rows[name, "words"]
        assert row["planned"]
        assert row["ready"]
        assert row["pids"]
        assert "bringup-words" in row["units"]
        assert row["bytes"] > 3_000_000


def test_a_damaged_model_is_named_fetched_again_on_that_node_alone_and_served_on(served: Site) -> None:
    first, second = served.names
    # A new file in its place: the server that runs goes on with the old one.
    damage = f"cp {MODEL} /root/bad && printf x | dd of=/root/bad bs=1 seek=900000 conv=notrunc && mv /root/bad {MODEL}"
    untouched = on(second, f"stat -c %i.%Y {MODEL}")
    before = on(first, f"sha256sum < {MODEL}")
    on(first, damage)
    seen = served.invoke("models.verify", "--json")
    assert seen.code == Exit.FAILED, seen.text
    assert {row["host"]: list(row["faults"]) for row in seen.data["rows"]} == {
        first: ["words.gguf"],
        second: [],
    }
    done = served.provision()
    assert done.code == Exit.DONE, done.text
    assert on(first, f"sha256sum < {MODEL}") == before
    assert on(second, f"stat -c %i.%Y {MODEL}") == untouched
    assert served.invoke("models.verify", "--quick").code == Exit.DONE
    assert answers(first, int(served.service()["port"]))


def test_what_a_process_has_open_stays_and_goes_when_nobody_uses_it(served: Site) -> None:
    first = served.names[0]
    stamp = '{"schema_version": 1, "files": []}'
    on(
        first,
        f"mkdir -p {OLD}/.bringup && echo weights > {OLD}/a.bin && echo '{stamp}' > {OLD}/.bringup/ready.json",
    )
    on(first, f"systemd-run --quiet --collect --unit={HOLDER} tail -f {OLD}/a.bin")
    held = served.invoke("models.gc", "--yes", "--json")
    assert (held.code, held.data["rows"]) == (Exit.DONE, []), held.text
    on(first, f"systemctl stop {HOLDER}")
    check = served.invoke("models.gc", "--check", "--json")
    assert check.code == Exit.PENDING, check.text
    assert on(first, f"cat {OLD}/a.bin") == "weights"
    gone = served.invoke("models.gc", "--yes", "--json")
    assert [(row["host"], row["folder"]) for row in gone.data["rows"]] == [(first, OLD)], gone.text
    assert on(first, "ls /srv/models") == "words"
    assert answers(first, int(served.service()["port"]))
