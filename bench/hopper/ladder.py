"""On the GPU machine, beside the node: every step of the ladder, each by itself, all of it kept.

    python -m bench.hopper.ladder OUT [--only STEP] [--until SECONDS]

A step that fails or takes too long is recorded, and the next begins. No step takes more than its own limit, and one that
would not have its least time before the machine goes back is left out. After each one everything that is known so far is in
OUT/results.tar.gz, so that a machine that is taken away takes nothing with it; started again, it goes on with the steps
that were not taken.
"""

# ruff: noqa: E501 (scripts for the node are whole lines)
from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from bringup import ROOT

HOP = ROOT / ".hop"
RESULTS = HOP / "results"
INVENTORY = ROOT / "inventories" / "hopper"
SUITE, SLOW_SUITE = "hopper", "hopper-slow"
RUNGS = ("bring-up", "base", "mtp-careful", "")
"""Ends of the profiles' names, first rung first."""
PROFILE = "h200-1x-glm-tiny-fp8-mtp-sglang"
PAIR = "h200-2x-glm-tiny-fp8-mtp-sglang"
"""The last rung on two GPUs."""
HOST, ADDRESS, SERVICE, PORT = "hopper-01", "198.18.7.2", "glm", 8000
HELD_PORT = 8011
ENGINE_PYTHON = "/opt/bringup/environments/sglang-0.5.15.post1-current/bin/python"
HOLD = "import sys, time, torch; held = torch.empty(int(sys.argv[1]) << 30, dtype=torch.uint8, device='cuda'); print('held', flush=True); time.sleep(600)"
HOLD_LIMIT_S = 90
PROVISION_LIMIT_S = 420
BENCH_LIMIT_S = 150
KILL_GRACE_S = 5
PACK_EVERY_S = 5


@dataclass
class Step:
    """What one step did: how long, how it ended, and the end of what it printed."""

    name: str
    seconds: float
    code: int
    argv: Sequence[str]
    note: str = ""


class Ladder:
    """The steps so far, and where they are written. `place`: the inventory that the node is at."""

    def __init__(self, out: Path, until: float) -> None:
        self.out, self.until = out, time.monotonic() + until
        self.began = time.monotonic()
        self.deadline = self.until
        self.lock = threading.Lock()
        self.packed = 0.0
        RESULTS.mkdir(parents=True, exist_ok=True)
        self.steps = [Step(**row) for row in read("steps.json", [])]
        self.finished: list[str] = read("finished.json", [])
        self.place = str(read("place.json", "")) or rung(0)

    def left(self) -> float:
        """Seconds until the machine goes back, or this step's time is over."""
        return min(self.until, self.deadline) - time.monotonic()

    def take(self, name: str, act: Callable[[Ladder], None], least: float, most: float) -> None:
        """A step of the ladder, within its time. Never raises."""
        self.deadline = self.until
        if self.left() < least:
            self.add(Step(name, 0, -3, [], f"left out: {self.left():.0f} s left, it needs {least:.0f}"))
            return
        self.deadline = time.monotonic() + most
        try:
            act(self)
        except Exception as error:
            self.add(Step(name, 0, -2, [], f"broke: {error!r}"))
        self.finished.append(name)
        write("finished.json", self.finished)
        with self.lock:
            self.pack()

    def at(self, place: str) -> None:
        """The node has been brought to this inventory."""
        self.place = place
        write("place.json", place)

    def command(self, name: str, argv: Sequence[str], limit: float, stdin: str | None = None) -> Step:
        """A command with its output in a file; never raises for how it ends."""
        began, path = time.monotonic(), RESULTS / f"{name}.txt"
        limit = max(1.0, min(limit, self.left()))
        say(f"{name}: {' '.join(argv)[:150]}")
        with path.open("wb") as file:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                start_new_session=True,
            )
            try:
                process.communicate(stdin.encode() if stdin else None, timeout=limit)
                note = ""
            except subprocess.TimeoutExpired:
                note = f"ended after {limit:.0f} s"
                for number in (signal.SIGINT, signal.SIGKILL):
                    with_suppressed(os.killpg, process.pid, number)
                    try:
                        process.wait(KILL_GRACE_S)
                        break
                    except subprocess.TimeoutExpired:
                        continue
        step = Step(name, round(time.monotonic() - began, 1), process.returncode or 0, list(argv), note)
        if note and not step.code:
            step.code = -1
        self.add(step)
        return step

    def add(self, step: Step) -> None:
        """Keeps a step and everything else that is there."""
        with self.lock:
            self._add(step)

    def _add(self, step: Step) -> None:
        self.steps.append(step)
        say(
            f"{step.name}: {step.code} after {step.seconds} s (at {time.monotonic() - self.began:.0f} s) {step.note}"
        )
        write("steps.json", [asdict(one) for one in self.steps])
        if time.monotonic() > self.packed + PACK_EVERY_S:
            self.pack()

    def pack(self) -> None:
        """OUT/results.tar.gz, whole at every moment."""
        beside = self.out / ".results.new"
        with tarfile.open(beside, "w:gz", compresslevel=3) as archive:
            archive.add(RESULTS, "results")
            for folder in ("tests/facts/h200-1x", "tests/facts/h200-2x", "runs"):
                if (ROOT / folder).is_dir():
                    archive.add(ROOT / folder, folder)
        beside.replace(self.out / "results.tar.gz")
        self.packed = time.monotonic()

    def invoke(self, name: str, words: str, limit: float) -> Step:
        """One of our commands."""
        return self.command(name, ["invoke", *words.split()], limit)

    def node(self, name: str, script: str, limit: float = 60) -> Step:
        """A shell script on the node, as root."""
        return self.command(name, [*ssh(), "sudo", "sh", "-s"], limit, stdin=script)


