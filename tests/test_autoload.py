"""The import hook behind the bare name `plugins: [pose_plugin]`: it works once, leaves, and never breaks torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

# Axolotl before 0.21, as far as the hook is concerned.
OLD_BASE = """
def load_plugin(plugin_name):
    module_name, class_name = plugin_name.rsplit(".", 1)
    return module_name, class_name
"""
OLD_CONFIG = """
def validate_config(cfg, capabilities=None):
    return cfg
"""
OLD_PLUGINS = """
class PluginCommandGroup:
    def get_command(self, context, name):
        return name
"""
OLD_MERGE = """
def do_merge_lora(*, cfg):
    return cfg
"""
# The hook goes on waiting for PEFT.
WAITING = "[f for f in sys.meta_path if type(f).__module__ == 'pose_plugin_hook' and 'axolotl' in str(f.waiting)]"


def fake_axolotl(folder: Path, base: str = OLD_BASE, config: str = OLD_CONFIG) -> Path:
    for name, text in {
        "axolotl/__init__.py": "",
        "axolotl/integrations/__init__.py": "",
        "axolotl/integrations/base.py": base,
        "axolotl/utils/__init__.py": "",
        "axolotl/utils/config/__init__.py": config,
        "axolotl/cli/__init__.py": "",
        "axolotl/cli/merge_lora.py": OLD_MERGE,
        "axolotl/cli/plugins.py": OLD_PLUGINS,
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-c", "import sys\n" + code],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


def good(code: str, folder: Path, **environment: str) -> str:
    done = python(code, folder, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def installed() -> None:
    from importlib.metadata import entry_points

    if not entry_points(group="torch.backends", name="pose_plugin"):
        pytest.skip("pose_plugin is not installed (pip install -e .), so torch does not find its entry point")


def test_bare_name_is_loaded_and_the_hook_is_gone(tmp_path, installed):
    out = good(
        f"""
import torch
print(len({WAITING}))
from axolotl.integrations.base import load_plugin
print(len({WAITING}))
from axolotl.utils.config import validate_config
from axolotl.cli.merge_lora import do_merge_lora
from axolotl.cli.plugins import PluginCommandGroup
print(len({WAITING}), do_merge_lora.__wrapped__.__name__)
print(load_plugin("pose_plugin"), load_plugin("some.other.Plugin"))
import axolotl.integrations.base as base
print(type(base.__loader__).__name__, type(base.__spec__.loader).__name__, load_plugin.__name__)
""",
        fake_axolotl(tmp_path),
    )
    assert out.splitlines() == [
        "1",
        "1",
        "0 do_merge_lora",
        "('pose_plugin', 'PosePlugin') ('some.other', 'Plugin')",
        "SourceFileLoader SourceFileLoader load_plugin",
    ]


def test_looking_for_the_module_is_not_importing_it(tmp_path):
    """Whoever asks importlib whether Axolotl is there must not use up the hook."""
    out = good(
        """
import importlib.util
from pose_plugin_hook import install
install()
importlib.util.find_spec("axolotl.integrations.base")
from axolotl.integrations.base import load_plugin
print(load_plugin("pose_plugin"))
""",
        fake_axolotl(tmp_path),
    )
    assert out == "('pose_plugin', 'PosePlugin')"


def test_modules_that_are_imported_already(tmp_path):
    out = good(
        f"""
import axolotl.integrations.base as base, axolotl.utils.config, axolotl.cli.merge_lora, axolotl.cli.plugins
from pose_plugin_hook import install
install(); install()
print(base.load_plugin("pose_plugin"), len({WAITING}), hasattr(base.load_plugin.__wrapped__, "__wrapped__"))
""",
        fake_axolotl(tmp_path),
    )
    assert out == "('pose_plugin', 'PosePlugin') 0 False"


def test_version_with_entry_points_is_left_alone(tmp_path):
    out = good(
        """
from pose_plugin_hook import install
install()
import axolotl.integrations.base as base
print(hasattr(base.load_plugin, "__wrapped__"))
""",
        fake_axolotl(tmp_path, base="PLUGIN_ENTRY_POINT_GROUP = 'axolotl.plugins'\n" + OLD_BASE),
    )
    assert out == "False"


@pytest.mark.once
@pytest.mark.parametrize(
    "plugins, refused",
    [
        ("[]", True),
        ("None", True),
        ("['a.B']", True),
        ("['pose_plugin']", False),
        ("['pose_plugin.PosePlugin']", False),
    ],
)
def test_forgotten_line(tmp_path, plugins, refused):
    out = good(
        f"""
