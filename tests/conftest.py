"""The environment, the marks and the shared fixtures of all tests. `tests/models.py` makes models and tokenizers."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import re
from pathlib import Path

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    # A machine with a GPU must give the same results as one without.
    "CUDA_VISIBLE_DEVICES": "",
}.items():
    os.environ.setdefault(name, value)

import pytest  # noqa: E402 - the frameworks read the environment when they are imported
import torch  # noqa: E402

# The first backward of a process decides how many threads autograd has, and with threads no forked child can run one.
# Without a GPU it has none, unless torch.compile came first: in CUDA builds that pretends there is a device.
torch.ones(1, requires_grad=True).sum().backward()


# A test's marks follow from its file, so that no test has to name them. Patterns are relative to this folder.
MARKS = {
    "integration": ("integration/*",),
    "distributed": ("integration/test_distributed.py", "utils/test_distributed.py", "test_forked.py"),
    "docs": (
        "test_docs.py",
        "*_docs.py",
        "*_page.py",
        "*/test_page.py",
        "test_benchmarks.py",
        "test_quickstart_run.py",
    ),
    "real_model": ("synthesize/test_real_model.py",),
    # They start processes that import torch, or train; `make test-fast` leaves them out.
    "slow": (
        "beacon/test_beacon_generation.py",
        "beacon/test_beacon_learns.py",
        "checkpoints/test_check.py",
        "cli/test_kills.py",
        "checkpoints/test_saved_trl.py",
        "evaluation/test_callback.py",
        "evaluation/test_command.py",
        "evaluation/test_harness.py",
        "evaluation/test_in_training.py",
        "evaluation/test_odd_inputs.py",
        "evaluation/test_report.py",
        "synthesize/test_clean.py",
        "synthesize/test_documents.py",
        "synthesize/test_faults.py",
        "synthesize/test_frameworks.py",
        "synthesize/test_resume.py",
        "test_autoload.py",
        "test_quickstart_data.py",
    ),
    # The environments of .ci/test hold Axolotl 0.19, Axolotl 0.21, and the newest TRL without Axolotl. What depends on
    # the version of no framework runs in the first alone.
    "once": (
        "beacon/test_beacon_docs.py",
        "beacon/test_beacon_example.py",
        "beacon/test_beacon_learns.py",
        "beacon/test_beacon_ratios.py",
        "beacon/test_beacon_tables.py",
        "checkpoints/test_serving_docs.py",
        "checkpoints/test_whole.py",
        "cli/*",
        "doctor/*",
        "evaluation/test_association.py",
        "evaluation/test_best.py",
        "evaluation/test_callback_steps.py",
        "evaluation/test_command.py",
        "evaluation/test_evaluation_page.py",
        "evaluation/test_far_tokens.py",
        "evaluation/test_figures.py",
        "evaluation/test_measures.py",
        "evaluation/test_odd_inputs.py",
        "evaluation/test_prompts.py",
        "evaluation/test_ranks.py",
        "evaluation/test_recall_experiment.py",
        "evaluation/test_report.py",
        "evaluation/test_results_kept.py",
        "evaluation/test_retrieval.py",
        "evaluation/test_served.py",
        "evaluation/test_settings.py",
        "export/test_engines.py",
        "export/test_saved_format.py",
        "fuzz/*",
        "integration/test_cluster.py",
        "integration/test_launch_lines.py",
        "integration/test_tutorial.py",
        "plan/test_init.py",
        "plan/test_memory.py",
        "plan/test_plan_beacon.py",
        "plan/test_plan_sizes.py",
        "plan/test_work.py",
        "positions/*",
        "rope/test_rope_theory.py",
        "synthesize/test_answers.py",
        "synthesize/test_clean.py",
        "synthesize/test_documents.py",
        "synthesize/test_faults.py",
        "synthesize/test_page.py",
        "synthesize/test_quotes.py",
        "synthesize/test_resume.py",
        "synthesize/test_run.py",
        "test_benchmarks.py",
        "test_commands_docs.py",
        "test_config.py",
        "test_forked.py",
        "test_import.py",
        "test_kill.py",
        "test_layers.py",
        "test_quickstart_data.py",
        "test_quickstart_run.py",
        "test_release.py",
        "training/test_data_report.py",
        "training/test_kill.py",
        "training/test_launch.py",
        "utils/test_arrays.py",
        "utils/test_files.py",
        "utils/test_journal.py",
        "utils/test_lengths.py",
        "utils/test_log.py",
        "utils/test_tables.py",
    ),
    # What depends on TRL, transformers, PEFT or lm-eval runs with the oldest and with the newest of them. Axolotl 0.21
    # comes with versions between these, so it gets only those of these tests that are marked `axolotl`.
    "ends": (
        "beacon/test_beacon_adapter.py",
        "beacon/test_beacon_generation.py",
        "beacon/test_beacon_leaving.py",
        "beacon/test_beacon_raw.py",
        "beacon/test_beacon_refusals.py",
        "checkpoints/test_check.py",
        "checkpoints/test_saved_trl.py",
        "evaluation/test_callback.py",
        "evaluation/test_harness.py",
        "evaluation/test_haystack.py",
        "evaluation/test_in_training.py",
        "evaluation/test_memory.py",
        "evaluation/test_passkey.py",
        "evaluation/test_perplexity.py",
        "evaluation/test_ruler.py",
        "export/test_card.py",
        "export/test_export.py",
        "integration/test_beacon_trl.py",
        "integration/test_chat_trl.py",
        "integration/test_distributed.py",
        "integration/test_example_scripts.py",
        "integration/test_init_trl.py",
        "integration/test_trl.py",
        "integration/test_trl_model.py",
        "integration/test_unsloth.py",
        "plan/test_architecture.py",
        "plan/test_plan.py",
        "rope/test_bases.py",
        "rope/test_rope_kinds.py",
        "rope/test_rope_plan.py",
        "rope/test_rope_stretch.py",
        "test_collator_borders.py",
        "test_docs.py",
        "test_notebook_docs.py",
        "test_published_configs.py",
        "test_trainers_docs.py",
        "training/test_checks.py",
        "training/test_history.py",
    ),
    "axolotl": ("test_autoload.py",),
}
# From the longest to the shortest files.
LONG = ("docs", "integration", "slow")

# From this version on, transformers takes the linear attention of these models from flash-linear-attention, which comes
# with Axolotl and needs a GPU. That package also registers another bitnet.
REPLACES = (
    importlib.util.find_spec("fla") is not None
    and not torch.cuda.is_available()
    and tuple(map(int, importlib.metadata.version("transformers").split(".")[:2])) >= (5, 17)
)
REPLACED = re.compile(r"qwen3[_.-]?5|qwen3[_-]next|bitnet", re.I)
REPLACED_IN = ("test_families.py", "test_published_configs.py", "test_example_configs.py")


def pytest_collection_modifyitems(items):
    for item in items:
        given = item.callspec.params.values() if hasattr(item, "callspec") else ()
        if any(isinstance(value, set | frozenset) and len(value) > 1 and str(value) in item.name for value in given):
            # The order of a set changes from process to process, and all workers must collect the same names.
            raise pytest.UsageError(f"{item.nodeid}: a set is part of the name of a test; use a list")
        file = item.path.relative_to(Path(__file__).parent)
        if REPLACES and file.name in REPLACED_IN and REPLACED.search(item.name):
            item.add_marker(pytest.mark.skip(reason="flash-linear-attention replaces this model and needs a GPU"))
        for mark, patterns in MARKS.items():
            if any(file.match(pattern) for pattern in patterns):
                item.add_marker(mark)
    # Long files first (see .ci/test): a worker that starts one last would keep the others waiting.
    items.sort(key=lambda item: next((i for i, mark in enumerate(LONG) if item.get_closest_marker(mark)), len(LONG)))


def pytest_collection_finish(session):
    """Exempt what has been imported from garbage collection, which would take much of the time of tiny trainings."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def forks():
    """Let Python commands be forks of this process, see `forked_python`."""
    from tests.forked import forked_python

    with forked_python():
        yield


@pytest.fixture
def tokenizer():
    from tests.models import make_tokenizer

    return make_tokenizer()
