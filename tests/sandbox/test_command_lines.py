"""Containers of podman and docker: the exact commands, carried out by a stand-in with namespaces of its own."""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import sys
from pathlib import Path

import pytest

from megarl.sandbox.containers.command_lines import run_arguments
from megarl.sandbox.containers.container import Container, ContainerError, ContainerSettings
from megarl.sandbox.containers.requests import Limits
from tests.rewards.pools import wait_until
from tests.sandbox.test_containers import endpoint

__all__ = ["endpoint"]

# It never carries out the kill of all processes, which would reach beyond a container.
STAND_IN = """#!{bash}
state={folder}
printf '%s\\n' "$*" >> "$state/calls"
verb=$1; shift
case $verb in
    ps) exit 0 ;;
    run) [ -e "$state/absent" ] && echo "no such image" >&2 && exit 125
         unshare --net {bash} -c 'echo $$ > {folder}/pid; exec cat'; rm -f "$state/pid"; exit 0 ;;
    inspect) cat "$state/pid" ;;
    rm) [ -e "$state/pid" ] && kill "$(cat "$state/pid")" && rm "$state/pid"; exit 0 ;;
    exec)
        while :; do
            case $1 in
                --interactive) shift ;;
                --env) shift 2 ;;
                --workdir) cd "$2"; shift 2 ;;
                *) break ;;
            esac
        done
        shift
        case "$*" in *"kill -9 -1"*) exit 0 ;; esac
        exec nsenter --target "$(cat "$state/pid")" --net -- "$@" ;;
esac
"""
CALL = "import socket; c = socket.create_connection(('127.0.0.1', 11811)); c.sendall(b'x'); print(c.recv(9))"


def test_a_container_of_docker_is_driven_by_its_command_line(
    tmp_path: Path, endpoint: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("the stand-in enters namespaces as root")
    program = tmp_path / "bin/docker"
    program.parent.mkdir()
    program.write_text(STAND_IN.format(bash=shutil.which("bash"), folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/sbin:/usr/bin:/sbin:/bin")
    settings = ContainerSettings(
        kind="docker",
        name="megarl-1-0.0-1",
        address=endpoint,
        image="debian:12",
        folders=("/usr/share",),
        limits=Limits(processes=9, memory_bytes=1 << 30, output_bytes=10_000, cpus=1.5),
    )

    async def drive() -> None:
        container = Container(settings)
        await container.start()
        assert container.url == "http://127.0.0.1:11811"
        ran = await container.execute([sys.executable, "-c", CALL], {"OPENAI_API_KEY": "secret"}, folder="/usr")
        assert ran.stdout == "b'got x'\n", ran
        flooded = await container.execute(["yes"], {})
        assert flooded.outcome.startswith("OutputLimit: ")
        tests = str(tmp_path / "tests")
        await container.put(tests, {"a/test.sh": (0o755, base64.b64encode(b"echo 1").decode())})
        assert base64.b64decode(await container.get(f"{tests}/a/test.sh", 100)) == b"echo 1"
        for path in (f"{tests}/a", f"{tests}/absent"):
            with pytest.raises(ContainerError):
                await container.get(path, 100)
        with pytest.raises(ContainerError, match="more than 3 bytes"):
            await container.get(f"{tests}/a/test.sh", 3)
        await container.stop()
        (tmp_path / "absent").touch()
        with pytest.raises(ContainerError, match="no such image"):
            await Container(settings).start()

    asyncio.run(drive())
    # Its main program has ended, and it was removed.
    wait_until(lambda: not (tmp_path / "pid").exists(), seconds=20)
    calls = (tmp_path / "calls").read_text().splitlines()
    [run, *_] = [call for call in calls if call.startswith("run ")]
    label, run = run.split(" --label megarl=")[0], run
    assert label == "run --rm --interactive --pull=never --name megarl-1-0.0-1"
    assert run.endswith(
        " --cap-drop=ALL --security-opt=no-new-privileges --network=none --pids-limit=9 --memory=1073741824 "
        "--memory-swap=1073741824 --cpus=1.5 --volume /usr/share:/usr/share:ro --entrypoint cat debian:12"
    )
    assert any(
        call.startswith("exec --interactive --env OPENAI_API_KEY --workdir /usr megarl-1-0.0-1 ") for call in calls
    )
    assert not any("secret" in call for call in calls)
    assert "exec megarl-1-0.0-1 sh -c kill -9 -1" in calls and "rm --force megarl-1-0.0-1" in calls


def test_the_network_of_the_machine_is_a_choice() -> None:
    settings = {
        "name": "a",
        "network": "host",
        "folders": [],
        "image": "debian",
        "limits": {"processes": None, "memory_bytes": None, "cpus": None},
    }
    assert run_arguments(settings, 7) == [
        "run", "--rm", "--interactive", "--pull=never", "--name", "a", "--label", "megarl=7", "--cap-drop=ALL",
        "--security-opt=no-new-privileges", "--network=host", "--entrypoint", "cat", "debian",
    ]  # fmt: skip
