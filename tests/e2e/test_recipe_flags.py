"""Every shipped recipe against vLLM's own argument parser, so that no flag is invented."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest

from kvduplex_gpu.backend import GpuBackend, gpu_recipes
from kvduplex_neuron.backend import NeuronBackend, neuron_recipes
from kvduplex_transfer.interface import EnginePlan

pytestmark = pytest.mark.engine

BACKENDS: dict[str, NeuronBackend | GpuBackend] = {
    "neuron": NeuronBackend(interpreter="python3"),
    "gpu": GpuBackend(interpreter="python3"),
}
RECIPES = [("neuron", name) for name in neuron_recipes().names] + [("gpu", name) for name in gpu_recipes().names]


@pytest.fixture(scope="module")
def parser() -> Any:
    """The parser of ``python -m vllm.entrypoints.openai.api_server``."""
    pytest.importorskip("vllm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's own imports
        cli_args = importlib.import_module("vllm.entrypoints.launchers.cli_args")
        flexible = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
        parser = cli_args.make_arg_parser(flexible())

    def parse(argv: list[str]) -> Any:
        namespace = parser.parse_args(argv)
        cli_args.validate_parsed_serve_args(namespace)
        return namespace

    return parse


def plans(backend: str, name: str) -> list[EnginePlan]:
    catalogue = neuron_recipes() if backend == "neuron" else gpu_recipes()
    recipe = catalogue.load(name).overridden({"advertised_host": "10.0.1.10"})
    return [BACKENDS[backend].engine_plan(recipe, role) for role in recipe.roles()]


@pytest.mark.parametrize(("backend", "name"), RECIPES, ids=[name for _, name in RECIPES])
def test_vllm_accepts_the_command_line(parser: Any, backend: str, name: str) -> None:
    for plan in plans(backend, name):
        interpreter, dash_m, module, *argv = plan.argv
        assert (interpreter, dash_m, module) == ("python3", "-m", "vllm.entrypoints.openai.api_server")
        parsed = parser(argv)
        assert parsed.port == plan.ports["http"]
        assert parsed.enable_log_requests is False


def test_the_parser_refuses_an_invented_flag(parser: Any) -> None:
    with pytest.raises(SystemExit):
        parser(["--model", "m", "--kv-duplex-turbo"])
