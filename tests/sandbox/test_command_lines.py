"""Containers of docker and apptainer: the exact commands, carried out by stand-ins."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from megarl.sandbox.containers.command_lines import run_arguments
from megarl.sandbox.containers.container import Container, ContainerError, ContainerSettings, find_start_fault
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
    label, run = run.split(" --label megarl-")[0], run
    assert label == "run --rm --interactive --pull=never --name megarl-1-0.0-1"
    assert run.endswith(
        " --cap-drop=ALL --cap-add=CHOWN --cap-add=DAC_OVERRIDE --cap-add=FOWNER --security-opt=no-new-privileges "
        "--network=none --pids-limit=9 --memory=1073741824 --memory-swap=1073741824 --cpus=1.5 "
        "--volume /usr/share:/usr/share:ro --entrypoint sh debian:12 -c until cat; do :; done"
    )
    assert any(
        call.startswith("exec --interactive --env OPENAI_API_KEY --workdir /usr megarl-1-0.0-1 ") for call in calls
    )
    assert not any("secret" in call for call in calls)
    assert "exec megarl-1-0.0-1 sh -c kill -9 -1" in calls and "rm --force megarl-1-0.0-1" in calls


# Without an image and a root folder of its own. Its network, limits and layer of files are megarl's.
APPTAINER = """#!{bash}
printf '%s\\n' "$*" >> {folder}/calls
shift 2
while :; do
    case $1 in
        --overlay | --bind) shift 2 ;;
        --pwd) cd "$2"; shift 2 ;;
        --*) shift ;;
        *) break ;;
    esac
done
[ -e "$1" ] || {{ echo "FATAL: could not open image $1: no such file or directory" >&2; exit 255; }}
shift
for name in "${{!APPTAINERENV_@}}"; do
    export "${{name#APPTAINERENV_}}=${{!name}}"
done
exec "$@"
"""
IN_APPTAINER = f"""
import os
{CALL}
print(os.environ["OPENAI_API_KEY"], os.getcwd(), os.listdir("/dev/shm"))
try:
    socket.create_connection(("127.0.0.1", {{port}}), 5)
except OSError as error:
    print(error.strerror)
"""


def test_a_container_of_apptainer_is_a_call_for_each_program_above_one_layer(
    tmp_path: Path, endpoint: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin/apptainer"
    program.parent.mkdir()
    program.write_text(APPTAINER.format(bash=shutil.which("bash"), folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/sbin:/usr/bin:/sbin:/bin")
    image = tmp_path / "image.sif"
    assert not os.path.exists("/dev/shm/layer")
    settings = ContainerSettings(
        kind="apptainer",
        name="megarl-1-0.0-1",
        address=endpoint,
        image=str(image),
        folders=("/usr/share",),
        limits=Limits(processes=9, memory_bytes=1 << 30, disk_bytes=1 << 20, output_bytes=10_000),
    )
    assert "could not open image" in str(find_start_fault(settings))
    image.touch()
    assert find_start_fault(settings) is None

    async def drive() -> None:
        container = Container(settings)
        await container.start()
        assert container.url == "http://127.0.0.1:11811"
        code = IN_APPTAINER.format(port=endpoint[1])
        ran = await container.execute([sys.executable, "-c", code], {"OPENAI_API_KEY": "secret"}, folder="/usr")
        assert ran.stdout == "b'got x'\nsecret /usr ['layer']\nConnection refused\n", ran
        scripts = {
            "OutputLimit": "yes",
            "ProcessLimit": "while true; do sleep 600 & done",
            "DiskLimit": "cat /dev/zero > /dev/shm/layer/full; sleep 600",
        }
        for limit, script in scripts.items():
            ran = await container.execute(["sh", "-c", script], {"PATH": "/usr/bin:/bin"})
            assert ran.outcome.startswith(f"{limit}: "), ran
        tests = str(tmp_path / "tests")
        await container.put(tests, {"a/test.sh": (0o755, base64.b64encode(b"echo 1").decode())})
        assert base64.b64decode(await container.get(f"{tests}/a/test.sh", 100)) == b"echo 1"
        with pytest.raises(ContainerError):
            await container.get(f"{tests}/absent", 100)
        await container.stop()

    asyncio.run(drive())
    # Not the whole folder: programs of other tests keep shared memory there meanwhile.
    assert not os.path.exists("/dev/shm/layer"), "the layer was the machine's"
    calls = (tmp_path / "calls").read_text()
    begin = "--silent exec --containall --no-home --no-privs --overlay /dev/shm/layer --bind /usr/share:/usr/share:ro"
    assert f"{begin} --pwd /usr {image} {sys.executable} -c" in calls and "secret" not in calls


def test_the_network_of_the_machine_is_a_choice() -> None:
    settings = {
        "name": "a",
        "network": "host",
        "folders": [],
        "image": "debian",
        "limits": {"processes": None, "memory_bytes": None, "cpus": None},
    }
    arguments = run_arguments(settings, 7)
    # The label names machine, processes' namespace and user, in which the owner's number is valid.
    label = arguments.pop(arguments.index("--label") + 1)
    assert re.fullmatch("megarl-[0-9a-f]{16}=7", label)
    assert arguments == [
        "run", "--rm", "--interactive", "--pull=never", "--name", "a", "--label", "--cap-drop=ALL",
        "--cap-add=CHOWN", "--cap-add=DAC_OVERRIDE", "--cap-add=FOWNER", "--security-opt=no-new-privileges",
        "--network=host", "--entrypoint", "sh", "debian", "-c",
        "until cat; do :; done",
    ]  # fmt: skip
