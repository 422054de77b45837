"""A launchd agent of one user. Format: launchd.plist(5). Written from the manual: no Mac was at hand."""

import os
import plistlib
import re
from pathlib import Path
from xml.sax.saxutils import escape

from mlxhost.supervisor.services.service import Service, Status, ask, must, stop_seconds
from mlxhost.supervisor.settings import Timing
from mlxhost.wire.sockets import MAX_FILES

_PLIST = """\
<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE plist PUBLIC "-//Apple//DTD PLIST 1.0//EN" "http://www.apple.com/DTDs/PropertyList-1.0.dtd">
<!-- mlxhost as an agent of one user. `mlxhost service install` writes this file, with the paths of this
     machine, to ~/Library/LaunchAgents/{name}.plist, and loads it. It runs while the user is logged in. -->
<plist version="1.0">
<dict>
  <key>Label</key>
  <string>{name}</string>
  <key>ProgramArguments</key>
  <array>
{command}
  </array>
  <key>EnvironmentVariables</key>
  <dict>
{environment}
  </dict>
  <key>RunAtLoad</key>
  <true/>
  <!-- On failure only: exit 0 is an orderly stop. -->
  <key>KeepAlive</key>
  <dict>
    <key>SuccessfulExit</key>
    <false/>
  </dict>
  <!-- Not sooner than this after the last start: a wrong configuration must not spin. -->
  <key>ThrottleInterval</key>
  <integer>30</integer>
  <!-- From SIGTERM to SIGKILL: longer than requests in flight (30 s), workers and frontends take to end. -->
  <key>ExitTimeOut</key>
  <integer>{stop}</integer>
  <!-- Workers lead process groups of their own; the supervisor ends them, and they end without it. -->
  <key>AbandonProcessGroup</key>
  <false/>
  <!-- Without this an agent's CPU and disk are throttled as background work. -->
  <key>ProcessType</key>
  <string>Interactive</string>
  <!-- Each stream and each worker takes a descriptor or two; the default is 256. -->
  <key>SoftResourceLimits</key>
  <dict>
    <key>NumberOfFiles</key>
    <integer>{files}</integer>
  </dict>
  <key>Umask</key>
  <integer>63</integer>
  <key>StandardOutPath</key>
  <string>{out}</string>
  <key>StandardErrorPath</key>
  <string>{err}</string>
</dict>
</plist>
"""


class Launchd:
    """The launchd of the user's graphical session."""

    def path(self, name: str) -> Path:
        return Path("~/Library/LaunchAgents").expanduser() / f"{name}.plist"

    def text(self, service: Service) -> str:
        variables = service.environment.items()
        text = _PLIST.format(
            name=escape(service.name),
            command="\n".join(f"    <string>{escape(word)}</string>" for word in service.command),
            environment="\n".join(
                f"    <key>{escape(key)}</key>\n    <string>{escape(value)}</string>"
                for key, value in variables
            ),
            stop=stop_seconds(Timing()),
            files=MAX_FILES,
            out=escape(str(service.logs / f"{service.name}.log")),
            err=escape(str(service.logs / f"{service.name}.log")),
        )
        plistlib.loads(text.encode())
        return text

    def load(self, name: str) -> None:
        ask(["launchctl", "bootout", self._target(name)], timeout_s=stop_seconds(Timing()) + 10.0)
        must(["launchctl", "bootstrap", self._domain(), str(self.path(name))])

    def unload(self, name: str) -> None:
        ask(["launchctl", "bootout", self._target(name)], timeout_s=stop_seconds(Timing()) + 10.0)

    def forget(self) -> None:
        """launchd keeps nothing of a file that is gone."""

    def status(self, name: str) -> Status:
        done = ask(["launchctl", "print", self._target(name)])
        pid = re.search(r"^\s*pid = (\d+)$", done.stdout, re.MULTILINE)
        state = re.search(r"^\s*state = (.+)$", done.stdout, re.MULTILINE)
        return Status(
            installed=self.path(name).exists(),
            running=pid is not None,
            path=self.path(name),
            pid=int(pid[1]) if pid else None,
            detail=state[1] if state else "not loaded",
        )

    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    def _target(self, name: str) -> str:
        return f"{self._domain()}/{name}"
