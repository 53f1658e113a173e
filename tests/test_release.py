"""What `make dist` builds, and that the files of a release agree on the version."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

import pose_plugin

ROOT = Path(__file__).parent.parent


def test_citation_and_changelog_know_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == pose_plugin.__version__
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert "Unreleased" in headings or pose_plugin.__version__ in headings


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda path: path.name)
def test_workflows_call_targets_that_exist(path):
    targets = re.findall(r"^([a-z.0-9 -]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    known = {name for line in targets for name in line.split()}
    assert yaml.safe_load(path.read_text(encoding="utf-8"))
    for name in re.findall(r"run: make ([a-z-]+(?:\$\{\{[^}]*\}\})?)", path.read_text(encoding="utf-8")):
        if "$" in name:
            rows = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]["frameworks"]["strategy"]["matrix"]
            names = {name.split("$")[0] + row["environment"] for row in rows["include"]}
        else:
            names = {name}
        assert names <= known


@pytest.fixture
def copy(tmp_path):
    """A copy of the checkout, because setuptools writes build/ and egg-info into the folder that it builds."""
    folder = tmp_path / "copy"
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.split("\n"):
        if name.startswith("pose_plugin/") or name in ("pyproject.toml", "README.md", "LICENSE"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def done(*command, cwd=os.sep):
    """Run a command where Python does not find this checkout, and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_links_of_the_readme_are_absolute_on_pypi(tmp_path):
    """The step of publish.yml leaves no link that only works in the repository."""
    (tmp_path / "README.md").write_bytes((ROOT / "README.md").read_bytes())
    steps = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text("utf-8"))["jobs"]["build"]["steps"]
    (script,) = [step["run"] for step in steps if "README.md" in step.get("run", "")]
    variables = {"GITHUB_REPOSITORY": "owner/name", "GITHUB_REF_NAME": "v1", "PATH": os.environ["PATH"]}
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, env=variables, check=True)
    text = (tmp_path / "README.md").read_text("utf-8")
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 10 and all(target.startswith("https://") for target in targets), targets
    assert "](https://github.com/owner/name/raw/v1/docs/figures/recall.png)" in text
    assert "](https://github.com/owner/name/blob/v1/docs/smollm2.md)" in text


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path, copy):
    done(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, copy)
    (built,) = tmp_path.glob("*.whl")
    spec = importlib.util.spec_from_file_location("dist_contents", ROOT / ".ci" / "dist_contents.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "pose_plugin_hook.py" in module.contents(built)


def test_torch_imports_after_the_checkout_of_an_editable_installation_was_moved(tmp_path, copy):
    done(sys.executable, "-c", "from setuptools.build_meta import build_editable; build_editable('..')", cwd=copy)
    (built,) = tmp_path.glob("*.whl")
    done(sys.executable, "-m", "venv", "--without-pip", tmp_path / "new")
    python = tmp_path / "new" / "bin" / "python"
    done(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", built)
    # torch is that of this environment.
    places = "import sysconfig; print(sysconfig.get_path('purelib'))"
    (Path(done(python, "-c", places).strip()) / "torch.pth").write_text(sysconfig.get_path("purelib"))
    hook = "import sys, torch; print(sys.modules['pose_plugin_hook'].__file__); import pose_plugin"
    assert str(tmp_path / "new") in done(python, "-c", hook)
    copy.rename(tmp_path / "moved")
    assert str(tmp_path / "new") in done(python, "-c", hook.replace("import pose_plugin", ""))
    with pytest.raises(AssertionError, match="No module named 'pose_plugin'"):
        done(python, "-c", "import pose_plugin")
