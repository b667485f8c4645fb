"""Build the stand-in for a GPU: `build.py ENVIRONMENT FOLDER`, with a CUDA environment of `launch/setup.sh gpu`.

FOLDER becomes a Python environment of links to ENVIRONMENT. Only the libraries of the device are its own: the CUDA
runtime and driver, NVML, NCCL and, if it is installed, Transformer Engine's. ENVIRONMENT stays as it is.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "source"
CORE = ("faults", "waits", "devices", "accesses", "pinned", "memory", "virtual_memory", "streams", "driver")
# torch's own headers ask for C++ 20 from 2.13 on; 2.11 compiles with it, too.
COMPILER = ("g++", "-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-attributes", "-Wno-deprecated-declarations")
OF_TORCH = ("numerics", "groups")
"""Sources of the library that torch loads."""
START = "import standin_gpu_start\n"
ENGINE = "transformer_engine/wheel_lib/libtransformer_engine.so"
"""Transformer Engine's own library in an environment, optional."""


class BuildError(Exception):
    """A sentence for the user."""


def call(*command: object) -> str:
    """Run a command and return its output. Raises BuildError with the errors of the command."""
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise BuildError(f"{command[0]} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def site_packages(environment: Path) -> Path:
    """Return the folder of the packages of a CUDA environment. Raises BuildError for other folders."""
    folders = sorted(environment.glob("lib/python3*/site-packages"))
    if not folders:
        raise BuildError(f"{environment}: not a Python environment; make one: VENV={environment} launch/setup.sh gpu")
    for needed in ("torch/lib/libtorch_cuda.so", "nvidia/cu13/include/cuda.h", "nvidia/nccl/include/nccl.h"):
        if not (folders[0] / needed).exists():
            raise BuildError(
                f"{environment}: {needed} is missing, so this is no CUDA environment; make one in another folder: "
                "VENV=DIR launch/setup.sh gpu"
            )
    return folders[0]


def declared_functions(header: Path, prefix: str, include: Path) -> set[str]:
    """Return the names of the functions that a header declares, in all their versions."""
    options = ("-E", "-P", "-D__CUDA_API_VERSION_INTERNAL", f"-I{include}", "-x", "c++", header)
    return set(re.findall(rf"\b({prefix}[A-Z]\w*) *\(", call("gcc", *options)))


def declared_operators(headers: Path) -> set[str]:
    """Return the names of Transformer Engine's functions that work on a stream."""
    # As text: some headers include files that the wheel (2.11) leaves out.
    text = "".join(header.read_text() for header in sorted(headers.glob("*.h")))
    functions = re.findall(r"^void (nvte_\w+)\(([^()]*)\);", text, re.MULTILINE)
    return {name for name, arguments in functions if "cudaStream_t" in arguments}


def defined_functions(objects: list[Path]) -> set[str]:
    """Return the names of the functions that object files define."""
    lines = call("nm", "--defined-only", *objects).splitlines()
    return {fields[2] for fields in map(str.split, lines) if len(fields) == 3 and fields[1] in "TW"}


def unknown_functions(names: set[str], file: Path, report: str, has_table: bool = False) -> None:
    """Write C++ whose functions only report their own names. The table lists them for look-ups by name.

    `report` is the stand-in's function that gets the name.
    """
    lines = [f"namespace standin {{ int {report}(const char* name); }}"]
    lines += [f'extern "C" int {name}() {{ return standin::{report}("{name}"); }}' for name in sorted(names)]
    if has_table:
        listed = "".join(f'"{name}", ' for name in sorted(names))
        lines.append(f'extern "C" const char* const standin_unknown_names[] = {{{listed}nullptr}};')
        # A constant of C++ is not visible in other files unless it is declared before.
        lines.insert(0, 'extern "C" const char* const standin_unknown_names[];')
    file.write_text("\n".join(lines) + "\n")


def compile_source(source: Path, folder: Path, *options: object) -> Path:
    """Compile a file into the folder and return the object file."""
    target = folder / f"{source.stem}.o"
    call(*COMPILER, *options, f"-I{SOURCE}/include", "-c", source, "-o", target)
    return target


def build_libraries(packages: Path, target: Path, work: Path) -> None:
    """Compile and link the libraries of the device into the folder `target`."""
    cuda, nccl, torch = packages / "nvidia/cu13/include", packages / "nvidia/nccl/include", packages / "torch"
    of_torch = (f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", "-Wno-all")
    source_names = (*CORE, "runtime", "kernels", "nvml", "nccl", "reductions")
    sources = dict.fromkeys(source_names, (f"-I{cuda}", f"-I{nccl}"))
    # The largest first: each takes as long as all others together.
    largest: dict[str, tuple[str, ...]] = dict.fromkeys(OF_TORCH, (f"-I{cuda}", *of_torch))
    engine, engine_headers = packages / ENGINE, packages / "transformer_engine/common/include"
    if engine.exists():
        largest["transformer_engine"] = (f"-I{cuda}", f"-I{engine_headers}", *of_torch)
    sources = {**largest, **sources}
    with ThreadPoolExecutor(4) as pool:
        tasks = {
            name: pool.submit(compile_source, SOURCE / f"{name}.cpp", work, *options)
            for name, options in sources.items()
        }
        objects = {name: task.result() for name, task in tasks.items()}

    def link_library(library: str, parts: list[Path], *options: object) -> None:
        linker_options = ("-shared", f"-Wl,-soname,{library}", "-Wl,-rpath,$ORIGIN", f"-L{target}")
        call("g++", *linker_options, *parts, *options, "-o", target / library)

    def rest_of(names: set[str], parts: list[Path], name: str, report: str = "unknown_function") -> Path:
        unknown_functions(
            names - defined_functions(parts), work / f"{name}.cpp", report, has_table=name == "rest_of_driver"
        )
        return compile_source(work / f"{name}.cpp", work)

    core = [objects[name] for name in CORE]
    core.append(rest_of(declared_functions(cuda / "cuda.h", "cu", cuda), core, "rest_of_driver"))
    link_library("libcuda.so.1", core, "-ldl")
    device = ("-l:libcuda.so.1",)
    runtime = [objects["runtime"], objects["kernels"]]
    runtime.append(rest_of(declared_functions(cuda / "cuda_runtime_api.h", "cuda", cuda), runtime, "rest_of_runtime"))
    # Libraries that were linked with the real runtime ask for this version of each name.
    (work / "runtime.map").write_text("libcudart.so.13 { global: cuda*; __cuda*; local: *; };\n")
    link_library("libcudart.so.13", runtime, f"-Wl,--version-script={work}/runtime.map", *device)
    link_library("libnvidia-ml.so.1", [objects["nvml"]], *device)
    parts = [objects["nccl"], objects["reductions"]]
    # torch asks for functions of NCCL's other headers, too: the wheel's library lists all.
    exported = call("nm", "-D", "--defined-only", packages / "nvidia/nccl/lib/libnccl.so.2")
    parts.append(rest_of(set(re.findall(r" (nccl[A-Z]\w*)", exported)), parts, "rest_of_nccl"))
    link_library("libnccl.so.2", parts, *device)
    libraries = ("-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda", "-l:libcudart.so.13")
    # torch's libraries are in the process already; they need the ones of the device, in the same folder.
    allowed = (f"-L{torch}/lib", "-Wl,--allow-shlib-undefined")
    link_library("libstandin_numerics.so", [objects[name] for name in OF_TORCH], *allowed, *libraries, *device)
    if engine.exists():
        # The loader finds the wheel's own library under its name, after this one.
        (target / engine.name).symlink_to(engine)
        parts = [objects["transformer_engine"]]
        parts.append(
            rest_of(
                declared_operators(engine_headers / "transformer_engine"), parts, "rest_of_engine", "unknown_operator"
            )
        )
        link_library("libstandin_transformer_engine.so", parts, *allowed, *libraries, f"-l:{engine.name}", *device)


def link_environment(environment: Path, folder: Path, libraries: Path) -> None:
    """Fill the folder with links to the environment, the libraries of the device instead of the wheels'."""
    call("cp", "-rs", environment, folder)
    packages = site_packages(folder)
    replaced = {packages / "nvidia/nccl/lib/libnccl.so.2": "libnccl.so.2"}
    # torchvision has a copy of the runtime under another name. vLLM uses the first runtime that the process has loaded.
    runtimes = (*packages.glob("nvidia/cu13/lib/libcudart.so.13"), *packages.glob("*.libs/libcudart*.so.13"))
    replaced |= dict.fromkeys(runtimes, "libcudart.so.13")
    if (packages / ENGINE).exists():
        replaced[packages / ENGINE] = "libstandin_transformer_engine.so"
    for place, name in replaced.items():
        place.unlink(missing_ok=True)
        place.symlink_to(libraries / name)
    # Copies: a link would write through to the environment.
    copies = {
        # torch loads these by their real path. They find their libraries in the same folder.
        **{place: place.resolve() for place in packages.glob("torchvision/*.so")},
        packages / "standin_gpu_start.py": HERE / "start.py",
        packages / "standin_gpu_kernels.py": HERE / "kernels.py",
        folder / "bin/nvidia-smi": HERE / "nvidia_smi.py",
    }
    for place, origin in copies.items():
        place.unlink(missing_ok=True)
        shutil.copy(origin, place)
    (packages / "standin_gpu.pth").write_text(START)


def build(environment: Path, folder: Path) -> None:
    """Build the stand-in in the folder, which must not exist yet. Raises BuildError."""
    environment, folder = environment.resolve(), folder.resolve()
    packages = site_packages(environment)
    if folder.exists():
        raise BuildError(f"{folder} exists; remove it, or name another folder")
    for program in ("g++", "nm"):
        if shutil.which(program) is None:
            raise BuildError(f"{program} is missing; install a C++ compiler (Debian: apt-get install g++)")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Moved in the end: an aborted build leaves no folder that looks complete.
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    work, libraries = partial / "standin_gpu/work", folder / "standin_gpu/libraries"
    (partial / "standin_gpu/libraries").mkdir(parents=True)
    work.mkdir()
    build_libraries(packages, partial / "standin_gpu/libraries", work)
    shutil.rmtree(work)
    environment_folder = partial / "environment"
    link_environment(environment, environment_folder, partial / "standin_gpu/libraries")
    (partial / "standin_gpu").rename(environment_folder / "standin_gpu")
    for link in (environment_folder / "lib").glob("python3*/site-packages/**/lib*.so*"):
        if link.is_symlink() and link.readlink().parent == partial / "standin_gpu/libraries":
            name = link.readlink().name
            link.unlink()
            link.symlink_to(libraries / name)
    environment_folder.rename(folder)
    partial.rmdir()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", type=Path, metavar="ENVIRONMENT")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        build(arguments.environment, arguments.folder)
    except BuildError as error:
        sys.exit(f"tools/standin_gpu/build.py: {error}")


if __name__ == "__main__":
    main()
