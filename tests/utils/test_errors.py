"""Hints in messages."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

import pose_plugin
from pose_plugin.utils.errors import pip_install

FOLDER = Path(pose_plugin.__file__).parent


@pytest.mark.parametrize("extra, package", [("plot", "matplotlib"), ("ruler", "wonderwords"), ("synthesize", "openai")])
def test_the_command_names_the_packages_of_an_extra(extra, package, monkeypatch):
    table = {"plot": "matplotlib>=3.8", "ruler": "wonderwords>=3", "synthesize": "openai>=1.60"}
    lines = ["torch>=2.6", *(f'{needed}; extra == "{name}"' for name, needed in table.items())]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    assert pip_install(extra) == f'pip install "{table[extra]}"' and package in table[extra]


def test_without_an_installation_the_command_is_for_a_clone(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert pip_install("plot") == 'pip install ".[plot]" in a clone of pose-plugin'


def test_messages_name_only_extras_that_exist():
    project = (FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8")
    used = set()
    for file in FOLDER.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        # No index has this package yet.
        assert "pose-plugin[" not in text, file
        used |= set(re.findall(r"pip_install\(['\"](\w+)['\"]\)", text))
        used |= set(re.findall(r"module_of_extra\(.*['\"](\w+)['\"]\)", text))
    assert used >= {"plot", "ruler", "synthesize"} and all(f"\n{name} = [" in project for name in used)
