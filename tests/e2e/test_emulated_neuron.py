"""The connector of a Neuron recipe on an emulated Neuron platform: its way through vLLM, without the device."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvduplex.accel_cluster import AccelCluster, plan_cluster
from kvduplex.folders import Folders
from kvduplex.tinymodel import ensure_model
from kvduplex.tinymodel.sizes import SIZES
from kvduplex_transfer.engine_options import ConnectorKind
from kvduplex_transfer.interface import EnginePlan, Role

pytestmark = pytest.mark.engine

HERE = Path(__file__).parent / "emulated_neuron"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH with the platform installed as vLLM finds plugins: by an entry point."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(HERE / "emulated_platform.py", folder / "emulated_neuron_platform.py")
    metadata = folder / "emulated_neuron-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-neuron\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nemulated_neuron = emulated_neuron_platform:register\n"
    )
    return folder


@pytest.fixture(scope="module")
def model() -> str:
    """The tiny model that `kvduplex serve cpu` generates."""
    folders = Folders.from_environ(os.environ, home=Path.home(), uid=os.getuid())
    return str(ensure_model(SIZES["tiny"], folders.cache, report=print))


def planned(model: str, connector: ConnectorKind, role: Role, **settings: Any) -> EnginePlan:
    """One engine of the Llama recipe, with the tiny model and as few cores."""
    common = {"connector": connector, "tensor_parallel_size": 1, "max_model_len": 2048, **settings}
    plans = plan_cluster(AccelCluster(backend="neuron", recipe="llama-3.1-8b-trn2", model=model, common=common)).plans
    return next(plan for plan in plans if plan.role is role)


def open_connector(plan: EnginePlan, plugin: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the worker's part of the engine in a process of its own."""
    environment = {name: value for name, value in plan.environment.items() if not name.startswith("FI_")}
    values = {"argv": plan.argv[3:], "rendezvous": str(folder / "rendezvous")}
    (folder / "plan.json").write_text(json.dumps(values))
    return subprocess.run(
        [sys.executable, str(HERE / "open_connector.py"), str(folder / "plan.json")],
        env={**os.environ, **environment, "PYTHONPATH": str(plugin), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.parametrize(
    ("connector", "role", "name"),
    [
        (ConnectorKind.STOCK, Role.PREFILL, "NixlPullConnector"),
        (ConnectorKind.LEASED, Role.PREFILL, "LeasedNixlConnector"),
        (ConnectorKind.LEASED, Role.DECODE, "LeasedNixlConnector"),
    ],
)
def test_the_connector_registers_device_memory(
    plugin: Path, model: str, tmp_path: Path, connector: ConnectorKind, role: Role, name: str
) -> None:
    done = open_connector(planned(model, connector, role), plugin, tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    layers = found.pop("layers")
    assert found == {
        "platform": "neuron",
        "out_of_tree": True,
        "connector": name,
        "worker": "NixlPullConnectorWorker",
        "device": "neuron",
        "buffer": "cuda",
        "staged_in_host_memory": False,
        "memory": "DRAM",
        "block_size": 32,
        "regions": layers,
    }


def test_without_the_platforms_word_vllm_refuses_the_device(plugin: Path, model: str, tmp_path: Path) -> None:
    """What the test above shows depends on the map of supported devices that the platform gives."""
    mute = tmp_path / "mute"
    shutil.copytree(plugin, mute)
    source = mute / "emulated_neuron_platform.py"
    source.write_text(source.read_text().replace("get_nixl_supported_devices", "said_to_nobody"))
    done = open_connector(planned(model, ConnectorKind.STOCK, Role.PREFILL), mute, tmp_path)
    assert done.returncode != 0
    assert "neuron is not supported" in done.stderr
