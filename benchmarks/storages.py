"""The ways to store photos that slow_datasets.py compares, and how each gives one of them back.

A storage is made of JPEG files in memory and a folder of its own, which it fills; `storage(index)` then gives a photo,
to several threads at once. `close()` lets go of the files, so that the folder can be removed on Windows too: call it
when the threads that read have ended.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

Pixels = Any
"""A photo: a PIL image, or a numpy array [height, width, 3] of uint8, red first."""

Decode = Callable[[bytes], Pixels]
Handle = TypeVar("Handle")


class Storage(Protocol):
    disk_bytes: int
    memory_bytes: int

    def __call__(self, index: int) -> Pixels: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Kind:
    """`module` must be importable, and is what `distribution` installs. `is_half`: the photos that it gives have half
    the width and height."""

    description: str
    module: str
    distribution: str
    make: Callable[[Sequence[bytes], Path], Storage]
    is_half: bool = False

    def missing(self) -> str | None:
        """Why it can't be used here, or None."""
        try:
            importlib.import_module(self.module)
        except (ImportError, OSError, RuntimeError) as error:  # it may be there, and built for another torch or system
            return f"needs {self.distribution} ({type(error).__name__}: {error})"
        return None

    def version(self) -> str | None:
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:  # such as opencv-python in place of its headless form
            return getattr(importlib.import_module(self.module), "__version__", None)


def one_a_thread(open_handle: Callable[[], Handle]) -> Callable[[], Handle]:
    """`open_handle`, with its result kept for each thread until that ends."""
    local = threading.local()

    def handle() -> Handle:
        if not hasattr(local, "handle"):
            local.handle = open_handle()
        kept: Handle = local.handle
        return kept

    return handle


# --- decoders


def decode_with_pil(file: bytes) -> Pixels:
    from PIL import Image

    with Image.open(io.BytesIO(file)) as photo:
        return photo.convert("RGB")


