"""Unit texts: one planned service -> the units that run it, keep its log, watch it and restart it. Pure.

Every word that comes from a plan goes through `word` (or `environment_text`), so that percent signs, dollars,
quotes, spaces and Unicode arrive at the engine as they stand in the plan (systemd.unit(5),
systemd.service(5)).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from bringup import calendars
from bringup.planned import HostPlan, LogRotation, Service

PYTHON = "/usr/bin/python3"
LIBRARY = PurePosixPath("/opt/bringup/lib")
SERVICES = PurePosixPath("/etc/bringup/services")
CREDENTIALS = PurePosixPath("/etc/bringup/credentials")
STATE = PurePosixPath("/var/lib/bringup")
LOGS = PurePosixPath("/var/log/bringup")
FIFOS = PurePosixPath("/run/bringup/log")

LOG_USER = "bringup-log"
LEASE_USER = "bringup-lease"

RESTART_S = 3
START_LIMIT_BURST = 5
"""Starts that may fail one after another before systemd gives up and says so."""

GATE_MARGIN_S = 120
"""Beyond twice the start timeout (first token, then warm-up): checks before the start, reading the log."""

OPEN_FILES = 1_048_576
TASKS = 65_536

LEASE_PORT = 7766

WATCH_EVERY_S = 30

PREFILL_S = 900
"""How long requests in flight may go without any counter moving before a server counts as hung."""

STALL_S = 300
"""The same for engines with a metric that moves with each batch of a prefill: no batch takes that long."""

SANDBOX = (
    "NoNewPrivileges=yes",
    "CapabilityBoundingSet=",
    "AmbientCapabilities=",
    "ProtectSystem=strict",
    "PrivateTmp=yes",
    "ProtectClock=yes",
    "ProtectControlGroups=yes",
    "ProtectHostname=yes",
    "ProtectKernelLogs=yes",
    "ProtectKernelModules=yes",
    "ProtectKernelTunables=yes",
    "ProtectProc=invisible",
    "RestrictNamespaces=yes",
    "RestrictRealtime=yes",
    "RestrictSUIDSGID=yes",
    "LockPersonality=yes",
    "KeyringMode=private",
    "SystemCallArchitectures=native",
    "SystemCallErrorNumber=EPERM",
    "UMask=0077",
    # A core would hold weights and keys. A handler in core_pattern is not bound by LimitCORE: it gets no memory.
    "LimitCORE=0",
    "CoredumpFilter=0",
)
"""What holds for every unit of ours. No MemoryDenyWriteExecute for engines: they compile at run time."""

HELPER_SANDBOX = (
    *SANDBOX,
    "ProtectHome=yes",
    "PrivateDevices=yes",
    "MemoryDenyWriteExecute=yes",
    "SystemCallFilter=@system-service",
    "SystemCallFilter=~@resources @privileged",
)

GPU_DEVICES = (
    "char-nvidia",
    "char-nvidia-frontend",
    "char-nvidia-caps",
    "char-nvidia-uvm",
    "char-nvidia-nvswitch",
    "char-nvidia-caps-imex-channels",
    "char-infiniband_verbs",
    "char-infiniband_mad",
)
"""Device classes that an engine on GPUs needs (names in /proc/devices); ones that a node lacks do no harm."""

_PLAIN = re.compile(r"^[A-Za-z0-9_@+=:,./-]+$")


def word(text: str) -> str:
    """One word of a command line in a unit file: specifiers, variables, quotes and control characters
    escaped.
    """
    if _PLAIN.match(text):
        return text
    out = []
    for character in text:
        if character in '"\\':
            out.append("\\" + character)
        elif character in "%$":
            out.append(character * 2)
        elif ord(character) < 0x20 or ord(character) == 0x7F:
            out.append(f"\\x{ord(character):02x}")
        else:
            out.append(character)
    return '"' + "".join(out) + '"'


def command(words: Iterable[str]) -> str:
    """A whole command line for `ExecStart=` and its kin."""
    return " ".join(word(text) for text in words)


def value(text: str) -> str:
    """Free text in a unit file (a description): one line, percent signs doubled, no trailing backslash."""
    return " ".join(text.split()).replace("%", "%%").rstrip("\\")


def environment_text(service: Service) -> str:
    """The environment file: every value in double quotes, with the four characters escaped that need it
    there.

    Nothing is expanded in such a file (systemd.exec(5), EnvironmentFile=), so percent and dollar signs stay.
    """
    lines = []
    for name, text in sorted(service.environment.items()):
        escaped = re.sub(r'(["\\`$])', r"\\\1", text)
        lines.append(f'{name}="{escaped}"\n')
    return "".join(lines)


def program(name: str) -> list[str]:
    """How one of our programs on the node is run."""
    return [PYTHON, "-s", str(LIBRARY / f"{name}.py")]


def key_file(service: Service) -> str | None:
    """Where the service's API key lies on the node (root, 0600); None: it has none."""
    return str(CREDENTIALS / service.name / "api_key") if service.api_key else None