def read(name: str, otherwise: Any) -> Any:
    """What an earlier start of this ladder wrote."""
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else otherwise


def write(name: str, data: Any) -> None:
    """Plain data among the results."""
    (RESULTS / name).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def say(text: str) -> None:
    """A line at once, with the time."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def with_suppressed(act: Callable[..., object], *arguments: object) -> None:
    """For processes that may be gone."""
    try:
        act(*arguments)
    except ProcessLookupError:
        return


def ssh() -> list[str]:
    """How the node is reached."""
    known = f"UserKnownHostsFile={HOP}/ssh/known_hosts"
    return ["ssh", "-i", str(HOP / "ssh/id"), "-o", known, "-o", "BatchMode=yes", f"sre@{ADDRESS}"]


def inventory(name: str, profile: str, *, platform: str = "", **service: Any) -> str:
    """A copy of the inventory whose service has another profile, port or flags; its folder."""
    folder = HOP / "inventories" / name / INVENTORY.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(INVENTORY, folder)
    path = folder / "group_vars" / "all.yml"
    said = yaml.safe_load(path.read_text(encoding="utf-8"))
    said["node_services"] = [{**said["node_services"][0], "profile": profile, **service}]
    said["node_platform"] = platform or said["node_platform"]
    path.write_text(yaml.safe_dump(said, sort_keys=False), encoding="utf-8")
    return str(folder.relative_to(ROOT))


def rung(number: int) -> str:
    """The inventory of a rung."""
    end = RUNGS[number]
    return inventory(f"rung-{number}", f"{PROFILE}-{end}" if end else PROFILE)


PLAN_FAULTS: Mapping[str, Mapping[str, Any]] = {
    "unknown-flag": {"--enable-turbo-mode": True},
    "kv-fp8-e5m2": {"--kv-cache-dtype": "fp8_e5m2"},
    "topk-missing": {"--speculative-eagle-topk": False},
    "sbo-on-sm90": {"--enable-single-batch-overlap": True},
    "memory-too-small": {"--mem-fraction-static": 0.001},
    "draft-tokens-6": {"--speculative-num-draft-tokens": 6},
}
"""Faults that a plan shows before a node is asked: flags on top of the last rung's."""


def plan_faults(run: Ladder) -> None:
    """Each must be refused by name (the last one is only adjusted)."""
    for name, flags in PLAN_FAULTS.items():
        run.invoke(f"fault-{name}", f"plan --inventory {inventory(name, PROFILE, flags=flags)}", 30)
    base = {"model": "glm-tiny-fp8", "unmeasured": "a fault"}
    # A model without a draft layer under the same flags: the profile says which model, so it is a profile of its own.
    path = ROOT / "catalog" / "profiles" / f"{PROFILE}-no-draft.yml"
    path.write_text(
        yaml.safe_dump({"title": "No draft layer", "based_on": PROFILE, **base}), encoding="utf-8"
    )
    try:
        run.invoke("fault-mtp-not-in-model", f"plan --inventory {inventory('no-draft', path.stem)}", 30)
    finally:
        path.unlink()


