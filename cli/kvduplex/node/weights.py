"""Copies weights and compiled graphs from S3 to this machine: resumable, in parallel, complete or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from kvduplex.node.aws import explained
from kvduplex.node.config import Model
from kvduplex.node.errors import WeightsError

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client

__all__ = ["COMPLETE", "copy_prefix", "model_folder"]

COMPLETE = ".kvduplex-complete"
"""File in a copied folder that holds the ETag of each object it was copied from."""
_FILES_AT_ONCE = 8
_PART_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Object:
    key: str
    path: PurePosixPath
    size: int
    etag: str


def model_folder(model: Model) -> Path:
    """Folder that a model copied from S3 lies in, apart for each revision."""
    return Path(model.folder) / model.id.replace("/", "--") / (model.revision or "default")


def copy_prefix(url: str, folder: Path, *, s3: S3Client, report: Callable[[str], None]) -> None:
    """Make `folder` hold every object below the prefix `url`; objects that are there unchanged are not copied again.

    Args:
        url: ``s3://BUCKET/PREFIX``.
        folder: Where to; files of earlier copies that the prefix no longer has are deleted.
        s3: Client of the bucket's region.
        report: Is told what is going on.

    Raises:
        WeightsError: The prefix is empty, a name leaves the folder, or a copy fails.
    """
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    remedy = "Check the URL, and that the instance's role may call s3:ListBucket and s3:GetObject there."
    with explained(f"copying {url}", WeightsError, remedy=remedy):
        objects = list(_listed(s3, bucket, prefix, url))
        known = _known(folder)
        missing = [item for item in objects if known.get(str(item.path)) != item.etag or not _whole(folder, item)]
        total = sum(item.size for item in missing)
        report(f"{url}: {len(missing)} of {len(objects)} files to copy, {total / 2**30:.1f} GiB")
        _copy_all(s3, bucket, missing, folder)
    _delete_strangers(folder, objects)
    _write_whole(folder / COMPLETE, json.dumps({str(item.path): item.etag for item in objects}).encode())


def _listed(s3: S3Client, bucket: str, prefix: str, url: str) -> Iterable[_Object]:
    base = prefix.rstrip("/") + "/" if prefix else ""
    found = False
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=base):
        for entry in page.get("Contents", []):
            if entry["Key"].endswith("/"):
                continue  # a folder marker of the console
            found = True
            path = PurePosixPath(entry["Key"][len(base) :])
            if path.is_absolute() or ".." in path.parts:
                raise WeightsError(f"{url}: object {entry['Key']!r} would leave the folder; rename it")
            yield _Object(entry["Key"], path, entry["Size"], entry["ETag"])
    if not found:
        raise WeightsError(f"{url}: no objects below this prefix; check bucket, prefix and region")


def _copy_all(s3: S3Client, bucket: str, objects: list[_Object], folder: Path) -> None:
    with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="weights") as pool:
        copies = [pool.submit(_copy, s3, bucket, item, folder / item.path) for item in objects]
        done, pending = wait(copies, return_when=FIRST_EXCEPTION)
        for copy in pending:
            copy.cancel()
        for copy in done:
            copy.result()


def _copy(s3: S3Client, bucket: str, item: _Object, target: Path) -> None:
    from boto3.s3.transfer import TransferConfig  # noqa: PLC0415 - only where boto3 is

    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.part")
    config = TransferConfig(multipart_threshold=_PART_BYTES, multipart_chunksize=_PART_BYTES, max_concurrency=8)
    s3.download_file(bucket, item.key, str(part), Config=config)
    if (size := part.stat().st_size) != item.size:
        raise WeightsError(
            f"s3://{bucket}/{item.key}: {size} bytes arrived of {item.size}; it changed while it was copied"
        )
    part.replace(target)


def _known(folder: Path) -> dict[str, str]:
    try:
        known = json.loads((folder / COMPLETE).read_bytes())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _whole(folder: Path, item: _Object) -> bool:
    path = folder / item.path
    return path.is_file() and path.stat().st_size == item.size


def _delete_strangers(folder: Path, objects: Iterable[_Object]) -> None:
    # An old shard beside new ones would be loaded as if it belonged to them.
    wanted = {folder / item.path for item in objects} | {folder / COMPLETE}
    for path in folder.rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()


def _write_whole(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(data)
    part.replace(path)
