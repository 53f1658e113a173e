"""The files of example_configs/cluster start the lines of docs/distributed.md, which test_launch_lines.py runs."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.forked import forked
from tests.pages import commands

needs_axolotl = pytest.mark.skipif(
    importlib.util.find_spec("axolotl") is None, reason="Axolotl is not installed: pip install axolotl"
)
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "example_configs" / "cluster"
# The programs of a cluster. `srun` runs its command on each of two machines, the others print what they are given.
PRINT = '#!/bin/bash\necho "$(basename "$0") $*"\n'
PROGRAMS = {
    "scontrol": "#!/bin/bash\necho first\necho second\n",
    "srun": '#!/bin/bash\nfor id in 0 1; do SLURM_NODEID=$id "$@"; done\n',
    **dict.fromkeys(("torchrun", "ray", "axolotl"), PRINT),
}


def documented(host: str, rank: int) -> list[str]:
    """The page's line for Axolotl on one of two machines."""
    (line,) = [each for each in commands("torchrun --nnodes") if each[-1] == "config.yaml"]
    at = line.index("--node_rank") + 1
    return [*line[:at], str(rank), *[host if word == "HOST" else word for word in line[at + 1 :]]]


@pytest.fixture
def run(tmp_path):
    """Run a command where the programs of a cluster are stand-ins; return the lines that they print."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def call(*command: str, **environment: str) -> list[list[str]]:
        variables = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **environment}
        done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60)
        assert done.returncode == 0, done.stderr
        return [shlex.split(line) for line in done.stdout.splitlines()]

    return call


def test_slurm(run):
    given = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": "1"}
    assert run("bash", str(FOLDER / "slurm.sh"), "config.yaml", **given) == [documented("first", i) for i in (0, 1)]


def test_kubernetes(run):
    service, job = yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())
    spec = job["spec"]["template"]["spec"]
    assert (service["kind"], job["kind"]) == ("Service", "Job")
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    # Pods find each other as <job>-<index>.<subdomain>, by a headless service that selects them.
    assert service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == spec["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (container,) = spec["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in spec["volumes"]}
    host = f"{job['metadata']['name']}-0.{spec['subdomain']}"
    for index in range(2):
        found = run(*container["command"], JOB_COMPLETION_INDEX=str(index))
        assert found == [documented(host, index)]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(
            found[0][found[0].index("--nproc_per_node") + 1]
        )


@pytest.mark.parametrize(
    "arguments, line",
    [
        ([], "ray start --head --port 6379 --num-gpus 8"),
        (["first"], "ray start --address first:6379 --num-gpus 8"),
        (["train", "config.yaml"], "axolotl train config.yaml --use-ray --ray-num-workers 16"),
    ],
)
def test_ray(run, arguments, line):
    assert run("bash", str(FOLDER / "ray.sh"), *arguments) == [line.split()]


def in_a_worker_of_ray(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Hand a config from Ray's driver to a worker as Axolotl does; return its block and its overrides of the model."""
    from axolotl.cli import train
    from axolotl.cli.config import load_cfg
    from axolotl.integrations.base import PluginManager

    from tests.integration.axolotl_runs import base_yaml

    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(base_yaml(folder, use_ray=True, ray_num_workers=2)))
    given = load_cfg(str(file)).to_dict()
    PluginManager.get_instance().plugins.clear()
    found: dict[str, Any] = {}
    train.do_train = found.update
    train.ray_train_func({"cfg": given, "cli_args": None})
    return found["cfg"].pose, found["cfg"].overrides_of_model_config


@needs_axolotl
def test_a_worker_of_ray_trains_with_the_block(tmp_path):
    block, overrides = forked(in_a_worker_of_ray, tmp_path).value
    assert block["target_length"] == overrides["max_position_embeddings"] == 512
    assert overrides["rope_parameters"]["factor"] == 8


@needs_axolotl
def test_axolotl_has_the_options_for_ray():
    from axolotl.cli.main import cli
    from click import Context

    known = {option for each in cli.get_command(Context(cli), "train").params for option in each.opts}
    assert {"--use-ray", "--ray-num-workers"} <= known