def decode_half_with_pil(file: bytes) -> Pixels:
    from PIL import Image

    with Image.open(io.BytesIO(file)) as photo:
        photo.draft("RGB", (photo.width // 2, photo.height // 2))
        return photo.convert("RGB")


def decode_with_opencv(file: bytes, flag: str = "IMREAD_COLOR") -> Pixels:
    import cv2
    import numpy

    blue_first: Any = cv2.imdecode(numpy.frombuffer(file, numpy.uint8), getattr(cv2, flag))
    return cv2.cvtColor(blue_first, cv2.COLOR_BGR2RGB)


def decode_half_with_opencv(file: bytes) -> Pixels:
    return decode_with_opencv(file, "IMREAD_REDUCED_COLOR_2")


def decode_with_torchvision(file: bytes) -> Pixels:
    import torch
    from torchvision.io import ImageReadMode, decode_jpeg

    photo = decode_jpeg(torch.frombuffer(bytearray(file), dtype=torch.uint8), mode=ImageReadMode.RGB)
    return photo.permute(1, 2, 0).numpy()


# --- storages


def decoded(photos: Sequence[bytes]) -> Iterator[Pixels]:
    """The photos as arrays, one after the other."""
    import numpy

    return (numpy.asarray(decode_with_pil(photo)) for photo in photos)


def shape_of(photos: Sequence[bytes]) -> tuple[int, ...]:
    """[photos, height, width, 3]. All photos are of one size."""
    return (len(photos), *next(decoded(photos)).shape)


class JpegFiles:
    memory_bytes = 0

    def __init__(self, photos: Sequence[bytes], folder: Path, decode: Decode) -> None:
        self.paths = [folder / f"{index}.jpg" for index in range(len(photos))]
        self.decode = decode
        for path, photo in zip(self.paths, photos, strict=True):
            path.write_bytes(photo)
        self.disk_bytes = sum(map(len, photos))

    def __call__(self, index: int) -> Pixels:
        return self.decode(self.paths[index].read_bytes())

    def close(self) -> None:
        pass


class Memory:
    disk_bytes = 0

    def __init__(self, photos: Sequence[bytes], folder: Path) -> None:
        self.arrays = list(decoded(photos))
        self.memory_bytes: int = sum(array.nbytes for array in self.arrays)

    def __call__(self, index: int) -> Pixels:
        return self.arrays[index]

    def close(self) -> None:
        self.arrays = []


class Cached:
    """JPEG files whose pixels a CachedDataset keeps after the first load. It gives a copy each time."""

    def __init__(self, photos: Sequence[bytes], folder: Path, decode: Decode) -> None:
        from gpuprefetch import CachedDataset

        files = JpegFiles(photos, folder, decode)
        self.disk_bytes = files.disk_bytes
        self.memory_bytes = math.prod(shape_of(photos))
        self.dataset = CachedDataset(_Arrays(files), max_bytes=self.memory_bytes)

    def __call__(self, index: int) -> Pixels:
        return self.dataset[index]

    def close(self) -> None:
        del self.dataset


class _Arrays:
    def __init__(self, files: JpegFiles) -> None:
        self.files = files

    def __getitem__(self, index: int) -> Pixels:
        import numpy

        return numpy.asarray(self.files(index))


class Memmap:
    memory_bytes = 0

    def __init__(self, photos: Sequence[bytes], folder: Path) -> None:
        import numpy

        path = folder / "photos.npy"
        written = numpy.lib.format.open_memmap(path, "w+", dtype=numpy.uint8, shape=shape_of(photos))
        for index, array in enumerate(decoded(photos)):
            written[index] = array
        written.flush()
        del written
        self.disk_bytes = path.stat().st_size
        # As a plain array: slices of numpy.memmap take several times as long.
        self.photos: Any = numpy.load(path, mmap_mode="r").view(numpy.ndarray)

    def __call__(self, index: int) -> Pixels:
        return self.photos[index]

    def close(self) -> None:
        self.photos = None  # the last reference: it unmaps the file


class Hdf5:
    memory_bytes = 0

    def __init__(self, photos: Sequence[bytes], folder: Path, compression: str | None) -> None:
        import h5py

        path = folder / "photos.h5"
        shape = shape_of(photos)
        with h5py.File(path, "w") as file:
            written = file.create_dataset("photos", shape, "uint8", chunks=(1, *shape[1:]), compression=compression)
            for index, array in enumerate(decoded(photos)):
                written[index] = array
        self.disk_bytes = path.stat().st_size
        self.photos: Any = one_a_thread(lambda: h5py.File(path, "r")["photos"])

    def __call__(self, index: int) -> Pixels:
        return self.photos()[index]

    def close(self) -> None:
        self.photos = None


class Lmdb:
    """JPEG files with a `decode`, else pixels."""

    memory_bytes = 0

    def __init__(self, photos: Sequence[bytes], folder: Path, decode: Decode | None) -> None:
        import lmdb

        self.decode = decode
        self.shape = shape_of(photos)[1:]
        values = photos if decode else (array.tobytes() for array in decoded(photos))
        with lmdb.open(str(folder), map_size=_map_size(photos, self.shape)) as written:
            for index, value in enumerate(values):
                with written.begin(write=True) as transaction:
                    transaction.put(str(index).encode(), value)
        self.environment = lmdb.open(str(folder), readonly=True)
        # Not the file's size: on Windows that is the map's.
        self.disk_bytes: int = self.environment.stat()["psize"] * (self.environment.info()["last_pgno"] + 1)
        self.transaction: Any = one_a_thread(lambda: self.environment.begin(buffers=True))

    def __call__(self, index: int) -> Pixels:
        import numpy

        value = self.transaction().get(str(index).encode())
        if self.decode:
            return self.decode(bytes(value))
        return numpy.frombuffer(value, numpy.uint8).reshape(self.shape)  # valid as long as the thread's transaction

    def close(self) -> None:
        self.transaction = None
        self.environment.close()


def _map_size(photos: Sequence[bytes], shape: tuple[int, ...]) -> int:
    """Bytes that hold the photos either way, with room for LMDB's pages."""
    height, width, channels = shape
    return (1 << 20) + 2 * len(photos) * (height * width * channels + (1 << 14))


def _jpeg(decode: Decode) -> Callable[[Sequence[bytes], Path], Storage]:
    return lambda photos, folder: JpegFiles(photos, folder, decode)


def _by_opencv(decode: Decode) -> Callable[[Sequence[bytes], Path], Storage]:
    def make(photos: Sequence[bytes], folder: Path) -> Storage:
        import cv2

        cv2.setNumThreads(1)  # its own would make several threads of the row with one
        return JpegFiles(photos, folder, decode)

    return make


KINDS = {
    "jpeg": Kind("JPEG files, decoded by PIL", "PIL", "pillow", _jpeg(decode_with_pil)),
    "jpeg-half": Kind(
        "JPEG files, decoded by PIL at half size: draft()", "PIL", "pillow", _jpeg(decode_half_with_pil), is_half=True
    ),
    "jpeg-opencv": Kind(
        "JPEG files, decoded by OpenCV", "cv2", "opencv-python-headless", _by_opencv(decode_with_opencv)
    ),
    "jpeg-opencv-half": Kind(
        "JPEG files, decoded by OpenCV at half size",
        "cv2",
        "opencv-python-headless",
        _by_opencv(decode_half_with_opencv),
        is_half=True,
    ),
    "jpeg-torchvision": Kind(
        "JPEG files, decoded by torchvision", "torchvision.io", "torchvision", _jpeg(decode_with_torchvision)
    ),
    "memory": Kind("uint8 arrays in memory", "numpy", "numpy", Memory),
    "cached": Kind(
        "JPEG files, decoded by PIL, in a CachedDataset",
        "PIL",
        "pillow",
        lambda photos, folder: Cached(photos, folder, decode_with_pil),
    ),
    "npy": Kind("one .npy file of uint8, mapped into memory", "numpy", "numpy", Memmap),
    "hdf5": Kind("HDF5, uint8, one photo a chunk", "h5py", "h5py", lambda photos, folder: Hdf5(photos, folder, None)),
    "hdf5-gzip": Kind(
        "HDF5, uint8, one photo a chunk, gzip", "h5py", "h5py", lambda photos, folder: Hdf5(photos, folder, "gzip")
    ),
    "lmdb-jpeg": Kind(
        "LMDB with JPEG files, decoded by PIL",
        "lmdb",
        "lmdb",
        lambda photos, folder: Lmdb(photos, folder, decode_with_pil),
    ),
    "lmdb": Kind("LMDB, uint8", "lmdb", "lmdb", lambda photos, folder: Lmdb(photos, folder, None)),
}