def before(run: Ladder) -> None:
    """The bare node: what it is, and what preflight says of it."""
    run.node(
        "machine",
        "nvidia-smi; nvidia-smi topo -m; nvidia-smi -q; uname -a; systemctl is-system-running; lscpu; nproc; free -g; "
        "ldconfig -p | grep -E 'cuda|nvidia'; cat /proc/driver/nvidia/version; ls -la /dev/nvidia* /usr/local/cuda/; "
        "ls /sys/bus/pci/devices; findmnt; systemctl --failed",
    )
    fit_memory(run)
    run.invoke("preflight-bare", f"preflight --inventory {rung(0)} --json", 60)
    run.invoke("record", f"twins.record --inventory {rung(0)} --limit {HOST}", 60)


def fit_memory(run: Ladder) -> None:
    """Some virtual machines show a part of their memory until it is used: the platform is what this one shows."""
    total = int(Path("/proc/meminfo").read_text(encoding="utf-8").split()[1]) >> 20
    for path in sorted((ROOT / "catalog" / "platforms").glob("h200-[12]x.yml")):
        said = yaml.safe_load(path.read_text(encoding="utf-8"))
        if said["host"]["memory_gib_per_socket"] > total:
            said["host"]["memory_gib_per_socket"] = total
            path.write_text(yaml.safe_dump(said, sort_keys=False), encoding="utf-8")
            run.add(Step(f"memory-{path.stem}", 0, 0, [], f"taken to have the {total} GiB that it shows"))


def climb(run: Ladder, number: int) -> None:
    """One rung: provisioned as any node, and measured."""
    if brought(run, f"rung-{number}", rung(number)):
        measured(run, f"rung-{number}", f"{SUITE} --against last" if number else SLOW_SUITE)


def brought(run: Ladder, name: str, place: str) -> bool:
    """The node at another inventory, provisioned as any node; whether it is."""
    step = run.invoke(f"{name}-provision", f"provision --inventory {place} --json", PROVISION_LIMIT_S)
    run.at(place)
    run.node(f"{name}-node", LOOK)
    if step.code:
        run.invoke(f"{name}-diagnose", f"diagnose --inventory {place}", 60)
    return not step.code


def measured(run: Ladder, name: str, suite: str) -> None:
    """The suite on what runs, judged against the measurement before it; and how fast the machine's CPUs were around it."""
    run.node(f"{name}-pace-before", PACE)
    run.invoke(f"{name}-bench", f"bench --inventory {run.place} --suite {suite} --json", BENCH_LIMIT_S)
    run.node(f"{name}-pace-after", PACE)
    run.node(f"{name}-after", LOOK)


PACE = """python3 - <<'X'
import json, time
def loop():
    began = time.perf_counter()
    sum(number * number for number in range(400_000))
    return round((time.perf_counter() - began) * 1000, 2)
loops = [loop() for _ in range(25)]
ticks = [int(word) for word in open("/proc/stat").readline().split()[1:]]
print(json.dumps({"loop_ms": loops, "ticks": ticks[:8]}))
X
"""
"""The same work of one CPU, again and again (ms), and the machine's ticks so far: user, nice, system, idle, iowait, irq,
softirq, steal. This small a model waits for its CPU, not for its GPU, and the CPUs are shared with others."""
LOOK = f"""
systemctl status --no-pager bringup-{SERVICE} | head -40
for file in /var/lib/bringup/starts/*.json; do echo "== $file"; cat "$file"; done
nvidia-smi --query-gpu=memory.used,power.draw,clocks.sm --format=csv
curl -s http://127.0.0.1:{PORT}/metrics | grep -E '^sglang:(spec_|num_|gen_|token_usage)'
curl -s http://127.0.0.1:{PORT}/server_info | head -c 4000
ls -la /var/log/bringup/{SERVICE} /opt/bringup/cuda/lib
cat /etc/bringup/services/{SERVICE}.env
du -sh /var/cache/bringup/{SERVICE} /var/cache/bringup/{SERVICE}/.[a-z]* /var/cache/bringup/{SERVICE}/.cache/* /opt/bringup/environments
tail -n 60 /var/log/bringup/{SERVICE}/engine.log
"""
DRAFT_AWAY = """cd /srv/models/glm-tiny-fp8-mtp && cp -a model.safetensors.index.json /root/index.json
python3 - <<'X'
import json, os
path = "model.safetensors.index.json"
data = json.load(open(path))
data["weight_map"] = {k: v for k, v in data["weight_map"].items() if not k.startswith("model.layers.2.")}
os.unlink(path)
json.dump(data, open(path, "w"))
X
"""
DRAFT_BACK = "cd /srv/models/glm-tiny-fp8-mtp && rm model.safetensors.index.json && cp -a /root/index.json model.safetensors.index.json"
STARTS = "cat /var/lib/bringup/starts/*.json"
LIBGCC = "/usr/lib/gcc/*/*/libgcc.a"
HIDE_STUBS = "for stubs in /usr/local/cuda-*/lib64/stubs; do mount -t tmpfs tmpfs $(readlink -f $stubs); done"
SHOW_STUBS = "for stubs in /usr/local/cuda-*/lib64/stubs; do umount $(readlink -f $stubs); done"
LINK = "echo 'int main(void){return 0;}' >/tmp/a.c; cc /tmp/a.c -o /tmp/a"


