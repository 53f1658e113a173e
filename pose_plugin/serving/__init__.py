"""Saved folders: completing them, loading them, proving them, serving them.

folder.py   what a folder must hold
probe.py    a few logits of the trained model, saved beside it
check.py    a reload in a process without this package, held against the probe
loading.py  `load_extended`: an adapter on the base it was trained on
"""

from pose_plugin.serving.folder import RECORD, complete_folder, read_record

__all__ = ["RECORD", "complete_folder", "read_record"]
