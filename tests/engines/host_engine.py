"""An engine for the protocol's own tests: every "node" is a process on this machine, with a directory of its own.

It starts agents as any engine does, and knows nothing of them but their processes. Tests find its last instance in
`STARTED`, to hurt what it has started.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from typing import ClassVar

from airdist.engines.remote import AgentCommand, RemoteEngine

STARTED: list[HostNodes] = []


class HostEngine(RemoteEngine):
    name: ClassVar[str] = "host"
    keys: ClassVar[frozenset[str]] = frozenset({"missing", "environ", "restarts", "addresses"})

    def spawn(self, command: AgentCommand) -> HostNodes:
        nodes = HostNodes(command)
        nodes.start()
        STARTED.append(nodes)
        return nodes


class HostNodes:
    def __init__(self, command: AgentCommand) -> None:
        self.command = command
        self.agents: list[subprocess.Popen[bytes]] = []
        self.job_id = None
        self.restarts = command.options.get("restarts", 0)

    def start(self) -> None:
        command = self.command
        with (command.directory / "logs" / "agent.log").open("ab") as log:
            for node in range(command.nodes):
                if node not in command.options.get("missing", ()):
                    own = {name: value.format(node=node) for name, value in command.options.get("environ", {}).items()}
                    self.agents.append(
                        subprocess.Popen(
                            command.argv(node),
                            env={**os.environ, **own, **command.environ()},
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            start_new_session=True,
                        )
                    )

    def state(self) -> str:
        return "running" if any(agent.poll() is None for agent in self.agents) else "ended"

    def words(self) -> str:
        return (self.command.directory / "logs" / "agent.log").read_text()[-2000:]

    def again(self) -> bool:
        if not self.restarts:
            return False
        self.restarts -= 1
        self.close(0)
        self.agents.clear()
        self.start()
        return True

    def close(self, seconds: float) -> None:
        for agent in self.agents:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(seconds)
            if agent.poll() is None:
                agent.kill()
                agent.wait()