def log_file(service: Service) -> str | None:
    """The link to the file that the service's log is written to; None in journal mode."""
    return str(LOGS / service.name / "engine.log") if service.logs.mode == "file" else None


def log_namespace(service: Service) -> str | None:
    """The journal of the service's own, in journal mode; None in file mode."""
    return service.unit if service.logs.mode == "journal" else None


def log_unit(service: Service) -> str:
    """The log service's name without suffix."""
    return f"bringup-log-{service.name}"


def restart_unit(service: Service) -> str:
    """The name, without suffix, of the unit and timer that restart the service on schedule."""
    return f"bringup-restart-{service.name}"


def drift_unit(service: Service) -> str:
    """The name, without suffix, of the units that restart the service when its watchdog asks for it."""
    return f"bringup-drift-{service.name}"


def watch_folder(service: Service) -> str:
    """Name under /run of the watchdog's own folder (`drift.folder_of` on the node)."""
    return f"bringup-watch-{service.name}"


def watch_unit(service: Service) -> str:
    """The watchdog's name without suffix."""
    return f"bringup-watch-{service.name}"


def unit_file(name: str) -> str:
    """Where a unit lies; `name` with its suffix."""
    return f"/etc/systemd/system/{name}"


def _section(title: str, lines: Iterable[str | None]) -> str:
    return "\n".join([f"[{title}]", *(line for line in lines if line is not None)]) + "\n"


def _unit(*sections: tuple[str, Sequence[str | None]]) -> str:
    head = "# Written by bringup from the plan: provision again instead of editing.\n"
    return head + "\n".join(_section(title, lines) for title, lines in sections)


def start_limit_s(service: Service) -> int:
    """The window in which START_LIMIT_BURST failed starts end the tries: all, however slow, fit in."""
    longest = 2 * service.start_timeout_s + GATE_MARGIN_S + service.stop_timeout_s + RESTART_S
    return (START_LIMIT_BURST + 1) * longest


def unit_text(service: Service, host: HostPlan) -> str:
    """The server's own unit. It is active only after a real token (`gate.py` is a part of its start)."""
    key = f"{service.api_key.how}:{service.api_key.name}" if service.api_key else None
    serve = [*program("serve"), *(["--key", key] if key else []), "--", *service.argv]
    what = f"{service.served_name} ({service.engine} {service.engine_version}, {service.profile})"
    unit = [
        f"Description={value(what)}",
        "Wants=network-online.target",
        "After=network-online.target nvidia-persistenced.service nvidia-fabricmanager.service",
        *_log_needs(service),
        f"StartLimitIntervalSec={start_limit_s(service)}",
        f"StartLimitBurst={START_LIMIT_BURST}",
    ]
    run = [
        "Type=exec",
        f"User={service.user}",
        f"Group={service.user}",
        f"WorkingDirectory={STATE}/services/{service.name}",
        f"StateDirectory=bringup/services/{service.name}",
        f"EnvironmentFile={SERVICES}/{service.name}.env",
        f"LoadCredential=api_key:{key_file(service)}" if service.api_key else None,
        f"ExecStartPre=+{command([*program('serve'), '--check', service.name])}",
        f"ExecStart={command(serve)}",
        f"ExecStartPost=+{command([*program('gate'), service.name])}",
        f"ExecStopPost=+{command([*program('trail'), service.name])}",
        "Restart=always",
        f"RestartSec={RESTART_S}",
        f"TimeoutStartSec={2 * service.start_timeout_s + GATE_MARGIN_S}",
        f"TimeoutStopSec={service.stop_timeout_s}",
        # TERM is for the server alone, which ends its workers itself: SGLang takes one that ends by TERM for a crash.
        # What is left when the server has ended, or at TimeoutStopSec, is killed.
        "KillMode=mixed",
        "OOMPolicy=kill",
        *_output(service),
    ]
    limits = [
        f"LimitNOFILE={OPEN_FILES}",
        "LimitMEMLOCK=infinity",
        f"TasksMax={TASKS}",
        f"MemoryMax={int(service.memory_gib * 1024)}M" if service.memory_gib else None,
        f"CPUAffinity={service.placement.cpus}" if service.placement.cpus else None,
        *(
            ("NUMAPolicy=bind", f"NUMAMask={service.placement.memory_nodes}")
            if service.placement.memory_nodes
            else ()
        ),
    ]
    sandbox = [
        *SANDBOX,
        f"ProtectHome={_home(service, host)}",
        *_devices(service),
        # Shared memory of its own, gone with its last process: nothing is left there by a crash.
        "TemporaryFileSystem=/dev/shm:mode=1777",
        "RemoveIPC=yes",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        "SystemCallFilter=@system-service",
        "SystemCallFilter=~@privileged",
        "SystemCallFilter=pidfd_getfd pidfd_open kcmp" if service.gpus else None,
        # One that is missing is refused by name before the start; without the dash systemd itself would fail, nameless.
        *(f"ReadWritePaths={word(f'-{path}')}" for path in writable(service)),
    ]
    return _unit(
        ("Unit", unit), ("Service", [*run, *limits, *sandbox]), ("Install", ["WantedBy=multi-user.target"])
    )


