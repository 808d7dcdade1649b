"""Runs inside a provisioned root: starts what the units start, has a conversation of two turns, prints what happened.

Standard library alone, run by the image's own interpreter, so that nothing but the image is tested. Commands, users
and environment come from the installed unit files.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

UNITS = Path("/usr/lib/systemd/system")
NODE_FILE = Path("/etc/kvduplex/node.yaml")
READY_S = 240.0
STOP_S = 60.0
ROUTER = ("127.0.0.1", 8000)
CLIENT_KEY, ENGINE_KEY = "client-key", "engine-key"
USAGE = re.compile(r"^vllm:kv_cache_usage_perc\{[^}]*\} ([0-9.e+-]+)", re.MULTILINE)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
METRIC = re.compile(
    r'^vllm:prompt_tokens_by_source_total\{[^}]*source="external_kv_transfer"[^}]*\} ([0-9.e+]+)', re.MULTILINE
)
NODE = """\
version: 1
cluster: image-test
role: all
backend: host
model: {{id: {model}, served_name: tiny}}
keys: {{engines: {{file: /etc/kvduplex/engine.key}}, clients: {{file: /etc/kvduplex/client.keys}}}}
drain: {{timeout_s: 10}}
engine:
  start_timeout_s: 230
  options: {{kv_space_gib: 0.5, max_model_len: 2048, environment: {{VLLM_SERVER_DEV_MODE: "1"}}}}
"""


class Service:
    """One unit's main process, started as systemd would start it."""

    def __init__(self, unit: str, instance: str = "") -> None:
        self.name = f"{unit}{instance}"
        text = (UNITS / f"{unit}.service").read_text()
        self.directives = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z]\w+=", line))
        self.command = self.directives["ExecStart"].replace("%i", instance).split()
        self.runtime = Path("/run") / self.directives.get("RuntimeDirectory", "").replace("%i", instance)
        self.notices: list[str] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = f"/run/notify-{self.name.replace('@', '-')}"
        self.socket.bind(address)
        shutil.chown(address, self.directives.get("User", "root"))
        self.process = self._start(address)

    def _start(self, address: str) -> subprocess.Popen[bytes]:
        user = pwd.getpwnam(self.directives.get("User", "root"))
        for folder in (self.runtime, Path("/var/lib/kvduplex"), Path("/var/log/kvduplex")):
            folder.mkdir(parents=True, exist_ok=True)
            os.chown(folder, user.pw_uid, user.pw_gid)
        environment = {
            "PATH": self.directives.get("Environment", PATH).removeprefix("PATH="),
            "HOME": user.pw_dir,
            "USER": user.pw_name,
            "NOTIFY_SOCKET": address,
            "RUNTIME_DIRECTORY": str(self.runtime),
            "STATE_DIRECTORY": "/var/lib/kvduplex",
        }
        log = Path(f"/run/{self.name}.out").open("wb")  # noqa: SIM115 - inherited by the process
        return subprocess.Popen(
            self.command,
            env=environment,
            user=user.pw_uid,
            group=user.pw_gid,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def run_to_end(self, seconds: float) -> int:
        return self.process.wait(seconds)

    @property
    def ready(self) -> bool:
        """Read what the service has told; systemd's own queue is as short."""
        self.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self.notices.append(self.socket.recv(4096).decode())
        return any("READY=1" in notice for notice in self.notices)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def output(self) -> str:
        logs = [Path(f"/run/{self.name}.out"), *sorted(Path("/var/log/kvduplex").glob("*.log"))]
        return "\n".join(f"--- {log}\n{log.read_text(errors='replace')[-4000:]}" for log in logs)


def wait_ready(services: list[Service], deadline: float) -> None:
    while waiting := [service for service in services if not service.ready]:
        for service in waiting:
            if service.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{service.name}: not ready (status {service.process.poll()})\n{service.output()}")
        time.sleep(0.2)


def request(
    method: str, path: str, body: object = None, to: tuple[str, int] = ROUTER, key: str = CLIENT_KEY
) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(*to, timeout=120)
    content = json.dumps(body) if body is not None else None
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.request(method, path, content, headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), {key.lower(): value for key, value in answer.getheaders()}


def wait_until_routable(seconds: float) -> None:
    """As a load balancer does: the router looks at its engines every two seconds."""
    deadline = time.monotonic() + seconds
    while (answer := request("GET", "/ready"))[0] != 200:
        if time.monotonic() > deadline:
            raise SystemExit(f"the router is not ready {seconds:.0f} s after its engines: {answer[1][:500]}")
        time.sleep(0.2)


def pulled_tokens() -> float:
    _, text, _ = request("GET", "/metrics", to=("127.0.0.1", 8100))
    return sum(float(value) for value in METRIC.findall(text))


def evict_prefill(seconds: float) -> None:
    """Empty the prefill engine's own prefix cache, which would hold the history otherwise; in use, it cannot be."""
    engine, deadline = ("127.0.0.1", 8100), time.monotonic() + seconds
    while (found := USAGE.findall(request("GET", "/metrics", to=engine)[1])) and float(found[0]) > 0:
        if time.monotonic() > deadline:
            raise SystemExit(f"the prefill engine still holds blocks after {seconds:.0f} s")
        time.sleep(0.2)
    status, text, _ = request("POST", "/reset_prefix_cache", to=engine, key=ENGINE_KEY)
    if status != 200:
        raise SystemExit(f"the prefill engine's cache could not be emptied: {status} {text[:500]}")


def turn(messages: list[dict[str, str]]) -> tuple[str, dict[str, str]]:
    body = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0, "conversation_id": "image-test"}
    status, text, headers = request("POST", "/v1/chat/completions", body)
    if status != 200:
        raise SystemExit(f"a turn was answered with {status}: {text[:500]}")
    return json.loads(text)["choices"][0]["message"]["content"], headers


