"""Check what the built archives hold: python .ci/dist_contents.py FOLDER"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

# Bytes. The package is text only; a larger file means that a model, a figure or a cache slipped in.
LARGEST_WHEEL = 600_000


def contents(wheel: Path) -> list[str]:
    """Return the names in a wheel.

    Raises:
        SystemExit: it is too large, lacks a module of the checkout, or holds something else.
    """
    size = wheel.stat().st_size
    if size > LARGEST_WHEEL:
        sys.exit(f"{wheel.name} has {size:,} bytes, more than {LARGEST_WHEEL:,}; look for files that are not modules")
    names = zipfile.ZipFile(wheel).namelist()
    modules = {name for name in names if ".dist-info/" not in name}
    package = Path(__file__).parent.parent / "pose_plugin"
    wanted = {str(path.relative_to(package.parent)) for path in package.rglob("*.py") if "_top" not in path.parts}
    wanted |= {"pose_plugin/py.typed", "pose_plugin_hook.py"}
    if modules != wanted:
        sys.exit(f"{wheel.name}: missing {sorted(wanted - modules)}, too much {sorted(modules - wanted)}")
    return names


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (built,) = folder.glob("*.whl")
    (source,) = folder.glob("*.tar.gz")
    print(f"{built.name}: {len(contents(built))} files, {built.stat().st_size:,} bytes")
    with tarfile.open(source) as archive:
        if not any(name.endswith("/pose_plugin/_top/pose_plugin_hook.py") for name in archive.getnames()):
            sys.exit(f"{source.name} lacks pose_plugin/_top/pose_plugin_hook.py")
    print(f"{source.name}: {source.stat().st_size:,} bytes")
