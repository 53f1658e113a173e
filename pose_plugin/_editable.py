"""Puts a copy of the torch hook into editable installations; only the build of one imports this.

torch cannot be imported if one of its entry points cannot be loaded. An editable installation looks for modules in the
checkout, so a checkout that was moved or removed would stop every program that imports torch. A wheel has the hook in
any case. The copy does not follow changes of the hook in the checkout: reinstall after them.
"""

from __future__ import annotations

import os
import sysconfig

from setuptools.command.editable_wheel import editable_wheel


class EditableWheel(editable_wheel):
    """Builds an editable wheel that has the hook as a data file of site-packages."""

    def run(self) -> None:
        place = os.path.relpath(sysconfig.get_path("purelib"), sysconfig.get_path("data"))
        self.distribution.data_files = [(place, ["pose_plugin/_top/pose_plugin_hook.py"])]
        # The command asks for this name, and skips data files if it is missing.
        self.distribution.has_data = self.distribution.has_data_files
        super().run()
