"""From the bytes of an image file to a sample, as users of PIL, torchvision.io and OpenCV write it.

All crop and flip alike. Each library resizes in its own way, so that their pixels differ.
"""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch

IMAGE_SIZE = 224  # pixels a side, as for ImageNet
MEAN = [0.485, 0.456, 0.406]  # of ImageNet's red, green and blue, as fractions of 255
DEVIATION = [0.229, 0.224, 0.225]


@dataclass(frozen=True)
class Crop:
    """A box of a photo, in pixels, and whether it is mirrored."""

    left: int
    top: int
    width: int
    height: int
    flipped: bool


_SCALE = 1 / (255 * torch.tensor(DEVIATION)[:, None, None])
_OFFSET = (-torch.tensor(MEAN) / torch.tensor(DEVIATION))[:, None, None]

Choose = Callable[[int, int], Crop]  # from width and height of the photo
Decode = Callable[[bytes, Choose], torch.Tensor]


@dataclass(frozen=True)
class Decoder:
    """`decode` gives a tensor [3, 224, 224]: float32 and normalised, or uint8, for the step to do that. It imports
    `module`, which the command `install` brings, and reads files that end in one of `suffixes`. It can be pickled."""

    name: str
    description: str
    decode: Decode
    module: str
    install: str
    suffixes: frozenset[str]

    def missing(self) -> str | None:
        """Why it can't be used, with the command that helps, or None."""
        try:
            importlib.import_module(self.module)
        except Exception as error:  # an extension built for another torch raises whatever its loader does
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            return f"--decoder {self.name} can't import {self.module} ({reason}): {self.install}"
        return None


def _pil(data: bytes, choose: Choose) -> torch.Tensor:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as file:
        photo = file.convert("RGB")
    crop = choose(photo.width, photo.height)
    box = (crop.left, crop.top, crop.left + crop.width, crop.top + crop.height)
    photo = photo.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR, box=box)
    if crop.flipped:
        photo = photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return _normalised(numpy.asarray(photo, dtype=numpy.float32))


def _torchvision(data: bytes, choose: Choose) -> torch.Tensor:
    from torchvision.transforms.v2 import functional

    pixels = functional.to_dtype(_torchvision_uint8(data, choose), torch.float32, scale=True)
    normalised: torch.Tensor = functional.normalize(pixels, MEAN, DEVIATION)
    return normalised


def _torchvision_uint8(data: bytes, choose: Choose) -> torch.Tensor:
    """Its small operations are split over torch's threads, of which a worker process has one: so it is for its users.
    That makes the cost of a sample depend on the row."""
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms.v2 import functional

    writable = bytearray(data)  # torch warns of memory that is not
    photo = decode_image(torch.frombuffer(writable, dtype=torch.uint8), ImageReadMode.RGB)
    crop = choose(photo.shape[2], photo.shape[1])
    size = [IMAGE_SIZE, IMAGE_SIZE]
    photo = functional.resized_crop(photo, crop.top, crop.left, crop.height, crop.width, size, antialias=True)
    if crop.flipped:
        photo = functional.horizontal_flip(photo)
    cropped: torch.Tensor = photo
    return cropped


def _torchvision_io(data: bytes, choose: Choose) -> torch.Tensor:
    """In few calls: each takes the interpreter's lock again, and those of torchvision.transforms are many."""
    from torch.nn.functional import interpolate
    from torchvision.io import ImageReadMode, decode_image

    writable = bytearray(data)
    photo = decode_image(torch.frombuffer(writable, dtype=torch.uint8), ImageReadMode.RGB)
    crop = choose(photo.shape[2], photo.shape[1])
    photo = photo[:, crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    photo = interpolate(photo[None], (IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", antialias=True)[0]
    if crop.flipped:
        photo = photo.flip(-1)
    # `out`, since a decoded photo has its channels last, and what is made of it would have, too.
    return torch.addcmul(_OFFSET, photo, _SCALE, out=torch.empty(3, IMAGE_SIZE, IMAGE_SIZE))


def _opencv(data: bytes, choose: Choose) -> torch.Tensor:
    cv2 = _cv2()
    # Turned as its metadata says, a photo would get another box than with the other decoders.
    photo = cv2.imdecode(numpy.frombuffer(data, numpy.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    if photo is None:
        raise ValueError("cv2.imdecode knows no such image")
    crop = choose(photo.shape[1], photo.shape[0])
    photo = photo[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    photo = cv2.resize(photo, (IMAGE_SIZE, IMAGE_SIZE), interpolation=cv2.INTER_LINEAR)
    if crop.flipped:
        photo = cv2.flip(photo, 1)
    return _normalised(cv2.cvtColor(photo, cv2.COLOR_BGR2RGB).astype(numpy.float32))


@functools.cache
def _cv2() -> Any:
    import cv2

    # As its users set it beside a DataLoader: threads of its own would only compete with those that load.
    cv2.setNumThreads(0)
    return cv2


def _normalised(pixels: Any) -> torch.Tensor:
    """From float32 [H, W, 3], 0 to 255. In numpy: torch would split each of these small operations over its threads,
    and a sample's cost would then depend on what else runs on the machine."""
    mean = numpy.array(MEAN, dtype=numpy.float32) * 255
    scale = 1 / (numpy.array(DEVIATION, dtype=numpy.float32) * 255)
    return torch.from_numpy(numpy.ascontiguousarray(((pixels - mean) * scale).transpose(2, 0, 1)))


_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})

PIL = Decoder(
    name="pil",
    description="PIL",
    decode=_pil,
    module="PIL.Image",
    install="python -m pip install pillow",
    suffixes=_SUFFIXES | {".bmp"},
)
TORCHVISION = Decoder(
    name="torchvision",
    description="torchvision.io, whose operations torch splits over its threads",
    decode=_torchvision,
    module="torchvision.io",
    install="python -m pip install torchvision, in the version for the torch that is installed",
    suffixes=_SUFFIXES,
)
TORCHVISION_UINT8 = replace(
    TORCHVISION,
    name="torchvision-uint8",
    description="torchvision.io, whose operations torch splits over its threads, in uint8, which the step normalises",
    decode=_torchvision_uint8,
)
TORCHVISION_IO = replace(
    TORCHVISION,
    name="torchvision-io",
    description="torchvision.io, and functions of torch itself in place of torchvision's transforms",
    decode=_torchvision_io,
)
OPENCV = Decoder(
    name="opencv",
    description="OpenCV, without threads of its own",
    decode=_opencv,
    module="cv2",
    install="python -m pip install opencv-python-headless",
    suffixes=_SUFFIXES | {".bmp"},
)
_ALL = (PIL, TORCHVISION, TORCHVISION_UINT8, TORCHVISION_IO, OPENCV)
DECODERS = {decoder.name: decoder for decoder in _ALL}
SPLIT = frozenset(decoder.name for decoder in _ALL if decoder.module == "torchvision.io")
"""Those whose operations torch splits over its threads, so that a sample does not cost the same in each row."""
