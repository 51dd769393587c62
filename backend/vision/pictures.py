"""Check and open picture files."""

import os
import stat
from functools import lru_cache
from pathlib import Path
from typing import Any

from backend.utils.errors import UserError
from backend.utils.files import kind_of, reason
from backend.utils.text import quote

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")  # that Pillow may read; some of the others start programs
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}  # of whole files; others are decoded to see if they are whole


def picture_size(path: str) -> tuple[int, int]:
    """(width, height) as seen. Reads the header only, where the file's end shows that it is whole. Raises UserError."""
    from PIL import UnidentifiedImageError

    try:
        about = os.stat(path)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"it is {kind_of(about.st_mode)}")
        return _checked_size(path, about.st_mtime_ns, about.st_size)
    except FileNotFoundError:
        raise UserError("data", f"There is no picture {quote(Path(path))}.") from None
    except UnidentifiedImageError:
        why = f"it is none of {', '.join(FORMATS)}"
    except Exception as error:  # of any kind: Pillow's decoders
        why = reason(error) if isinstance(error, OSError) else quote(error, 80)
    raise UserError("data", f"The picture {quote(Path(path))} cannot be read: {why}.")


@lru_cache(maxsize=1 << 17)
def _checked_size(path: str, changed_ns: int, size: int) -> tuple[int, int]:
    from PIL import Image

    if not size:
        raise ValueError("it is empty")
    with open(path, "rb") as file, Image.open(file, formats=FORMATS) as picture:
        is_turned = picture.getexif().get(0x0112) in (5, 6, 7, 8)
        file.seek(max(0, size - 64))
        if ENDS.get(picture.format or "", b"-") not in file.read():
            picture.load()
        width, height = picture.size
        return (height, width) if is_turned else (width, height)


def open_picture(path: str) -> Any:
    """The picture of PIL, turned as its EXIF data say, and decoded at its first use. Raises UserError."""
    from PIL import Image, ImageOps

    picture_size(path)
    picture = Image.open(path, formats=FORMATS)
    ImageOps.exif_transpose(picture, in_place=True)
    return picture
