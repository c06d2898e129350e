"""Tensors in safetensors files: written by several threads at once, mapped into memory when they are read.

Stock safetensors reads what `write` leaves behind. The format is written here, and not by the library, for one reason: in our
files tensors begin at multiples of 64 bytes, so that a CPU engine computes on the mapped file and copies nothing.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from learner.model.spec import ModelError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
CODES = {"F32": DTYPES["float32"], "BF16": DTYPES["bfloat16"], "F16": DTYPES["float16"]}  # as safetensors calls them

ALIGNMENT = 64  # bytes: what XLA's CPU backend wants of a buffer that it does not copy
SHARD_BYTES = 256 * 2**20
THREADS = 8  # writing to one file system does not get faster with more


def write(tensors: Mapping[str, np.ndarray], directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write contiguous tensors as model.safetensors, or as numbered shards and their index when they are larger than
    `shard_bytes`. Files appear whole; those of an earlier model in `directory` are removed."""
    shards = _shards(tensors, shard_bytes)
    files = (
        [WEIGHTS] if len(shards) == 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i, _ in enumerate(shards, 1)]
    )
    with ThreadPoolExecutor(THREADS) as threads:
        list(threads.map(lambda file, names: _write_file(directory / file, {n: tensors[n] for n in names}), files, shards))
    if len(files) > 1:
        size = sum(array.nbytes for array in tensors.values())
        places = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": places}, indent=2)
        _replace(directory / INDEX, (text.encode(),))
        files.append(INDEX)
    for path in [*directory.glob("model*.safetensors"), directory / INDEX]:
        if path.name not in files:
            path.unlink(missing_ok=True)  # readers differ in which of two models they would take


def _shards(tensors: Mapping[str, np.ndarray], limit: int) -> list[list[str]]:
    """Names in shards of at most `limit` bytes (or of one tensor), the largest shard first: threads end together."""
    shards: list[list[str]] = [[]]
    sizes = [0]
    for name, array in tensors.items():
        if shards[-1] and sizes[-1] + array.nbytes > limit:
            shards.append([])
            sizes.append(0)
        shards[-1].append(name)
        sizes[-1] += array.nbytes
    return [shards[index] for index in sorted(range(len(shards)), key=lambda i: -sizes[i])]


def _write_file(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One safetensors file: length of the header, header, data without gaps."""
    names = sorted(tensors, key=lambda name: tensors[name].nbytes % ALIGNMENT != 0)  # no gaps: odd sizes must not shift others
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        array = tensors[name]
        code = next(code for code, dtype in CODES.items() if dtype == array.dtype)
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    _replace(path, (len(text).to_bytes(8, "little") + text, *(tensors[name].reshape(-1).view(np.uint8).data for name in names)))


def _replace(path: Path, parts: tuple[bytes | memoryview, ...]) -> None:
    """Write `path` aside and rename it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with open(aside, "wb", buffering=0) as file:
        for part in parts:
            rest = memoryview(part)
            while rest:  # Linux writes at most 2 GiB a call
                rest = rest[file.write(rest) :]
    os.replace(aside, path)


def weight_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a model directory. Raises ModelError when there are none, or one of the index is gone."""
    folder = Path(directory)
    names = [WEIGHTS]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{folder / INDEX} has no weight_map of files ({error!r}); copy it again") from error
    for name in names:
        if not (folder / name).is_file():
            raise ModelError(f"{directory} has no weights: {name} is missing; copy it there, or start from random weights")
    return [folder / name for name in names]


def mapped(directory: str | Path) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of a model directory, read-only views of its files: they may be deleted meanwhile, never changed or
    cut. Raises ModelError for a file that is damaged or too short, before anything of it is read."""
    for path in weight_files(directory):
        try:
            with safe_open(path, "np") as file, open(path, "rb") as raw:  # safe_open compares the header with the file's size
                memory = mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ)
                memory.madvise(mmap.MADV_WILLNEED)  # of a disk: read it now, while old weights are served
                offset = 8 + int.from_bytes(memory[:8], "little")
                for name in file.offset_keys():  # in the order of the file, where they stand without gaps
                    part = file.get_slice(name)
                    array = _view(memory, offset, part.get_dtype(), part.get_shape(), f"{path}: tensor {name}")
                    offset += array.nbytes
                    yield name, array
        except SafetensorError as error:
            raise ModelError(f"{path} is not a safetensors file: {error}; write it again") from error


def _view(memory: mmap.mmap, offset: int, code: str, shape: list[int], what: str) -> np.ndarray:
    if code not in CODES:
        raise ModelError(f"{what} is stored as {code}; a model's weights are one of {', '.join(CODES)}: convert it")
    return np.frombuffer(memory, CODES[code], math.prod(shape), offset).reshape(shape)
