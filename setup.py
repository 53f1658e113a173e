"""One thing that pyproject.toml cannot say: a copy of the torch hook in editable installations.

torch cannot be imported if one of its entry points cannot be loaded. An editable installation looks for modules in the
checkout, so a checkout that was moved or removed would stop every program that imports torch. A wheel has the hook in
any case. The copy does not follow changes of the hook in the checkout: reinstall after them.
"""

import os
import sys
import sysconfig

from setuptools import Distribution, setup

PLACE = os.path.relpath(sysconfig.get_path("purelib"), sysconfig.get_path("data"))


class WithData(Distribution):
    """A distribution whose data files are installed."""

    # The command editable_wheel asks for this name, and skips data files if it is missing.
    has_data = Distribution.has_data_files


setup(
    distclass=WithData,
    data_files=[(PLACE, ["pose_plugin/_top/pose_plugin_hook.py"])] if "editable_wheel" in sys.argv else [],
)
