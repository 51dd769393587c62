"""Made-up Mac programs and libraries: headers without code, for the tests of bundles."""

from __future__ import annotations

import struct

ARM64, X86_64 = 0x0100000C, 0x01000007  # types of processor, as in <mach/machine.h>


def library(processor: int = ARM64, macos: tuple[int, int] = (13, 3), loads: str = "@rpath/other.dylib") -> bytes:
    """A Mach-O file of nothing but headers: the macOS it was built for and a library that it loads."""
    name = loads.encode() + b"\0" * (8 - len(loads) % 8)
    build = struct.pack("<6I", 0x32, 24, 1, macos[0] << 16 | macos[1] << 8, 0, 0)
    load = struct.pack("<6I", 0xC, 24 + len(name), 24, 0, 0, 0) + name
    return struct.pack("<8I", 0xFEEDFACF, processor, 0, 6, 2, len(build) + len(load), 0, 0) + build + load
