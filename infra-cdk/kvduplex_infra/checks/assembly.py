"""The templates of a cluster as one graph: resources by type, references followed across stacks. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Assembly", "Place", "Resource"]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a resource stands: stack and logical id."""

    stack: str
    logical_id: str

    def __str__(self) -> str:
        return f"{self.stack}/{self.logical_id}"


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource of one template."""

    place: Place
    type: str
    properties: Mapping[str, Any]


class Assembly:
    """Templates by stack name.

    Args:
        templates: As CloudFormation takes them.
    """

    def __init__(self, templates: Mapping[str, Mapping[str, Any]]) -> None:
        self._templates = templates
        self._exports = {
            _text(output["Export"]["Name"]): (stack, output["Value"])
            for stack, template in templates.items()
            for output in template.get("Outputs", {}).values()
            if "Export" in output
        }

    @classmethod
    def of_folder(cls, folder: Path) -> Assembly:
        """Every ``*.template.json`` of a CDK output folder."""
        suffix = ".template.json"
        found = {p.name.removesuffix(suffix): json.loads(p.read_text()) for p in sorted(folder.glob(f"*{suffix}"))}
        return cls(found)

    def resources(self, kind: str) -> Iterator[Resource]:
        """Every resource of a CloudFormation type, in a stable order."""
        for stack, template in sorted(self._templates.items()):
            for logical_id, body in sorted(template.get("Resources", {}).items()):
                if body["Type"] == kind:
                    yield Resource(Place(stack, logical_id), kind, body.get("Properties", {}))

    def bodies(self) -> Iterator[tuple[Place, Mapping[str, Any]]]:
        """Every resource with all its attributes."""
        for stack, template in sorted(self._templates.items()):
            for logical_id, body in sorted(template.get("Resources", {}).items()):
                yield Place(stack, logical_id), body

    def target(self, stack: str, value: Any) -> Place | None:
        """The resource that a Ref, a GetAtt, or an import of one leads to; None for literals."""
        if not isinstance(value, Mapping) or len(value) != 1:
            return None
        (function, argument), *_ = value.items()
        if function == "Ref":
            return Place(stack, argument)
        if function == "Fn::GetAtt":
            return Place(stack, argument[0] if isinstance(argument, list) else argument.split(".")[0])
        if function == "Fn::ImportValue":
            exporter = self._exports.get(_text(argument))
            return None if exporter is None else self.target(*exporter)
        return None

    def resource(self, place: Place | None) -> Resource | None:
        """The resource at `place`."""
        if place is None:
            return None
        body = self._templates.get(place.stack, {}).get("Resources", {}).get(place.logical_id)
        return None if body is None else Resource(place, body["Type"], body.get("Properties", {}))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