def writable(service: Service) -> tuple[str, ...]:
    """Folders outside of its state that the server may write to; the role makes them."""
    return tuple(dict.fromkeys(path for path in (service.cache_folder, *service.writable) if path))


def _log_needs(service: Service) -> list[str]:
    return [f"Requires={log_unit(service)}.socket", f"After={log_unit(service)}.socket"]


def _output(service: Service) -> list[str]:
    # In journal mode too: secrets are taken out, and lines are counted, before anything is kept.
    return [f"StandardOutput=append:{FIFOS}/{service.name}", "StandardError=inherit"]


def _home(service: Service, host: HostPlan) -> str:
    """Home folders are hidden, unless the model or the environment lies in one."""
    used = (*service.argv, *service.environment.values(), *(model.folder for model in host.models))
    in_home = any(text.startswith(("/home/", "/root/")) for text in used)
    return "read-only" if in_home else "yes"


def _devices(service: Service) -> list[str]:
    if not service.gpus:
        return ["PrivateDevices=yes"]
    return ["DevicePolicy=closed", *(f"DeviceAllow={name} rw" for name in GPU_DEVICES)]


def log_socket_text(service: Service) -> str:
    """The FIFO that the engine writes its log to; systemd keeps it open while the log service restarts."""
    unit = [f"Description=Log of {value(service.unit)}: where it is written to"]
    socket = [
        f"ListenFIFO={FIFOS}/{service.name}",
        "SocketMode=0600",
        "PipeSize=1M",
        # The log service may come and go as often as it likes: the engine must never hang on its log.
        "TriggerLimitIntervalSec=0",
        f"Service={log_unit(service)}.service",
    ]
    return _unit(("Unit", unit), ("Socket", socket), ("Install", ["WantedBy=sockets.target"]))


def log_unit_text(service: Service) -> str:
    """The log service: from the FIFO into rotated files (`systemctl reload` rotates now), or into a journal of
    the service's own.
    """
    logs: LogRotation = service.logs
    where = "rotated files" if logs.mode == "file" else "a journal of its own"
    unit = [
        f"Description=Log of {value(service.unit)}: {where}",
        f"Requires={log_unit(service)}.socket",
        f"After={log_unit(service)}.socket",
        "StartLimitIntervalSec=0",
    ]
    run = [
        "Type=exec",
        f"User={LOG_USER}",
        "Group=adm",
        f"LoadCredential=api_key:{key_file(service)}" if service.api_key else None,
        # A reload that comes before the program listens to it must not end it.
        f"ExecStart={command(['/usr/bin/nohup', *_log_words(service)])}",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "Restart=always",
        "RestartSec=1",
        "TimeoutStopSec=60",
        "Nice=5",
        *HELPER_SANDBOX,
        f"ReadWritePaths={LOGS}/{service.name}" if logs.mode == "file" else None,
        *(_journal_output(service) if logs.mode == "journal" else ()),
        "PrivateNetwork=yes",
        "RestrictAddressFamilies=none",
        "IPAddressDeny=any",
    ]
    return _unit(("Unit", unit), ("Service", run), ("Install", ["WantedBy=multi-user.target"]))


def _log_words(service: Service) -> list[str]:
    logs: LogRotation = service.logs
    limit = [f"--lines-per-s={logs.lines_per_s}"] if logs.lines_per_s else []
    if logs.mode == "journal":
        return [*program("logpipe"), "--journal", *limit]
    sizes = [f"--size-bytes={logs.size_bytes}", f"--age-s={logs.age_s}", f"--keep={logs.keep}"]
    return [*program("logpipe"), str(LOGS / service.name), *sizes, *limit]


def _journal_output(service: Service) -> list[str]:
    return [
        f"LogNamespace={log_namespace(service)}",
        "StandardOutput=journal",
        f"SyslogIdentifier={service.unit}",
        # Counted here, where the count is written into the log too.
        "LogRateLimitIntervalSec=0",
    ]


