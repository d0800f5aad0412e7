"""A GH200 node on a twin of its own architecture, emulated where this machine has another: what a role takes for
granted of amd64 fails here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e import rehearsal
from tests.e2e.rehearsal import Rehearsal


@pytest.fixture(scope="module")
def twin() -> Iterator[Rehearsal]:
    made = Rehearsal("gh200", "gh200-01", "--twins=real-arch")
    made.take_down()
    yield made
    made.take_down()


def test_faults_that_only_a_container_shows_are_named_before_the_first_run(twin: Rehearsal) -> None:
    faults = rehearsal.only_in_containers()
    assert set(faults.values()) - set(twin.codes("preflight", faults)) == set()
    assert twin.on("uname -m") == "aarch64"


def test_the_node_is_healed_and_provisioned_and_a_second_time_nothing_changes(twin: Rehearsal) -> None:
    rehearsal.provisioned(twin).is_as_it_should_be()
