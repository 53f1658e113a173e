"""Saved folders: complete, check, load and merge them.

- schema.py, saved.py: the files of a folder, each read once
- folder.py, lengths.py, record.py, probe.py: what a run leaves next to its weights
- check.py, reload_worker.py: a reload in a process without this package, compared with the probe
- load.py: models to use or to evaluate
- merge.py: merged models
"""

from pose_plugin.checkpoints.check import check_folder
from pose_plugin.checkpoints.comparisons import CheckReport
from pose_plugin.checkpoints.folder import complete_folder
from pose_plugin.checkpoints.load import load_extended, require_extension
from pose_plugin.checkpoints.merge import complete_merged
from pose_plugin.checkpoints.probe import take_probe
from pose_plugin.checkpoints.saved import RECORD, read_record

__all__ = [
    "RECORD",
    "CheckReport",
    "check_folder",
    "complete_folder",
    "complete_merged",
    "load_extended",
    "read_record",
    "require_extension",
    "take_probe",
]
