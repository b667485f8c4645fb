"""Not collected by itself: holds what tests start, until the run of pytest is ended from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.rank_pool import RankPool

DAEMON = "import os, signal, time; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.setsid(); time.sleep(600)"


def hold() -> None:
    Path(os.environ["HOLDING"], "rank").touch()
    time.sleep(600)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One node, brought up and never taken down; nothing where the test does not ask for it."""
    if "HOLD_SLURM" in os.environ:
        from tests.cluster.local_slurm import Cluster

        Cluster.start(tmp_path_factory.mktemp("slurm"), num_nodes=1)


@pytest.fixture(scope="module")
def ray_cluster() -> None:
    if "HOLD_RAY" in os.environ:
        from ray.cluster_utils import Cluster

        Cluster(initialize_head=True, head_node_args={"num_cpus": 0})


pytestmark = [pytest.mark.distributed, *([pytest.mark.slurm] if "HOLD_SLURM" in os.environ else [])]


def test_holds(slurm: None, ray_cluster: None) -> None:
    subprocess.Popen([sys.executable, "-S", "-c", DAEMON])
    with RankPool(1, imports=["tests.rank_pool"]) as pool:
        pool.run(hold)
