"""The bundle: one archive with everything a machine needs to become an image, the same bytes for the same content."""

from __future__ import annotations

import gzip
import hashlib
import io
import shlex
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from kvduplex_image.checksums import sha256_of
from kvduplex_image.errors import ImageError
from kvduplex_image.recipe import ImageRecipe

__all__ = ["AMI_FOLDER", "Bundle", "make_bundle"]

AMI_FOLDER = Path(__file__).resolve().parents[1]
"""Folder with the provisioning scripts, units and image recipes."""

_PARTS = ("provision", "systemd", "files")


@dataclass(frozen=True, slots=True)
class Bundle:
    """What goes into the archive, by path there.

    Attributes:
        files: Content of small files.
        large: Files to copy from elsewhere, such as wheels.
        executable: Paths that keep the executable bit.
    """

    files: Mapping[str, bytes]
    large: Mapping[str, Path] = field(default_factory=dict)
    executable: frozenset[str] = field(default_factory=frozenset)

    @property
    def checksums(self) -> str:
        """Content of ``SHA256SUMS``, as ``sha256sum --check`` reads it."""
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in self.files.items()}
        digests |= {name: sha256_of(path) for name, path in self.large.items()}
        return "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))

    def write(self, archive: Path) -> str:
        """Write the archive and return its SHA-256 digest."""
        archive.parent.mkdir(parents=True, exist_ok=True)
        # No times, owners or file name inside, so that equal content gives equal bytes.
        with (
            archive.open("wb") as file,
            gzip.GzipFile(fileobj=file, mode="wb", compresslevel=6, mtime=0, filename="") as zipped,
            tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name, source in self._members():
                with _opened(source) as content:
                    tar.addfile(self._entry(name, source), content)
        return sha256_of(archive)

    def unpack(self, folder: Path) -> None:
        """Write the files below `folder`, as unpacking the archive would."""
        for name, source in self._members():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with _opened(source) as content, path.open("wb") as target:
                shutil.copyfileobj(content, target)
            path.chmod(self._mode(name))

    def _members(self) -> list[tuple[str, bytes | Path]]:
        everything: dict[str, bytes | Path] = {**self.files, **self.large, "SHA256SUMS": self.checksums.encode()}
        return sorted(everything.items(), key=lambda member: member[0])

    def _entry(self, name: str, source: bytes | Path) -> tarfile.TarInfo:
        entry = tarfile.TarInfo(name)
        entry.size = len(source) if isinstance(source, bytes) else source.stat().st_size
        entry.mode = self._mode(name)
        return entry

    def _mode(self, name: str) -> int:
        return 0o755 if name in self.executable else 0o644


def make_bundle(
    recipe: ImageRecipe,
    *,
    parent_image: str,
    wheel: Path,
    requirements: str,
    engine_requirements: str | None = None,
    wheels: Path | None = None,
    folder: Path = AMI_FOLDER,
) -> Bundle:
    """Collect what `recipe` needs.

    Args:
        recipe: The image.
        parent_image: Id that the recipe's parent resolved to.
        wheel: The built ``kvduplex-*.whl``.
        requirements: Pinned packages with checksums for the image's own virtual environment.
        engine_requirements: The same for the engine's, where it has one of its own.
        wheels: Folder of wheels to carry along, so that no package index is asked.
        folder: Where the provisioning scripts are.

    Raises:
        ImageError: A part is missing, or a requirement has no checksum.
    """
    if not wheel.is_file() or not wheel.name.startswith("kvduplex-"):
        raise ImageError(f"{wheel}: not a built wheel of kvduplex; make one with `pip wheel --no-deps .`")
    files = {wheel.name: wheel.read_bytes(), "settings.env": _settings(recipe, parent_image)}
    files["requirements.txt"] = _checked("requirements.txt", requirements)
    if recipe.engine_python and engine_requirements is None:
        raise ImageError(f"engine.requirements: {recipe.engine_python} needs a file of pinned packages with checksums")
    if engine_requirements is not None:
        files["engine-requirements.txt"] = _checked("engine-requirements.txt", engine_requirements)
    scripts = {str(path.relative_to(folder)): path for part in _PARTS for path in _files(folder / part)}
    files |= {name: path.read_bytes() for name, path in scripts.items()}
    large = {f"wheels/{path.name}": path for path in sorted(wheels.glob("*.whl"))} if wheels is not None else {}
    executable = frozenset(name for name, path in scripts.items() if path.stat().st_mode & 0o100)
    return Bundle(files=files, large=large, executable=executable)


def _settings(recipe: ImageRecipe, parent_image: str) -> bytes:
    settings = recipe.settings(parent_image=parent_image)
    return "".join(f"{key}={shlex.quote(value)}\n" for key, value in settings.items()).encode()


def _checked(name: str, text: str) -> bytes:
    for number, line in enumerate(text.splitlines(), start=1):
        if line and not line.startswith("#") and " --hash=sha256:" not in line:
            raise ImageError(f"{name}:{number}: {line!r:.80} has no --hash=sha256:...; packages go by checksum")
    return text.encode()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)


def _opened(source: bytes | Path) -> BinaryIO:
    return io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
