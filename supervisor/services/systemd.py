"""A systemd user unit. Formats: systemd.unit(5), systemd.service(5), systemd.exec(5)."""

import os
import re
from pathlib import Path

from mlxhost.supervisor.errors import EXIT_FAILED, UserError
from mlxhost.supervisor.services.service import Service, Status, ask, must, stop_seconds
from mlxhost.supervisor.settings import Timing
from mlxhost.wire.sockets import MAX_FILES

WATCHDOG_SECONDS = 30
SYSTEMCTL = ("systemctl", "--user")

_UNIT = """\
# mlxhost as a service of one user. `mlxhost service install` writes this file, with the paths of this
# machine, to ~/.config/systemd/user/{name}.service, and enables it. It runs while the user is logged in;
# `loginctl enable-linger` keeps it running from boot on. Logs: journalctl --user -u {name}

[Unit]
Description=mlxhost: a fleet of MLX models ({name})
# At most 5 starts in 5 minutes: what fails that often will not come by itself.
StartLimitIntervalSec=300
StartLimitBurst=5

[Service]
# The fleet says READY=1 once its models are loaded, and STATUS= what it does.
Type=notify
NotifyAccess=main
{environment}ExecStart={command}
# SIGHUP reads mlxhost.toml again; models that did not change are not touched.
ExecReload=/bin/kill -HUP $MAINPID
# Fetching and loading a large model takes as long as it takes; the fleet has deadlines of its own.
TimeoutStartSec=infinity
# WATCHDOG=1 comes at half this interval from the supervisor's event loop: a loop that hangs is started anew.
WatchdogSec={watchdog}
# On failure only: exit 0 is an orderly stop. A wrong configuration (exit 2) stays wrong.
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2
# SIGTERM goes to the supervisor alone, which lets requests in flight finish (30 s), ends its workers and
# exits; what is left after TimeoutStopSec, which is longer than all that, is killed.
KillMode=mixed
KillSignal=SIGTERM
TimeoutStopSec={stop}
# A worker that the kernel kills for memory is restarted by the fleet; the others go on.
OOMPolicy=continue
# Each stream and each worker takes a descriptor or two.
LimitNOFILE={files}
UMask=0077
NoNewPrivileges=yes
StandardOutput=journal
StandardError=journal

[Install]
WantedBy=default.target
"""


class Systemd:
    """The user's own systemd."""

    def path(self, name: str) -> Path:
        base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        return Path(base).expanduser() / "systemd" / "user" / f"{name}.service"

    def text(self, service: Service) -> str:
        variables = (f"Environment={quoted(f'{k}={v}')}\n" for k, v in service.environment.items())
        return _UNIT.format(
            name=service.name,
            environment="".join(variables),
            command=" ".join(quoted(word, command=True) for word in service.command),
            watchdog=WATCHDOG_SECONDS,
            stop=stop_seconds(Timing()),
            files=MAX_FILES,
        )

    def load(self, name: str) -> None:
        must([*SYSTEMCTL, "daemon-reload"])
        must([*SYSTEMCTL, "enable", f"{name}.service"])
        # Loading models may take minutes; `service status` and the journal tell how far it is.
        must([*SYSTEMCTL, "restart", "--no-block", f"{name}.service"])

    def unload(self, name: str) -> None:
        stopping = stop_seconds(Timing()) + 10.0
        done = ask([*SYSTEMCTL, "disable", "--now", f"{name}.service"], timeout_s=stopping)
        as_wanted = any(words in done.stderr for words in ("not loaded", "does not exist"))
        if done.returncode and not as_wanted:
            raise UserError(f"systemctl disable {name}: {done.stderr.strip()}", EXIT_FAILED)

    def forget(self) -> None:
        """After the file is gone."""
        must([*SYSTEMCTL, "daemon-reload"])

    def status(self, name: str) -> Status:
        wanted = ("ActiveState", "SubState", "MainPID", "StatusText", "Result")
        shown = must([*SYSTEMCTL, "show", f"{name}.service", f"--property={','.join(wanted)}"])
        values = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
        pid = int(values.get("MainPID") or 0)
        words = [values.get("ActiveState", ""), values.get("SubState", ""), values.get("StatusText", "")]
        return Status(
            installed=self.path(name).exists(),
            running=values.get("ActiveState") in ("active", "activating", "reloading"),
            path=self.path(name),
            pid=pid or None,
            detail=", ".join(filter(None, words)),
        )


def quoted(word: str, *, command: bool = False) -> str:
    """`word` as one word of a unit file: specifiers and, in a command, variables are taken literally."""
    word = word.replace("%", "%%")
    if command:
        word = word.replace("$", "$$")
    if re.fullmatch(r"[\w@%+=:,./$-]+", word, re.ASCII):
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")
    return f'"{escaped}"'