def hold(run: Ladder, name: str, gib: int) -> None:
    """Another process takes this much of the GPU."""
    run.node(
        f"{name}-hold",
        f'systemd-run -q --unit=holder {ENGINE_PYTHON} -c "{HOLD}" {gib}\n'
        f"for i in $(seq {HOLD_LIMIT_S}); do journalctl -u holder | grep -q ': held' && exit 0; sleep 1; done; "
        "journalctl -u holder | tail; exit 1",
        HOLD_LIMIT_S + 10,
    )


def node_faults(run: Ladder) -> None:
    """Faults of the node, made for real; each must be told by preflight or refused at the start, by name."""
    place = run.place
    run.node("fault-mtp-index", DRAFT_AWAY)
    run.invoke("fault-mtp-preflight", f"preflight --inventory {place} --json", 60)
    run.invoke("fault-mtp-verify", f"models.verify {place} --json", 60)
    run.node("fault-mtp-restore", DRAFT_BACK)
    run.node("fault-compiler-hide", f"for file in {LIBGCC}; do mv $file $file.away; done; {LINK}")
    run.invoke("fault-compiler-preflight", f"preflight --inventory {place} --json", 60)
    run.node(
        "fault-compiler-back",
        f"for file in {LIBGCC}.away; do mv $file ${{file%.away}}; done; {LINK} && echo linked",
    )
    run.node("fault-libcuda-hide", f"{HIDE_STUBS}; ls -la /usr/local/cuda/lib64/stubs; {LINK} -lcuda")
    run.invoke("fault-libcuda-preflight", f"preflight --inventory {place} --json", 60)
    run.invoke("fault-libcuda-provision", f"provision --inventory {place} --tags cuda_runtime --full", 90)
    run.node(
        "fault-libcuda-link",
        f"ls -la /opt/bringup/cuda/lib; LIBRARY_PATH=/opt/bringup/cuda/lib; export LIBRARY_PATH; {LINK} -lcuda && echo linked",
    )
    run.node("fault-libcuda-back", SHOW_STUBS)
    run.invoke("fault-libcuda-again", f"provision --inventory {place} --tags cuda_runtime --full", 90)
    held = inventory("held-port", PROFILE, port=HELD_PORT)
    run.node("fault-port-hold", f"systemd-run -q --unit=porter python3 -m http.server {HELD_PORT}; sleep 1")
    run.invoke("fault-port-preflight", f"preflight --inventory {held} --json", 60)
    run.node("fault-port-release", "systemctl stop porter")
    hold(run, "fault-gpu", 2)
    run.invoke("fault-gpu-preflight", f"preflight --inventory {place} --json", 60)
    run.node("fault-gpu-release", "systemctl stop holder")


def draft_away(run: Ladder) -> None:
    """A server whose model has lost its draft layer starts, and says that nothing of its drafts is accepted."""
    unit = f"bringup-{SERVICE}"
    run.node("draft-away", DRAFT_AWAY)
    run.node(
        "draft-restart", f"systemctl restart {unit}; journalctl -u {unit} -n 30 --no-pager; {STARTS}", 170
    )
    run.invoke("draft-status", f"status --inventory {run.place}", 60)
    run.node("draft-back", DRAFT_BACK)


def killed(run: Ladder) -> None:
    """The scheduler is killed under the server: it comes back by itself, and diagnose says what was."""
    unit = f"bringup-{SERVICE}"
    run.node(
        "killed-kill",
        f"pids=$(pgrep -f sglang::scheduler | head -n 1); echo $pids; kill -9 $pids; "
        f"for i in $(seq 20); do sleep 0.5; date +%T.%N; systemctl show -p ActiveState,SubState,NRestarts {unit}; done; "
        f"systemctl status --no-pager {unit} | head -30; nvidia-smi",
        60,
    )
    run.invoke("killed-diagnose", f"diagnose --inventory {run.place} --json", 60)
    run.node(
        "killed-trail",
        f"python3 /opt/bringup/lib/trail.py {SERVICE} --show; ls -la /var/lib/bringup/crashes/*/",
    )
    run.invoke("killed-status", f"status --inventory {run.place}", 60)
    run.node(
        "killed-back",
        f"systemctl start {unit}; systemctl show -p NRestarts,ActiveState {unit}; cat /var/lib/bringup/starts/*.json",
        160,
    )


