"""Info.plist of both app bundles: the frozen one (PyInstaller) and the light one (`light_app.py`).

Keys are documented by Apple under "Information Property List".
"""

from typing import Any

NAME = "GRPO Studio"
IDENTIFIER = "org.grpo-studio.GRPOStudio"  # never change it: macOS stores permissions and window state under it
ICON = "app.icns"
MINIMUM_MACOS = "14.0"  # the oldest macOS that mlx's wheels are built for

WHY_FILES = "GRPO Studio reads the datasets, models and configs that you choose, and writes where you export to."
PROTECTED_FOLDERS = ("DesktopFolder", "DocumentsFolder", "DownloadsFolder", "RemovableVolumes", "NetworkVolumes")
"""macOS asks before an app reads these for the first time, and shows WHY_FILES in the question."""


def info_plist(version: str, executable: str = NAME) -> dict[str, Any]:
    """The content of Info.plist for a bundle whose program is Contents/MacOS/`executable`. `version` is 1, 2 or 3
    numbers with dots, as macOS compares it number by number; raises ValueError otherwise."""
    numbers = version.split(".")
    if len(numbers) > 3 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"The version {version} of a Mac app must be up to three numbers with dots.")
    return {
        "CFBundleDevelopmentRegion": "en",
        "CFBundleDisplayName": NAME,
        "CFBundleDocumentTypes": document_types(),
        "CFBundleExecutable": executable,
        "CFBundleIconFile": ICON,
        "CFBundleIdentifier": IDENTIFIER,
        "CFBundleInfoDictionaryVersion": "6.0",
        "CFBundleName": NAME,
        "CFBundlePackageType": "APPL",
        "CFBundleShortVersionString": version,
        "CFBundleSupportedPlatforms": ["MacOSX"],
        "CFBundleVersion": version,
        "LSApplicationCategoryType": "public.app-category.developer-tools",
        # A launcher that is a script has no architecture of its own, and macOS would start it under Rosetta, or offer
        # to install that.
        "LSArchitecturePriority": ["arm64"],
        "LSMinimumSystemVersion": MINIMUM_MACOS,
        "LSRequiresNativeExecution": True,
        "NSHighResolutionCapable": True,
        "NSHumanReadableCopyright": "Free software under the MIT licence.",
        "NSPrincipalClass": "NSApplication",
        "NSRequiresAquaSystemAppearance": False,
        "NSSupportsAutomaticGraphicsSwitching": True,
        **{f"NS{folder}UsageDescription": WHY_FILES for folder in PROTECTED_FOLDERS},
    }


def document_types() -> list[dict[str, Any]]:
    """What the Finder offers the app for: YAML files, which it can edit, and run folders, which it shows.

    Rank Alternate: the app is offered under "Open With" and takes drops on its Dock icon, but never becomes the program
    that opens every YAML file or folder. Neither is a type of our own (a config is plain YAML, a run a plain folder),
    so no type is exported.
    """
    return [
        {
            "CFBundleTypeName": "Training config",
            "CFBundleTypeRole": "Editor",
            "LSHandlerRank": "Alternate",
            "LSItemContentTypes": ["public.yaml"],
        },
        {
            "CFBundleTypeName": "Run folder",
            "CFBundleTypeRole": "Viewer",
            "LSHandlerRank": "Alternate",
            "LSItemContentTypes": ["public.folder"],
        },
    ]
