"""YAML files mean one thing, and each fault of one is told as a fault of the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvduplex.cpu_cluster import parse_settings
from kvduplex.errors import UsageError
from kvduplex.node.document import NodeConfigError, load_node, read_node
from kvduplex.node.secrets import client_key_entries
from kvduplex_transfer.errors import ConfigError
from kvduplex_transfer.recipes import Catalogue
from kvduplex_transfer.strictyaml import parse_yaml

UNREADABLE = {
    "twice": "a: 1\nb: 2\na: 3\n",
    "twice within": "a:\n  b: {c: 1, c: 2}\n",
    "twice, quoted": "a: 1\n'a': 2\n",
    "deep": "a: " + "[" * 3000 + "]" * 3000,
    "digits": "a: " + "1" * 6000,
    "date": "a: 2026-99-99",
    "tag": "!!python/object/apply:os.getcwd []",
}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_whatever_cannot_be_read_is_an_error_of_yaml(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        parse_yaml(text)


def test_the_key_that_is_given_twice_and_its_line_are_named() -> None:
    with pytest.raises(yaml.YAMLError, match=r"(?s)region is given twice.*line 3"):
        parse_yaml("region: a\nzone: b\nregion: c\n")


def test_values_are_those_of_a_safe_loader() -> None:
    text = "base: &base {a: 1, b: [x, 2.5, null, true]}\nlower: {deep: &own {<<: *base, a: 2}}\ntop: {<<: *own, a: 3}\n"
    assert parse_yaml(text) == yaml.safe_load(text)
    assert parse_yaml(text)["top"] == {"a": 3, "b": ["x", 2.5, None, True]}
    assert parse_yaml("") is None


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_files_and_options_are_refused_and_not_misread(text: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match="is not YAML"):
        Catalogue("neuron", tmp_path).load("mine")
    with pytest.raises(NodeConfigError, match="not YAML"):
        load_node(text)
    with pytest.raises(UsageError, match="is not YAML"):
        parse_settings([f"additional_config={text}"])


def test_files_in_another_encoding_are_named(tmp_path: Path) -> None:
    file = tmp_path / "node.yaml"
    file.write_bytes(b"role: decode # caf\xe9\n")
    with pytest.raises(NodeConfigError, match=r"node\.yaml: not UTF-8"):
        read_node(file, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        Catalogue("neuron", tmp_path).load(str(file))


def test_a_line_of_keys_that_looks_like_a_date_is_a_key() -> None:
    assert len(client_key_entries("2026-99-99\n", where="secret")) == 1


def test_a_recipe_below_a_folder_of_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Catalogue("neuron", Path()).load("~nobody-of-that-name/mine.yaml")
