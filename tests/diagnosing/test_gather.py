"""Facts of the machine and of its GPUs, found in pictures of /proc and /sys and on this machine."""

from __future__ import annotations

import gzip
import os
import platform
import resource
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path

import pytest

from shardkit.diagnosing.facts import CudaAnswer, Host, KvikAnswer
from shardkit.diagnosing.gather import gather
from shardkit.diagnosing.gather_gpu import gather_gpu, has_driver
from shardkit.diagnosing.gather_host import gather_host
from shardkit.diagnosing.gather_software import gather_software
from shardkit.diagnosing.tree import Tree
from shardkit.version import __version__

KIB = 1024


def host_of(picture, **environment):
    return gather_host(Tree(picture.root), environment)


def side_of(picture, host=None, **environment):
    return gather_gpu(Tree(picture.root), environment, host or Host(), cuda=None, kvikio=None)


def put_gpu(picture, address="0000:16:00.0", *, device_class="0x030200", vendor="0x10de"):
    place = f"sys/devices/pci0000:15/0000:15:01.0/{address}"
    picture.files(place, vendor=vendor, numa_node=1, current_link_width=8, max_link_width=16, **{"class": device_class})
    picture.files(f"{place}/iommu_group", type="DMA-FQ")
    picture.link(f"{place}/driver", "sys/bus/pci/drivers/nvidia")
    picture.link(f"sys/bus/pci/devices/{address}", place)


def test_nothing_is_an_error_where_nothing_is(picture, tmp_path):
    facts = gather(tmp_path, root=picture.root, environment={})
    assert facts.host.uring_switch is None
    assert (facts.host.memory.total, facts.host.governors, facts.host.nodes) == (None, {}, ())
    assert (facts.gpu.gpus, facts.gpu.cuda, facts.storage.blocks) == ((), None, ())


def test_this_machine_is_told_as_python_sees_it():
    host = gather_host(Tree(Path("/")), {})
    assert (host.kernel, host.machine) == (platform.release(), platform.machine())
    assert host.allowed_cpus == len(os.sched_getaffinity(0))
    assert host.files.soft == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert host.memory.total == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_file_that_refuses_long_reads_is_read():
    release = Path("/proc/sys/kernel/osrelease")  # a sysctl; a read of megabytes fails there
    assert Tree(Path("/")).read("proc/sys/kernel/osrelease") == release.read_text().strip()


def test_a_pipe_does_not_hang(picture):
    (picture.root / "proc").mkdir()
    os.mkfifo(picture.root / "proc" / "meminfo")
    assert Tree(picture.root).read("proc/meminfo") == ""


def test_limits_of_the_kernel_are_read(picture):
    picture.files("proc/sys/kernel", io_uring_disabled=2, osrelease="6.8.0-45-generic")
    picture.write("proc/self/status", "CapEff:\t0000000000004000\nSeccomp:\t2\n")
    picture.files("sys/kernel/mm/transparent_hugepage", enabled="always madvise [never]")
    picture.files("sys/kernel/mm/hugepages/hugepages-2048kB", nr_hugepages=512, free_hugepages=500)
    host = host_of(picture)
    assert (host.uring_switch, host.seccomp, host.lock_capability, host.kernel) == (2, 2, True, "6.8.0-45-generic")
    (pages,) = host.memory.huge
    assert (host.memory.transparent, pages.bytes_each, pages.total, pages.free) == ("never", 2048 * KIB, 512, 500)


def test_without_the_capability_the_limit_of_locked_memory_counts(picture):
    picture.write("proc/self/status", "CapEff:\t00000000a80425fb\n")
    assert not host_of(picture).lock_capability


@pytest.mark.parametrize(("place", "packed"), [("boot/config-6.8.0", False), ("proc/config.gz", True)])
def test_the_kernels_configuration_is_found(picture, place, packed):
    picture.files("proc/sys/kernel", osrelease="6.8.0")
    picture.write(place, "")
    text = b"CONFIG_PCI_P2PDMA=y\n# CONFIG_IO_URING is not set\n"
    (picture.root / place).write_bytes(gzip.compress(text) if packed else text)
    config = host_of(picture).config
    assert (config["CONFIG_PCI_P2PDMA"], config["CONFIG_IO_URING"]) == ("y", "n")


