"""Check and open picture files."""

from __future__ import annotations

import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from backend.utils.errors import UserError
from backend.utils.files import kind_of, reason
from backend.utils.text import quote

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats that Pillow may read; some of the others start programs."""
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}
"""How a whole file ends. Other files are decoded to see whether they are whole."""
MOST_PIXELS = 100_000_000


def picture_size(path: str) -> tuple[int, int]:
    """(width, height) as seen. Reads the header only, where the file's end shows that it is whole. Raises UserError."""
    try:
        about = os.stat(path)
    except FileNotFoundError:
        raise UserError("data", f"There is no picture {quote(Path(path))}.") from None
    except (OSError, ValueError) as error:
        raise _refused(path, reason(error) if isinstance(error, OSError) else "it is not a path") from None
    if not stat.S_ISREG(about.st_mode):
        raise _refused(path, f"it is {kind_of(about.st_mode)}")
    return _checked_size(path, about.st_mtime_ns, about.st_size)


def open_picture(path: str) -> Image:
    """The picture in RGB, turned as its EXIF data say. Raises UserError."""
    from PIL import Image, ImageOps

    picture_size(path)
    try:
        with Image.open(path, formats=FORMATS) as picture:
            return ImageOps.exif_transpose(picture).convert("RGB")
    except Exception as error:  # of any kind: Pillow's decoders
        raise _refused(path, f"it is broken ({quote(error, 80)})") from error


@lru_cache(maxsize=1 << 17)
def _checked_size(path: str, changed_ns: int, size: int) -> tuple[int, int]:
    from PIL import Image, UnidentifiedImageError

    if not size:
        raise _refused(path, "it is empty")
    try:
        with open(path, "rb") as file, Image.open(file, formats=FORMATS) as picture:
            width, height = picture.size
            if width * height <= MOST_PIXELS:
                turned = picture.getexif().get(0x0112) in (5, 6, 7, 8)
                file.seek(max(0, size - 64))
                if ENDS.get(picture.format or "", b"-") not in file.read():
                    picture.load()
                return (height, width) if turned else (width, height)
    except UnidentifiedImageError:
        raise _refused(path, f"it is none of {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        pass
    except Exception as error:  # of any kind: Pillow's decoders
        raise _refused(path, f"it is broken ({quote(error, 80)})") from error
    raise _refused(path, f"it has more than {MOST_PIXELS // 10**6} million pixels")


def _refused(path: str, why: str) -> UserError:
    return UserError("data", f"The picture {quote(Path(path))} cannot be read: {why}.")