from pose_plugin_hook import install
install()
from axolotl.utils.config import validate_config
try:
    print(sorted(validate_config({{"pose": {{"target_length": 8}}, "plugins": {plugins}}})))
except ValueError as error:
    print(type(error).__name__, error)
print(validate_config({{"plugins": None}}, capabilities=1))
""",
        fake_axolotl(tmp_path),
    )
    first, second = out.splitlines()
    assert second == "{'plugins': None}"
    if refused:
        assert first.startswith("PoSEError the config has a `pose:` block") and "plugins: [pose_plugin]" in first
    else:
        assert first == "['plugins', 'pose']"


@pytest.mark.once
@pytest.mark.parametrize(
    "broken",
    ["raise RuntimeError('broken')", "raise ImportError('broken')", "def load_plugin(:", "x = 1"],
    ids=["raises", "import error", "syntax error", "other contents"],
)
def test_torch_imports_beside_a_broken_axolotl(tmp_path, installed, broken):
    """The error of the broken module is its own, at its own import, as without the hook."""
    out = good(
        """
import torch
print(torch.ones(2).sum().item())
for _ in range(2):
    try:
        import axolotl.integrations.base
        print("imported")
    except Exception as error:
        print(type(error).__name__)
""",
        fake_axolotl(tmp_path, base=broken),
    )
    name = {"r": broken.split("(")[0].removeprefix("raise "), "d": "SyntaxError", "x": "imported"}[broken[0]]
    assert out.splitlines() == ["2.0", name, name]


BROKEN = {
    "a merge conflict": {"__init__.py": "<<<<<<< HEAD\n", "_autoload.py": "PATCHES = {}\n"},
    "a file of 0 bytes": {"__init__.py": "", "_autoload.py": ""},
    "half of the package": {"__init__.py": ""},
    "no package": {},
}


@pytest.mark.once
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_package_breaks_no_other(tmp_path, name):
    fake_axolotl(tmp_path)
    for file, text in BROKEN[name].items():
        (tmp_path / "pose_plugin").mkdir(exist_ok=True)
        (tmp_path / "pose_plugin" / file).write_text(text)
    shutil.copy(Path(__file__).parents[1] / "pose_plugin" / "_top" / "pose_plugin_hook.py", tmp_path)
    out = good(
        """
# An editable installation would find the package of this checkout.
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
from pose_plugin_hook import install
install()
import axolotl.integrations.base as base
print(base.load_plugin("a.B"), "pose_plugin.config" in sys.modules)
""",
        tmp_path,
        PYTHONPATH=str(tmp_path),
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert out == "('a', 'B') False"


def test_installing_imports_nothing_of_the_package(tmp_path):
    code = "from pose_plugin_hook import install; install(); print([n for n in sys.modules if n.startswith('pose')])"
    assert good(code, tmp_path) == "['pose_plugin_hook']"


def test_the_hook_waits_for_what_is_patched():
    import pose_plugin_hook
    from pose_plugin._autoload import PATCHES

    assert sorted(PATCHES) == sorted(pose_plugin_hook.WAITING)


@pytest.mark.once
def test_torch_imports_where_a_patch_raises(tmp_path, installed):
    """Both ways: the module comes later, or is there when the hook is installed."""
    code = """
import pose_plugin._autoload as autoload
def fail(module):
    raise RuntimeError("patch")
for name in autoload.PATCHES:
    autoload.PATCHES[name] = fail
FIRST
import torch
import axolotl.integrations.base as base
print(torch.ones(2).sum().item(), base.load_plugin("a.B"))
"""
    fake_axolotl(tmp_path)
    for first in ("", "import axolotl.integrations.base"):
        assert good(code.replace("FIRST", first), tmp_path) == "2.0 ('a', 'B')"


@pytest.mark.axolotl
def test_real_axolotl_with_autoload_turned_off(tmp_path, installed):
    pytest.importorskip("axolotl", reason="Axolotl is not installed")
    out = good(
        """
from axolotl.integrations import base
print("dotted", type(base.load_plugin("pose_plugin.PosePlugin")).__name__)
try:
    print("bare", base.load_plugin("pose_plugin"))
except ValueError:
    print("bare fails")
print("wrapped", hasattr(base.load_plugin, "_pose_plugin"))
""",
        tmp_path,
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert out.splitlines()[-3:] == ["dotted PosePlugin", "bare fails", "wrapped False"]
