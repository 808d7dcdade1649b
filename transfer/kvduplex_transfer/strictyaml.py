"""YAML that means one thing: a key given twice is refused, and whatever cannot be read is a `yaml.YAMLError`.

PyYAML keeps the last of two equal keys without a word, so a setting could be lost in a long file; and it lets a few
values out as other errors: a number of thousands of digits, a date that no calendar has, thousands of brackets.
"""

from __future__ import annotations

from typing import Any

import yaml

__all__ = ["parse_yaml"]


def parse_yaml(text: str) -> Any:
    """The plain values in the one document of `text`; None when it is empty.

    Raises:
        yaml.YAMLError: It is not YAML, holds a key twice, or a value that cannot be read.
    """
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a safe loader
    except RecursionError as error:
        raise yaml.YAMLError("nested too deeply") from error


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused later, as a key that is no text
            if (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(
                    problem=f"{key.value} is given twice, and the first would be lost", problem_mark=key.start_mark
                )
            seen.add((key.tag, key.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError as error:
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from error