def tuned(run: Ladder) -> None:
    """The last two rungs are tune's two settings; the profile is put back afterwards."""
    run.invoke("tune", f"tune --inventory {rung(3)} --yes --json", 360)
    run.at(rung(3))
    run.node("tune-node", LOOK)


def pair(run: Ladder) -> None:
    """The same node with the second GPU, which was kept from it so far: the last rung on both."""
    if len(list(Path("/dev").glob("nvidia[0-9]*"))) < 2:
        run.add(Step("pair", 0, -3, [], "left out: this machine has one GPU"))
        return
    run.command("pair-admit", ["sh", "bench/hopper/node.sh", "admit", "/"], 30)
    run.node(
        "pair-machine",
        "nvidia-smi; nvidia-smi topo -m; nvidia-smi topo -p2p r; nvidia-smi nvlink -s; ls -la /dev/nvidia*; lspci",
    )
    place = inventory("pair", PAIR, platform="h200-2x")
    run.invoke("pair-preflight", f"preflight --inventory {place} --json", 60)
    run.invoke("pair-record", f"twins.record --inventory {place} --limit {HOST}", 60)
    if brought(run, "pair", place):
        measured(run, "pair", f"{SUITE} --against last")
    run.node("pair-multicast", MULTICAST)


MULTICAST = f"""
grep -i -E 'multicast|symm|nvls|allreduce|all.reduce|nccl' /var/log/bringup/{SERVICE}/engine.log | tail -n 60
for pid in $(pgrep -f sglang::scheduler); do tr '\\0' '\\n' </proc/$pid/environ | grep -E 'NVLS|MULTICAST|NCCL'; done
nvidia-smi
"""


def stopped(run: Ladder) -> None:
    """Stopped: nothing is left."""
    run.node("stop-before", "nvidia-smi; ls -la /dev/shm; ps aux | grep -c sglan[g]")
    run.invoke("stop", f"run stop-servers --inventory {run.place} --yes --json", 120)
    run.invoke("leftovers", f"cleanup --inventory {run.place} --check --json", 60)
    run.node("logs", LOGS)
    with (run.out / "node-logs.tgz").open("wb") as file:
        subprocess.run([*ssh(), "cat", "/tmp/logs.tgz"], stdout=file, timeout=60, check=False)


LOGS = f"""
nvidia-smi; ls -la /dev/shm; ps aux | grep -c sglan[g]
journalctl -u bringup-{SERVICE} --no-pager | tail -n 300
tar czf /tmp/logs.tgz -C /var/log bringup -C /var/lib bringup; chmod 644 /tmp/logs.tgz
"""


def first(run: Ladder) -> None:
    """The first rung; faults that only the plan knows are shown meanwhile."""
    beside = threading.Thread(target=plan_faults, args=[run])
    beside.start()
    climb(run, 0)
    beside.join()


STEPS: Mapping[str, tuple[Callable[[Ladder], None], float, float]] = {
    "before": (before, 20, 120),
    "rung-0": (first, 200, 480),
    "rung-1": (lambda run: climb(run, 1), 80, 200),
    "rung-2": (lambda run: climb(run, 2), 100, 330),
    "rung-3": (lambda run: climb(run, 3), 80, 260),
    "tune": (tuned, 200, 360),
    "pair": (pair, 150, 400),
    "killed": (killed, 60, 240),
    "node-faults": (node_faults, 60, 240),
    "draft-away": (draft_away, 120, 220),
    "stop": (stopped, 5, 120),
}
"""Each step with the seconds that it needs at least, and those that it may take."""


def main(words: Sequence[str] | None = None) -> int:
    """0 when every step was taken, whatever it found."""
    parser = argparse.ArgumentParser(description="The ladder on a real GPU.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", action="append", choices=list(STEPS))
    parser.add_argument("--until", type=float, default=1200, help="seconds that the machine is there")
    chosen = parser.parse_args(words)
    run = Ladder(chosen.out, chosen.until)
    for name, (act, least, most) in STEPS.items():
        if name in (chosen.only or STEPS) and name not in run.finished:
            run.take(name, act, least, most)
    run.pack()
    (chosen.out / "done").write_text("done\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
