"""Corpora in folders and object stores: their parts, and the manifest of those that are written.

A part is a file, or some row groups of a large Parquet file. Its results are the file
``part-NUMBER.parquet`` of the output folder, which is complete if ``_triptych/part-NUMBER.json``
exists.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import IO, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from triptych.base.errors import UserError

_MANIFEST = "_triptych"
_RUN = "run.json"
_PART = r"(part-(\d{6,}))"
"""Pattern of `CorpusPart.name`, with its number."""


class CorpusPart(NamedTuple):
    """A part of a corpus."""

    number: int
    path: str  # Path of the file in its file system
    groups: tuple[int, int] | None = None  # First row group and the one after the last; None: all

    @property
    def name(self) -> str:
        """Name of its results without their extension."""
        return f"part-{self.number:06}"


class PartRecord(NamedTuple):
    """Record of a written part in the manifest."""

    rows: int  # Number of rows
    failed: int  # Number of rows without a result
    seconds: float  # Time from reading to writing
    size: int  # Size of the results in bytes
    sha256: str  # Hash of the results
    tokens: int = 0  # Number of tokens; 0 if unknown
    times: Mapping[str, float] = MappingProxyType({})  # Seconds by what they were spent on


def open_store(option: str, uri: str) -> tuple[fs.FileSystem, str]:
    """Return the file system of a path or URI, and the path in it.

    Raises:
        UserError: The URI is not supported, or contains credentials.
    """
    if re.search(r"://[^/]*@|(?i:secret|access_key|password|token)[^/]*=", uri):
        raise UserError(
            option,
            "contains credentials, which processes and logs would show",
            remedy="Set them in the environment, such as AWS_ACCESS_KEY_ID, or use a role",
        )
    try:
        if "://" in uri:
            if uri.startswith("s3://"):  # a small object is one request
                uri += ("&" if "?" in uri else "?") + "allow_delayed_open=true"
            store, path = fs.FileSystem.from_uri(uri)
            return store, str(path)
        return fs.LocalFileSystem(), str(Path(uri).absolute())
    except (pa.ArrowException, OSError) as error:
        raise unreadable(option, uri, error) from error


def plan_parts(uri: str, part_bytes: int) -> tuple[list[CorpusPart], str]:
    """Return the parts of the files that a path or URI with ``*`` matches, and a hash of them.

    Args:
        uri: A file, a folder, or a pattern; ``*`` matches any characters, also ``/``.
        part_bytes: Size from which a Parquet file is divided between row groups.

    Raises:
        UserError: No file matches, or the files cannot be read.
    """
    store, pattern = open_store("--file", uri)
    start, *wild = re.split(r"[*?\[]", pattern, maxsplit=1)
    base = start.rpartition("/")[0] if wild else ""
    try:
        if base:
            listed = store.get_file_info(fs.FileSelector(base, recursive=True))
        elif (one := store.get_file_info(pattern)).type == fs.FileType.Directory:
            listed, pattern = store.get_file_info(fs.FileSelector(pattern, recursive=True)), "*"
        else:
            listed = [one]
        files = sorted(
            (info.path, info.size, str(info.mtime))
            for info in listed
            if info.is_file
            and fnmatch.fnmatchcase(info.path, pattern)
            and not info.base_name.startswith((".", "_"))
        )
        parts: list[CorpusPart] = []
        for path, size, _ in files:
            divided = path.endswith(".parquet") and size > part_bytes
            for groups in _divide(store, path, part_bytes) if divided else [None]:
                parts.append(CorpusPart(len(parts), path, groups))
    except (pa.ArrowException, OSError) as error:
        raise unreadable("--file", uri, error) from error
    if not parts:
        remedy = "Give a file, a folder, or a pattern such as 's3://bucket/part-*.parquet'"
        raise UserError("--file", "matches no file", given=uri, remedy=remedy)
    return parts, hashlib.sha256(json.dumps([files, part_bytes]).encode()).hexdigest()


def _divide(store: fs.FileSystem, path: str, part_bytes: int) -> Iterator[tuple[int, int]]:
    with pq.ParquetFile(path, filesystem=store) as file:
        first = size = 0
        for group in range(file.metadata.num_row_groups):
            size += file.metadata.row_group(group).total_byte_size
            if size >= part_bytes or group == file.metadata.num_row_groups - 1:
                yield first, group + 1
                first, size = group + 1, 0


class Output:
    """Folder of results with its manifest.

    Args:
        uri: Path or URI of the folder.
    """

    def __init__(self, uri: str) -> None:
        self._store, self._folder = open_store("--out", uri)
        self._uri = uri

    def start(self, identity: dict[str, object]) -> dict[int, PartRecord]:
        """Begin or continue a run, and return the records of its written parts by their number.

        Args:
            identity: Plain data that determines the results.

        Raises:
            UserError: The folder has results of another run, or cannot be written.
        """
        try:
            self._store.create_dir(f"{self._folder}/{_MANIFEST}")
            infos = self._store.get_file_info(fs.FileSelector(self._folder, recursive=True))
            sizes = {info.path.removeprefix(f"{self._folder}/"): info.size for info in infos}
            run = f"{_MANIFEST}/{_RUN}"
            before = json.loads(self._read(run)) if run in sizes else None
            if before is None and any(name.endswith(".parquet") for name in sizes):
                before = {}
            if before is None:
                self.publish(run, json.dumps(identity, indent=2).encode())
            elif other := [key for key in identity if before.get(key) != identity[key]]:
                raise UserError(
                    "--out",
                    "has results of another run",
                    given=f"other {', '.join(other)} than in {self._uri}",
                    remedy="Use the same options, files and build to continue, or another folder",
                )
            records = {}
            for name in sizes:
                if name.startswith(f"{_MANIFEST}/."):  # of a killed process
                    self._store.delete_file(f"{self._folder}/{name}")
                if found := re.fullmatch(rf"{_MANIFEST}/{_PART}\.json", name):
                    record = PartRecord(**json.loads(self._read(name)))
                    if sizes.get(f"{found[1]}.parquet") == record.size:
                        records[int(found[2])] = record
            return records
        except (pa.ArrowException, OSError) as error:
            raise unreadable("--out", self._uri, error) from error

    def add(self, part: CorpusPart, record: PartRecord) -> None:
        """Write the record of a part, whose results are written."""
        self.publish(f"{_MANIFEST}/{part.name}.json", json.dumps(record._asdict()).encode())

    def abort_uploads(self) -> None:
        """Abort the multipart uploads of results that killed processes left in S3.

        It needs boto3; uploads of other keys under the folder are not touched.
        """
        if self._store.type_name != "s3" or find_spec("boto3") is None:
            return
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError

        client, (bucket, _, folder) = boto3.client("s3"), self._folder.partition("/")
        with suppress(BotoCoreError, ClientError):  # such as a role that may not list them
            pages = client.get_paginator("list_multipart_uploads")
            for page in pages.paginate(Bucket=bucket, Prefix=f"{folder}/"):
                for upload in page.get("Uploads", ()):
                    at = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                    if re.fullmatch(rf"{_PART}\.parquet", at["Key"].removeprefix(f"{folder}/")):
                        client.abort_multipart_upload(Bucket=bucket, **at)

    def publish(self, name: str, content: bytes | IO[bytes]) -> None:
        """Write a file atomically. An object of a store appears when its upload is complete."""
        path = target = f"{self._folder}/{name}"
        if isinstance(self._store, fs.LocalFileSystem):
            target = f"{self._folder}/{_MANIFEST}/.{uuid.uuid4().hex}"
        try:
            with self._store.open_output_stream(target) as stream:
                if isinstance(content, bytes):
                    stream.write(content)
                else:
                    shutil.copyfileobj(content, stream, 1 << 20)
            if target != path:
                self._store.move(target, path)
        except OSError:
            if target != path:
                with suppress(OSError):
                    self._store.delete_file(target)  # it may be what fills the disk
            raise

    def _read(self, name: str) -> bytes:
        with self._store.open_input_stream(f"{self._folder}/{name}") as stream:
            content: bytes = stream.read()
            return content


def unreadable(option: str, uri: str, error: Exception) -> UserError:
    """Return the error of an option whose files or store cannot be read or written."""
    return UserError(
        option,
        "cannot be read or written",
        given=f"{uri}: {error!s:.200}",
        remedy="Check the address, the rights, and the credentials in the environment",
    )