def test_a_damaged_configuration_is_none(picture):
    picture.write("proc/config.gz", "no gzip")
    assert host_of(picture).config == {}


def test_the_tightest_quota_above_a_group_counts(picture):
    picture.write("proc/self/cgroup", "0::/a/b\n")
    picture.write("sys/fs/cgroup/cpu.max", "max 100000")
    picture.write("sys/fs/cgroup/a/cpu.max", "200000 100000")
    picture.write("sys/fs/cgroup/a/b/cpu.max", "400000 100000")
    assert host_of(picture).quota_cpus == 2.0


def test_a_quota_of_version_1_counts(picture):
    picture.write("proc/self/cgroup", "4:cpu,cpuacct:/docker/x\n3:memory:/docker/x\n")
    picture.files("sys/fs/cgroup/cpu", **{"cpu.cfs_quota_us": 150000, "cpu.cfs_period_us": 100000})
    assert host_of(picture).quota_cpus == 1.5


def test_processors_are_counted_by_their_policy(picture):
    for number, word in enumerate(("powersave", "performance", "powersave")):
        picture.files(f"sys/devices/system/cpu/cpu{number}/cpufreq", scaling_governor=word)
    picture.files("sys/devices/system/cpu", online="0-2", cpufreq="no folder")
    host = host_of(picture)
    assert (host.cpus, host.governors) == (3, {"powersave": 2, "performance": 1})
    assert asdict(host)["governors"] == {"powersave": 2, "performance": 1}


def test_a_process_runs_on_the_nodes_of_its_processors(picture):
    mine = min(os.sched_getaffinity(0))
    picture.write("sys/devices/system/node/node0/cpulist", f"{mine + 5000}-{mine + 5003}\n")
    picture.write("sys/devices/system/node/node1/cpulist", f"{mine},{mine + 6000}\n")
    host = host_of(picture)
    assert (host.nodes, host.run_nodes, host.memory_policy) == ((0, 1), (1,), "")


@pytest.mark.parametrize(
    ("told", "policy"),
    [("default", "default"), ("bind=static:0-1", "bind=static:0-1"), ("prefer (many):0,2", "prefer:0,2")],
)
def test_the_kernels_words_for_a_policy_are_taken_whole(picture, told, policy):
    picture.write("proc/self/numa_maps", f"7f2c84000000 {told} anon=3 dirty=3 N0=3\n7f2c85000000 bind:7 heap\n")
    assert host_of(picture).memory_policy == policy


