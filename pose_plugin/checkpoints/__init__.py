"""Saved folders: completing them, proving them, loading them, serving them.

folder.py, record.py, probe.py   what a run leaves beside its weights
check.py, reload_worker.py              a reload in a process without this package, held against the probe
loading.py, merged.py            adapters on the base they were trained on; merged models
engines/, older.py               what each engine has to be told; a copy for transformers 4
card.py                          the model card
"""

from pose_plugin.checkpoints.check import CheckReport, check_folder
from pose_plugin.checkpoints.folder import RECORD, complete_folder, read_record
from pose_plugin.checkpoints.load import load_extended, require_extension
from pose_plugin.checkpoints.merge import complete_merged
from pose_plugin.checkpoints.probe import take_probe

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