def refused_without_a_key() -> int:
    connection = http.client.HTTPConnection(*ROUTER, timeout=30)
    connection.request("POST", "/v1/chat/completions", "{}", {"Content-Type": "application/json"})
    return connection.getresponse().status


def conversation() -> dict[str, object]:
    """Two turns; the second one long enough that pulling the first one's KV is worth it."""
    messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 12}]
    first, _ = turn(messages)
    evict_prefill(40)
    before = pulled_tokens()
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And then?"}]
    second, headers = turn(messages)
    wanted = ("x-kvduplex-plan", "x-kvduplex-cached-tokens")
    return {"answers": [first, second], "pulled": pulled_tokens() - before, **{key: headers.get(key) for key in wanted}}


def leftovers() -> list[str]:
    user = pwd.getpwnam("kvduplex").pw_uid
    found = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit() and entry.stat().st_uid == user]
    return [(entry / "cmdline").read_bytes().replace(b"\0", b" ").decode() for entry in found]


def main() -> None:
    made = subprocess.run(
        ["/usr/local/bin/kvduplex", "model", "make", "--cache", "/var/lib/kvduplex/models"],
        check=True, capture_output=True, text=True, user="kvduplex", group="kvduplex", timeout=120,
        env={"PATH": "/usr/bin:/bin", "HOME": "/var/lib/kvduplex"},
    )  # fmt: skip
    NODE_FILE.write_text(NODE.format(model=made.stdout.strip()))
    secrets = {
        Path("/etc/kvduplex/engine.key"): f"{ENGINE_KEY}\n",
        Path("/etc/kvduplex/client.keys"): f"tester {CLIENT_KEY}\n",
    }
    for file, text in secrets.items():
        file.write_text(text)
    for file in (NODE_FILE, *secrets):
        os.chown(file, 0, pwd.getpwnam("kvduplex").pw_gid)
        file.chmod(0o640)
    report: dict[str, object] = {}
    doctor = Service("kvduplex-doctor")
    report["selftest_status"] = doctor.run_to_end(120)
    report["selftest"] = Path(f"/run/{doctor.name}.out").read_text()
    deadline = time.monotonic() + READY_S
    services = [
        Service("kvduplex-engine@", "prefill"),
        Service("kvduplex-engine@", "decode"),
        Service("kvduplex-router"),
    ]
    try:
        wait_ready(services, deadline)
        wait_until_routable(20)
        report["without_a_key"] = refused_without_a_key()
        report |= conversation()
    finally:
        report["stopped"] = [service.stop() for service in reversed(services)]
    report["leftovers"] = leftovers()
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