def test_the_policy_of_this_processs_memory_is_the_one_that_was_set():
    if platform.machine() != "x86_64" or not Path("/proc/self/numa_maps").exists():
        pytest.skip("the number of the system call is that of x86-64, and the kernel must know NUMA")
    code = """if True:
        import ctypes
        from pathlib import Path
        from shardkit.diagnosing.gather_host import gather_host
        from shardkit.diagnosing.tree import Tree
        print(gather_host(Tree(Path("/")), {}).memory_policy)
        mask = ctypes.c_ulong(1)
        assert ctypes.CDLL(None).syscall(238, 2, ctypes.byref(mask), 64) == 0  # set_mempolicy, MPOL_BIND
        print(gather_host(Tree(Path("/")), {}).memory_policy)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["default", "bind:0"], "")


@pytest.mark.parametrize(("flags", "guest"), [("fpu hypervisor lm", True), ("fpu lm", False), (None, None)])
def test_a_virtual_machine_is_told_by_its_processor(picture, flags, guest):
    picture.write("proc/cpuinfo", "processor\t: 0\n" if flags is None else f"flags\t\t: {flags}\n")
    assert host_of(picture).guest is guest


def test_what_a_container_was_given_is_seen(picture):
    picture.write(".dockerenv", "")
    picture.write("run/udev/data/x", "")
    container = host_of(picture, NVIDIA_DRIVER_CAPABILITIES="compute").container
    assert (container.kind, container.udev, container.capabilities) == ("docker", True, "compute")


@pytest.mark.parametrize("names", [None, (), ("dmar0", "dmar1")])
def test_the_units_of_an_iommu_are_those_that_the_kernel_shows(picture, names):
    picture.write("proc/cmdline", "quiet intel_iommu=on iommu.passthrough=1 root=/dev/sda\n")
    if names is not None:
        (picture.root / "sys/class/iommu").mkdir(parents=True)
        for name in names:
            picture.link(f"sys/class/iommu/{name}", f"sys/devices/virtual/iommu/{name}")
    iommu = host_of(picture).iommu
    assert (iommu.units, iommu.options) == (names, ("intel_iommu=on", "iommu.passthrough=1"))


def test_what_needs_no_gpu_is_read_from_this_machine(tmp_path):
    host = gather(tmp_path).host
    folder = Path("/sys/class/iommu")
    assert host.iommu.units == (tuple(sorted(os.listdir(folder))) if folder.exists() else None)
    assert host.container.udev == os.access("/run/udev", os.R_OK)


def test_a_gpu_is_found_on_the_bus(picture):
    put_gpu(picture)
    put_gpu(picture, "0000:17:00.0", device_class="0x068000")  # an NVSwitch
    put_gpu(picture, "0000:18:00.0", vendor="0x8086")
    picture.write("proc/driver/nvidia/gpus/0000:16:00.0/information", "Model: \t\t NVIDIA H200\nIRQ:   100\n")
    (card,) = side_of(picture).gpus
    assert (card.address, card.node, card.driver, card.name) == ("0000:16:00.0", 1, "nvidia", "NVIDIA H200")
    assert card.chain == ("pci0000:15", "0000:15:01.0", "0000:16:00.0")
    assert (card.width, card.max_width, card.iommu) == (8, 16, "DMA-FQ")
    assert has_driver(Tree(picture.root))


def test_a_driver_without_a_bus_is_asked_too(picture):
    assert not has_driver(Tree(picture.root))
    picture.write("dev/nvidiactl", "")
    assert has_driver(Tree(picture.root))


def test_the_driver_and_its_settings_are_read(picture):
    picture.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159  x\n")
    picture.write("proc/driver/nvidia/params", 'EnableMSI: 1\nRegistryDwords: "RMForceStaticBar1=1;"\n')
    picture.write("proc/modules", "nvme 49152 4 - Live\nnvidia_fs 299008 0 - Live 0x0\n")
    picture.write("sys/module/nvidia_fs/version", "2.26.6\n")
    picture.write("sys/module/nvme_core/parameters/multipath", "Y\n")
    side = side_of(picture)
    assert (side.driver, side.open_driver, side.registry) == ("580.159", True, "RMForceStaticBar1=1;")
    assert (side.nvidia_fs, side.nvme_multipath) == ("2.26.6", True)


@pytest.mark.parametrize(
    ("config", "symbols", "known"),
    [
        ({"CONFIG_PCI_P2PDMA": "y"}, "", True),
        ({"CONFIG_PCI_P2PDMA": "n"}, "0 T pci_p2pdma_add_resource\n", False),
        ({}, "0 T x\n0 T pci_p2pdma_add_resource\n", True),
        ({}, "0 T x\n", False),
        ({}, "", None),
    ],
)
def test_p2pdma_is_told_by_the_configuration_or_else_by_a_symbol(picture, config, symbols, known):
    put_gpu(picture)
    if symbols:
        picture.write("proc/kallsyms", symbols)
    assert side_of(picture, Host(config=config)).p2pdma is known


@pytest.mark.parametrize(
    ("text", "environment", "allowed", "p2pdma"),
    [
        (None, {}, None, None),
        ('{"properties": {"allow_compat_mode": false, "use_pci_p2pdma": true}}', {}, False, True),
        ('{"properties": {"allow_compat_mode": false}}', {"CUFILE_ALLOW_COMPAT_MODE": "true"}, True, None),
        ('{"properties": {"use_pci_p2pdma": true}}', {"CUFILE_USE_PCIP2PDMA": "0"}, None, False),
    ],
)
def test_the_environment_wins_over_cufiles_configuration(picture, text, environment, allowed, p2pdma):
    if text is not None:
        picture.write("etc/cufile.json", text)
    cufile = side_of(picture, **environment).cufile
    assert (cufile.allow_compat, cufile.p2pdma, cufile.config_error) == (allowed, p2pdma, "")
    assert cufile.config == ("" if text is None else "/etc/cufile.json")


@pytest.mark.parametrize("text", [None, "{"])
def test_a_configuration_that_cannot_be_read_is_told(picture, text):
    if text is not None:
        picture.write("opt/my.json", text)
    cufile = side_of(picture, CUFILE_ENV_PATH_JSON="/opt/my.json").cufile
    assert cufile.config == "/opt/my.json"
    assert cufile.config_error


def test_the_systems_libcufile_is_told_with_its_version(picture):
    place = "usr/local/cuda-12.8/targets/x86_64-linux/lib"
    picture.write(f"{place}/libcufile.so.1.13.1", "")
    (picture.root / place / "libcufile.so.0").symlink_to("libcufile.so.1.13.1")
    picture.link("usr/local/cuda/lib64", place)
    assert side_of(picture).cufile.library == f"/{place}/libcufile.so.1.13.1"


def test_only_variables_of_cufile_and_kvikio_are_kept(picture):
    found = side_of(picture, KVIKIO_NTHREADS="8", CUFILE_LOGGING_LEVEL="INFO", HOME="/root", AWS_SECRET="x").cufile
    assert found.environment == {"CUFILE_LOGGING_LEVEL": "INFO", "KVIKIO_NTHREADS": "8"}


def test_only_installed_packages_have_versions():
    def find(package):
        if package not in {"numpy", "kvikio-cu13"}:
            raise PackageNotFoundError(package)
        return "1.0"

    assert gather_software(find).versions == {"shardkit": __version__, "numpy": "1.0", "kvikio-cu13": "1.0"}


def test_cuda_is_asked_only_where_there_is_something_to_ask(picture, tmp_path):
    command = ["sh", "-c", """echo '{"error": "asked"}'"""]
    assert gather(tmp_path, root=picture.root, cuda_command=command).gpu.cuda is None
    put_gpu(picture)
    assert gather(tmp_path, root=picture.root, cuda_command=command).gpu.cuda == CudaAnswer(error="asked")
    cuda = gather(tmp_path, root=picture.root, cuda_command=["/no/such/program"]).gpu.cuda
    assert cuda is not None
    assert "No such file" in cuda.error


@pytest.mark.parametrize("package", ["kvikio-cu13", "kvikio"])
def test_kvikio_is_asked_where_it_is_installed(picture, tmp_path, monkeypatch, package):
    folder = f"{package.replace('-', '_')}-26.10.dist-info"
    picture.write(f"site/{folder}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 26.10\n")
    monkeypatch.syspath_prepend(picture.root / "site")
    command = ["sh", "-c", """echo '{"settings": {"num_threads": 3}}'"""]
    facts = gather(tmp_path, root=picture.root, kvikio_command=command)
    assert facts.software.versions[package] == "26.10"
    assert facts.gpu.kvikio == KvikAnswer(settings={"num_threads": 3})
    silent = gather(tmp_path, root=picture.root, kvikio_command=["sleep", "60"], patience_s=0.1).gpu.kvikio
    assert silent == KvikAnswer(error="KvikIO did not answer within 0.1 s")


@pytest.mark.skipif(find_spec("kvikio") is not None, reason="KvikIO is installed")
def test_a_kvikio_that_is_not_installed_is_not_asked(picture, tmp_path):
    assert gather(tmp_path, root=picture.root, kvikio_command=["sh", "-c", "echo '{}'"]).gpu.kvikio is None