def journal_text(service: Service) -> str:
    """Settings of the journal that is the service's own: the same limits as those of files."""
    logs: LogRotation = service.logs
    return (
        "# Written by bringup from the plan: provision again instead of editing.\n"
        "[Journal]\n"
        "Storage=persistent\n"
        f"SystemMaxUse={logs.size_bytes * (logs.keep + 1)}\n"
        f"SystemMaxFileSize={logs.size_bytes}\n"
        f"MaxFileSec={logs.age_s}s\n"
        f"MaxRetentionSec={logs.age_s * (logs.keep + 1)}s\n"
        "RateLimitIntervalSec=0\n"
        "ForwardToSyslog=no\n"
        "ForwardToWall=no\n"
    )


def watch_unit_text(service: Service) -> str:
    """The watchdog: asks for a token; a server that hangs is killed, and its unit starts it again."""
    unit = [f"Description=Watchdog of {value(service.unit)}", f"After={service.unit}.service"]
    run = [
        "Type=exec",
        # The server's own user: allowed to end the server's processes, and nobody else's.
        f"User={service.user}",
        f"Group={service.user}",
        f"LoadCredential=api_key:{key_file(service)}" if service.api_key else None,
        f"ExecStart={command([*program('watch'), service.name])}",
        f"RuntimeDirectory={watch_folder(service)}",
        # Levels of drift belong to the server's start, and outlive a restart of its watchdog.
        "RuntimeDirectoryPreserve=yes",
        "Restart=always",
        "RestartSec=10",
        *HELPER_SANDBOX,
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
    ]
    return _unit(("Unit", unit), ("Service", run), ("Install", ["WantedBy=multi-user.target"]))


def restart_unit_text(service: Service, longest_s: int, starter: str | None, *options: str) -> str:
    """The unit that restarts the server once, politely; `longest_s`: postponing, lease, drain and start
    together; `starter`: the timer or path that starts it (None: nothing does).
    """
    unit = [
        f"Description=Restart of {value(service.unit)}, one host of its group at a time",
        # Whoever stops the schedule means the restart too that waits for its hours or a quiet moment.
        f"PartOf={starter}" if starter else None,
    ]
    dropped = ("ProtectProc", "CapabilityBoundingSet")
    run = [
        "Type=oneshot",
        f"ExecStart={command([*program('restart'), service.name, *options])}",
        f"TimeoutStartSec={longest_s}",
        *(line for line in HELPER_SANDBOX if not line.startswith(dropped)),
        # For the packet filter, which refuses new connections while requests in flight end.
        "CapabilityBoundingSet=CAP_NET_ADMIN",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        # /run/bringup is gone after a boot; the socket of the server's log makes it again.
        "ReadWritePaths=/run/bringup /var/lib/bringup",
    ]
    return _unit(("Unit", unit), ("Service", run))


def drift_path_text(service: Service) -> str:
    """Starts the drift unit when the watchdog writes down that it has seen drift."""
    unit = [f"Description=Drift of {value(service.unit)}, as its watchdog sees it"]
    path = [f"PathChanged=/run/{watch_folder(service)}/drift.json", f"Unit={drift_unit(service)}.service"]
    return _unit(("Unit", unit), ("Path", path), ("Install", ["WantedBy=multi-user.target"]))


def restart_timer_text(service: Service) -> str:
    """When the server is restarted: the plan's calendar, spread so that each host has its own moment."""
    if service.restart.calendar is None:
        raise ValueError(f"{service.name} is not restarted on schedule")
    unit = [f"Description=Schedule for {value(restart_unit(service))}"]
    timer = [
        f"OnCalendar={calendars.with_zone(service.restart.calendar)}",
        f"RandomizedDelaySec={service.restart.spread_s}",
        "FixedRandomDelay=yes",
        "AccuracySec=1s",
        # A node that was off at the time has just started its server anyway.
        "Persistent=no",
    ]
    return _unit(("Unit", unit), ("Timer", timer), ("Install", ["WantedBy=timers.target"]))


def lease_unit_text() -> str:
    """The listener that peers ask before one of them restarts a server (its settings hold its address)."""
    unit = [
        "Description=One server of a group restarts at a time: this node's say",
        "Wants=network-online.target",
        "After=network-online.target",
        "StartLimitIntervalSec=0",
    ]
    run = [
        "Type=exec",
        # A user of its own: the bus does not know those of DynamicUser= where libnss-systemd is missing.
        f"User={LEASE_USER}",
        f"Group={LEASE_USER}",
        "StateDirectory=bringup-lease",
        f"ExecStart={command(program('lease'))}",
        "Restart=always",
        "RestartSec=2",
        "LimitNOFILE=256",
        "MemoryMax=128M",
        "TasksMax=32",
        *HELPER_SANDBOX,
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6",
    ]
    return _unit(("Unit", unit), ("Service", run), ("Install", ["WantedBy=multi-user.target"]))
