"""Checkpoints: torch's distributed checkpoints in safetensors files, written in the background, whole or not at all.

    RUN/checkpoints/step-00000200/
        shard-*.safetensors     weights, AdamW's moments, the random state; one file for each process that wrote
        checkpoint.json         step, recipe, fingerprint of the data, and size and SHA-256 of every file; written last

A checkpoint is written under another name and renamed when it is complete and on disk, so that a kill at any moment leaves
whole ones alone. Reading checks every file against checkpoint.json; a broken checkpoint is reported and the one before it
is used. Another number of processes may read it.
"""

from __future__ import annotations

import errno
import json
import shutil
import threading
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

from ..data.shards import file_sha256
from ..data.writer import sync

MANIFEST = "checkpoint.json"
FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that can't be read; the message names the file."""


@dataclass(frozen=True)
class Progress:
    """Where a run is: all that is not a tensor."""

    step: int  # steps done
    recipe: dict[str, Any]
    data: str  # fingerprint of the training data
    guard: dict[str, Any]


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def find_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run's folder, newest first, whether or not they are whole."""
    return sorted((folder / "checkpoints").glob("step-????????"), reverse=True)


def read_manifest(path: Path) -> dict[str, Any]:
    """checkpoint.json, after a check of every file it names."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files, version = dict(manifest["files"]), manifest["format"]
    except FileNotFoundError:
        raise CheckpointError(f"{path / MANIFEST} is missing") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / MANIFEST} can't be read: {error}") from error
    if version > FORMAT:
        raise CheckpointError(f"{path / MANIFEST} has format {version}, newer than this rla reads ({FORMAT})")
    for name, entry in files.items():
        file = path / name
        if not file.exists():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != entry["bytes"]:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes; expected {entry['bytes']}")
        if _sha256(file) != entry["sha256"]:
            raise CheckpointError(f"{file} is not what was written: its SHA-256 differs")
    return manifest


def newest_whole(folder: Path, report: Callable[[str], None]) -> tuple[Path, Progress] | None:
    """The newest checkpoint that is whole, None if there is none at all. Broken ones are reported and renamed, not removed."""
    paths = find_checkpoints(folder)
    for path in paths:
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            path.rename(path.with_name(path.name + ".broken"))
            report(f"checkpoint {path.name} is broken: {error}. It is now {path.name}.broken")
            continue
        return path, Progress(*(manifest[key] for key in ("step", "recipe", "data", "guard")))
    if paths:
        raise CheckpointError(
            f"{folder}: none of its {len(paths)} checkpoints is whole. To start again, move it away or choose another --out"
        )
    return None


def load(path: Path, state: dict[str, Tensor], *, alone: bool = False) -> None:
    """Read the tensors of a checkpoint into those of `state`, in place; every process takes its part, or one `alone` all."""
    alone = alone or not dist.is_initialized()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=alone)


class Checkpoints:
    """Writes the checkpoints of a run. `main`: whether this process finishes and prunes them."""

    def __init__(self, folder: Path, *, keep: int, keep_every: int, main: bool) -> None:
        self.folder, self.keep, self.keep_every, self.main = folder / "checkpoints", keep, keep_every, main
        self._alone = not dist.is_initialized()
        self._group = None if self._alone else dist.new_group(backend="gloo")  # not to mix its messages with training's
        if self._alone:  # said by a thread of torch, where catch_warnings does not reach
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        if main:
            self.folder.mkdir(parents=True, exist_ok=True)
            for left in self.folder.glob("*.partial"):  # of a process that was killed while it wrote
                shutil.rmtree(left)

    def save(self, state: dict[str, Tensor], progress: Progress) -> None:
        """Copy the state and write it in the background. Waits for the checkpoint before this one."""
        self.wait()
        path = self.folder / checkpoint_name(progress.step)
        if path.exists():
            return
        partial = path.with_name(path.name + ".partial")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
            future = dcp.async_save(state, storage_writer=writer, process_group=self._group, no_dist=self._alone)
        self._thread = threading.Thread(target=self._finish, args=(future, partial, path, progress), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take_error(self) -> str | None:
        """What went wrong in the background since the last call, as a message; None if nothing did."""
        error, self._error = self._error, None
        if error is None:
            return None
        full = (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
        why = "the disk is full" if full else f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"
        return f"a checkpoint could not be written ({why}); the last good one is kept"

    def _finish(self, future: Any, partial: Path, path: Path, progress: Progress) -> None:
        try:
            future.result()  # of the main process: every process has written its part
            if not self.main:
                return
            files = {}
            for file in sorted(partial.iterdir()):
                if file.is_file():
                    sync(file)
                    files[file.name] = {"bytes": file.stat().st_size, "sha256": _sha256(file)}
                else:
                    shutil.rmtree(file)
            manifest = {"format": FORMAT, **asdict(progress), "files": files}
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
            sync(partial / MANIFEST)
            sync(partial)
            partial.rename(path)
            sync(self.folder)
            self._prune()
        except BaseException as error:
            self._error = error
            if self.main:
                shutil.rmtree(partial, ignore_errors=True)

    def _prune(self) -> None:
        paths = sorted(self.folder.glob("step-????????"), reverse=True)
        for path in paths[self.keep :]:
            if not self.keep_every or int(path.name.removeprefix("step-")) % self.keep_every:
                # A folder that is half removed must not look like a checkpoint.
                gone = path.rename(path.with_name(path.name + ".partial"))
                shutil.rmtree(gone)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_sha256(file)
