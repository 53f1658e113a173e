"""`import pose_plugin` is light, its names resolve, and a broken plugin cannot go unnoticed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pose_plugin

# A finder that makes one package look absent.
BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r} or name.startswith({name!r} + "."):
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Blocked())
"""


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)


# Help texts, plans, engine lines, pictures and reports must not wait for torch, and settings work without it.
LIGHT = """
from pose_plugin import PoSEError, PoSESettings, RopeSettings, coverage
from pose_plugin import export, rope
from pose_plugin.cli import evaluate, plan, synthesize
from pose_plugin.evaluation import figures, report
from pose_plugin.plan import report
from pose_plugin.positions import figure
[export.exporter(name) for name in export.ENGINES]
rope.ntk_base(1e4, 8, 128), rope.retrieval_base(2048, 128)
"""


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import pose_plugin", ["torch", "transformers", "numpy", "pydantic", "axolotl", "trl", "peft"]),
        (LIGHT, ["torch", "transformers", "matplotlib", "openai", "peft"]),
    ],
)
def test_imports_are_light(code, heavy):
    done = python(f"import sys\n{code}\nprint(sorted(set({heavy}) & set(sys.modules)))")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("name", sorted(set(pose_plugin.__all__) - {"PosePlugin", "PoSECollator"}))
def test_public_names_resolve(name):
    assert getattr(pose_plugin, name).__name__ == name
    assert name in dir(pose_plugin)


def test_the_collator_resolves():
    pytest.importorskip("transformers")
    assert pose_plugin.PoSECollator.__name__ == "PoSECollator"


def test_all_is_what_is_found_at_home():
    assert set(pose_plugin.__all__) == set(pose_plugin._HOME)


def test_unknown_name():
    with pytest.raises(AttributeError, match="module 'pose_plugin' has no attribute 'PoSEPlugin'"):
        pose_plugin.PoSEPlugin  # noqa: B018


def test_import_error_in_the_plugin_is_no_import_error():
    """Axolotl 0.19 logs an ImportError and trains on without the plugin."""
    done = python(
        BLOCK.format(name="axolotl")
        + "import pose_plugin\n"
        + "try:\n    pose_plugin.PosePlugin\n"
        + "except ImportError as error:\n    print('swallowed', error)\n"
        + "except RuntimeError as error:\n    print('seen', error)\n"
    )
    assert done.stdout.startswith("seen pose_plugin could not be loaded, so training would run without it"), done
    assert "axolotl" in done.stdout


def test_import_error_of_other_names_stays_one():
    done = python(
        BLOCK.format(name="torch")
        + "import pose_plugin\n"
        + "try:\n    pose_plugin.self_test\n"
        + "except ImportError as error:\n    print('import error', error)\n"
    )
    assert done.stdout.startswith("import error"), done
