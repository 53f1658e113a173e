"""What `make dist` builds, and that the files of a release agree on the version."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
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


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path):
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    # Build from a copy: setuptools writes build/ and egg-info into the folder that it builds.
    copy = tmp_path / "copy"
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in files.split("\n"):
        if name.startswith("pose_plugin/") or name in ("pyproject.toml", "README.md", "LICENSE"):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run([*wheel, str(copy)], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.glob("*.whl")
    spec = importlib.util.spec_from_file_location("dist_contents", ROOT / ".ci" / "dist_contents.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "pose_plugin_hook.py" in module.contents(built)
