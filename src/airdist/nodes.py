"""What the nodes of a launch said of themselves, as one report of what is not as it is where the launch was made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Nodes"]


class Nodes:
    """Collects what nodes say when they come.

    Args:
        withheld: variables that look like secrets and were not sent.
    """

    def __init__(self, withheld: Sequence[str] = ()) -> None:
        self._withheld = list(withheld)
        self._said: dict[int, Mapping[str, Any]] = {}

    def add(self, message: Mapping[str, Any]) -> None:
        """A node has come."""
        self._said[message["node"]] = message

    def tags(self) -> dict[str, str]:
        """For the MLflow run: which machines it ran on."""
        hosts = [self._said[node]["host"] for node in sorted(self._said)]
        return {"nodes": str(len(hosts)), "hosts": ", ".join(dict.fromkeys(hosts))} if hosts else {}

    def report(self) -> list[str]:
        """Lines for a person, one for each kind of difference; said once."""
        by_text: dict[str, list[str]] = {}
        for node in sorted(self._said):
            for text in _unlike(self._said[node]):
                by_text.setdefault(text, []).append(f"{node} ({self._said[node]['host']})")
        lines = [f"node{'s' if len(where) > 1 else ''} {', '.join(where)}: {text}" for text, where in by_text.items()]
        if self._said and self._withheld:
            lines.append(
                f"not sent to the nodes, as they look like secrets (env= sends them): {', '.join(self._withheld)}"
            )
        self._withheld = []
        self._said = {node: {**said, "versions": {}, "path": [], "cwd": None} for node, said in self._said.items()}
        return lines


def _unlike(said: Mapping[str, Any]) -> list[str]:
    texts = []
    if said["versions"]:
        versions = (f"{name} {there} (here {here})" for name, (here, there) in sorted(said["versions"].items()))
        texts.append(f"other versions: {', '.join(versions)}")
    if said["path"]:
        texts.append(f"not there, though in sys.path here: {', '.join(said['path'])}")
    if said["cwd"] == said["run_dir"]:
        texts.append("the working directory is not there; ranks start in an empty one")
    return texts
