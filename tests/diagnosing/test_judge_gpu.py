"""Verdicts about GPUs, their driver, their place beside the disk, and GPUDirect Storage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardkit.diagnosing.facts import (
    Block,
    Container,
    Controller,
    CuFile,
    GpuSide,
    Iommu,
    KvikAnswer,
    Software,
    Storage,
)
from shardkit.diagnosing.judge_gds import gds_obstacles, judge_gds
from shardkit.diagnosing.judge_gpu import extra_of, judge_gpu
from shardkit.diagnosing.judge_places import judge_places
from shardkit.diagnosing.judge_software import judge_software
from shardkit.diagnosing.roads import barriers, roads


def lines(facts):
    return {line.name: line for line in (*judge_gpu(facts), *judge_places(facts), *judge_gds(facts))}


def with_gpu(facts, **values):
    return replace(facts, gpu=replace(facts.gpu, **values))


def with_cuda(facts, **values):
    return with_gpu(facts, cuda=replace(facts.gpu.cuda, **values))


def with_host(facts, **values):
    return replace(facts, host=replace(facts.host, **values))


def with_blocks(facts, *blocks):
    return replace(facts, storage=replace(facts.storage, blocks=blocks))


def with_mount(facts, **values):
    probed = facts.storage.probed
    return replace(facts, storage=replace(facts.storage, probed=replace(probed, mount=replace(probed.mount, **values))))


def test_a_machine_without_a_gpu_misses_nothing(no_gpu):
    cufile = CuFile(allow_compat=False, environment={"KVIKIO_COMPAT_MODE": "OFF", "CUFILE_LOGGING_LEVEL": "INFO"})
    inside = Container(kind="docker", udev=False, capabilities="compute,utility")
    careless = with_host(with_gpu(no_gpu, cufile=cufile), container=inside)
    for facts in (no_gpu, careless):
        assert {line.status for line in lines(facts).values()} <= {"ok", "info"}
        assert {line.status for line in judge_software(facts)} == {"info"}


def test_what_can_be_read_without_a_gpu_is_told_without_one(no_gpu):
    config = CuFile(config="/opt/x.json", allow_compat=False, p2pdma=True, environment={"KVIKIO_NTHREADS": "8"})
    iommu = Iommu(units=("dmar0",), options=("intel_iommu=on",))
    found = {name: line.found for name, line in lines(with_host(with_gpu(no_gpu, cufile=config), iommu=iommu)).items()}
    assert found["IOMMU"] == "on (intel_iommu=on); whether it translates, a GPU would tell"
    assert found["/run/udev"] == "can be read"
    assert found["cuFile configuration"] == "/opt/x.json; compatibility mode allowed: no; P2PDMA on"
    assert "NTHREADS=8" in found["KvikIO"]
    assert found["GPUDirect Storage"].startswith("no: there is no NVIDIA GPU, ")
    assert "nvidia-fs is not loaded" in found["GDS by nvidia-fs"]
    assert "static BAR1" in found["GDS by P2PDMA"]


def test_a_broken_configuration_is_broken_without_a_gpu_too(no_gpu):
    broken = with_gpu(no_gpu, cufile=CuFile(config="/opt/x.json", config_error="not JSON: line 1"))
    assert lines(broken)["cuFile configuration"].status == "fail"


def test_a_box_of_eight_is_told_whole(nvme_box):
    found = lines(nvme_box)
    assert found["GPUs"].found == "8 x NVIDIA H200"
    assert found["driver"].found == "580.159 open"
    assert found["CUDA"].found == "13.0, 8 GPUs, 140 GiB each"
    assert found["JPEG engines"].found == "7 of 1 core"
    assert found["IOMMU"].found == "off"
    assert found["GPUDirect Storage"].status == "ok"


def test_only_gpus_of_the_disks_node_are_near_it(nvme_box):
    found = lines(nvme_box)
    assert "shares bridge 0000:15:01.0 with nvme0" in found["GPU 0"].found
    assert "another root complex than nvme0" in found["GPU 1"].found
    assert [found[f"GPU {number}"].status for number in range(8)] == ["ok"] * 4 + ["warn"] * 4
    assert "numactl --cpunodebind=1 --membind=1" in found["GPU 4"].remedy


def test_reads_from_device_to_device_want_one_root_complex(nvme_box):
    line = lines(nvme_box)["GDS path"]
    assert (line.status, line.found.partition(":")[0]) == ("warn", "GPU 1, 2, 3, 4, 5, 6, 7")
    near = with_gpu(nvme_box, gpus=nvme_box.gpu.gpus[:1])
    assert lines(near)["GDS path"].status == "ok"
    (disk,) = nvme_box.storage.blocks
    other = Controller(name="nvme1", chain=("pci0000:97", "0000:97:01.0", "0000:98:00.0"), node=1)
    raid = with_blocks(nvme_box, disk, replace(disk, name="nvme1n1", controllers=(other,)))
    assert lines(raid)["GDS path"].found.startswith("GPU 1, 2, 3, 5, 6, 7:")


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: with_host(facts, guest=True),
        lambda facts: with_gpu(facts, registry=""),
        lambda facts: with_gpu(facts, gpus=()),
        lambda facts: with_gpu(facts, gpus=(replace(facts.gpu.gpus[0], chain=()),)),
        lambda facts: with_blocks(facts),
    ],
)
def test_where_no_read_goes_that_way_it_is_not_judged(nvme_box, change):
    assert "GDS path" not in lines(change(nvme_box))


@pytest.mark.parametrize(
    ("runs", "policy", "status", "says"),
    [
        ((0, 1), "default", "info", "none: runs on nodes 0, 1"),
        ((0,), "default", "ok", "runs on node 0"),
        ((0,), "bind:0", "ok", "runs on node 0, memory of node 0"),
        ((1,), "default", "warn", "runs on node 1; the GPUs are on node 0"),
        ((0,), "bind:1", "warn", "runs on node 0, memory of node 1; the GPUs are on node 0"),
        ((0, 1), "bind=static:1", "warn", "runs on nodes 0, 1, memory of node 1; the GPUs are on node 0"),
        ((0, 1), "interleave:0-1", "info", "none: runs on nodes 0, 1"),
    ],
)
def test_a_process_should_be_bound_to_the_node_of_its_gpus(nvme_box, runs, policy, status, says):
    near = with_gpu(nvme_box, gpus=nvme_box.gpu.gpus[:4])
    line = lines(with_host(near, run_nodes=runs, memory_policy=policy))["NUMA binding"]
    assert (line.status, line.found) == (status, says)
    assert line.remedy == ("numactl --cpunodebind=0 --membind=0" if status == "warn" else "")


def test_without_a_gpu_the_disk_says_where_a_process_belongs(no_gpu):
    bound = with_host(no_gpu, run_nodes=(1,), memory_policy="default")
    assert lines(bound)["NUMA binding"].found == "runs on node 1; the disk is on node 0"
    assert lines(with_host(bound, guest=True))["NUMA binding"].status == "info"
    assert lines(with_blocks(bound))["NUMA binding"].status == "ok"
    assert "NUMA binding" not in lines(with_host(bound, nodes=(0,), run_nodes=(0,)))


def test_every_libcufile_is_told(nvme_box, no_gpu):
    both = with_gpu(nvme_box, cufile=CuFile(library="/usr/lib/libcufile.so.1.13.1"))
    assert lines(both)["libcufile"].found == "nvidia-cufile 1.20, /usr/lib/libcufile.so.1.13.1"
    assert lines(no_gpu)["libcufile"].found == "not here"


def test_the_place_in_a_virtual_machine_is_no_verdict(nvme_box):
    assert lines(with_host(nvme_box, guest=True))["GPU 4"].status == "info"


def test_lost_lanes_are_a_warning(nvme_box):
    card = replace(nvme_box.gpu.gpus[0], width=8)
    assert lines(with_gpu(nvme_box, gpus=(card,)))["GPU 0 link"].found == "8 of 16 PCIe lanes"
    assert "GPU 0 link" not in lines(nvme_box)


def test_a_container_without_the_video_capability_is_told_how_to_start(container):
    found = lines(container)
    remedy = "docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"
    assert found["NVIDIA_DRIVER_CAPABILITIES"].remedy == found["libnvcuvid"].remedy == remedy
    assert found["JPEG engines"].status == "warn"
    assert found["/run/udev"].remedy == "docker run -v /run/udev:/run/udev:ro"


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("all", "ok"),
        ("video, compute,utility", "ok"),
        ("compute,utility", "warn"),
        ("", "warn"),
        ("compute,video", "warn"),
    ],
)
def test_capabilities_are_words(nvme_box, words, status):
    assert (
        lines(with_host(nvme_box, container=Container(capabilities=words)))["NVIDIA_DRIVER_CAPABILITIES"].status
        == status
    )


@pytest.mark.parametrize(
    ("error", "kind", "remedy"),
    [
        ("there is no NVIDIA driver here: libcuda.so.1: cannot open", "docker", "docker run --gpus all"),
        ("there is no NVIDIA driver here: libcuda.so.1: cannot open", "", "apt install libnvidia-compute"),
        ("a GPU is driven through the package cuda-bindings, which is not installed: x", "", "'shardkit[gpu-cu13]'"),
        ("the driver did not answer within 10 s", "", "dmesg | grep -i xid"),
        ("CUDA cannot be used here: cuInit: CUDA_ERROR_UNKNOWN", "", "nvidia-smi -q"),
    ],
)
def test_a_cuda_that_fails_has_the_remedy_of_its_cause(nvme_box, error, kind, remedy):
    facts = with_host(with_cuda(nvme_box, error=error, version=None), container=Container(kind=kind))
    found = lines(facts)["CUDA"]
    assert (found.status, found.found) == ("fail", error)
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("holder", "remedy"), [("vfio-pci", "back to the host"), ("nouveau", "nvidia-open"), ("", "nvidia-open")]
)
def test_a_gpu_without_its_driver_is_a_failure(nvme_box, holder, remedy):
    card = replace(nvme_box.gpu.gpus[0], driver=holder)
    found = lines(replace(nvme_box, gpu=GpuSide(gpus=(card,))))
    assert (found["driver"].status, found["device files"].status) == ("fail", "fail")
    assert remedy in found["driver"].remedy


@pytest.mark.parametrize(
    ("units", "kind", "status"),
    [((), "", "ok"), (("dmar0",), "identity", "ok"), (("dmar0",), "DMA-FQ", "warn"), (("dmar0",), "", "info")],
)
def test_an_iommu_is_in_the_way_when_it_translates(nvme_box, units, kind, status):
    gpus = tuple(replace(card, iommu=kind) for card in nvme_box.gpu.gpus)
    facts = with_host(with_gpu(nvme_box, gpus=gpus), iommu=Iommu(units=units, options=("iommu=pt",)))
    assert lines(facts)["IOMMU"].status == status
    assert any("IOMMU" in barrier.why for barrier in barriers(facts)) == (status == "warn")


@pytest.mark.parametrize(
    ("units", "guest", "status", "says"),
    [
        ((), False, "ok", "off"),
        ((), True, "ok", "off, as the virtual machine shows it"),
        (None, False, "info", "none, or hidden: there is no /sys/class/iommu"),
    ],
)
def test_no_iommu_is_not_the_same_as_none_shown(no_gpu, units, guest, status, says):
    line = lines(with_host(no_gpu, iommu=Iommu(units=units), guest=guest))["IOMMU"]
    assert (line.status, line.found) == (status, says)


def test_one_open_road_is_enough(nvme_box):
    nvidia_fs, p2pdma = roads(nvme_box)
    assert [obstacle.why for obstacle in nvidia_fs.obstacles] == ["the module nvidia-fs is not loaded"]
    assert p2pdma.obstacles == ()
    assert gds_obstacles(nvme_box) == ()
    module = with_gpu(nvme_box, nvidia_fs="2.26", p2pdma=False, registry="", cufile=CuFile())
    assert [bool(road.obstacles) for road in roads(module)] == [False, True]
    assert gds_obstacles(module) == ()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda facts: with_host(facts, kernel="6.1.0"), "older than 6.2"),
        (lambda facts: with_host(facts, machine="aarch64"), "Arm"),
        (lambda facts: with_gpu(facts, p2pdma=False), "CONFIG_PCI_P2PDMA"),
        (lambda facts: with_gpu(facts, driver="560.35"), "565"),
        (lambda facts: with_gpu(facts, open_driver=False), "open driver"),
        (lambda facts: with_gpu(facts, registry="RMForceStaticBar1=1"), "static BAR1"),
        (lambda facts: with_gpu(facts, nvme_multipath=True), "multipath"),
        (lambda facts: with_gpu(facts, cufile=CuFile()), "use_pci_p2pdma"),
        (lambda facts: with_mount(facts, file_system="btrfs"), "not on btrfs"),
        (lambda facts: with_mount(facts, file_system="ext4", options=("rw", "data=writeback")), "data=ordered"),
        (lambda facts: with_blocks(facts, Block(name="vda", kind="virtio")), "not on NVMe"),
        (lambda facts: with_blocks(facts), "not on NVMe"),
        (
            lambda facts: with_blocks(
                facts, Block(name="md0", kind="raid", detail="raid0", members=("nvme0n1",)), *facts.storage.blocks
            ),
            "RAID",
        ),
        (
            lambda facts: with_blocks(
                facts, replace(facts.storage.blocks[0], controllers=(Controller(name="nvme0", transport="tcp"),))
            ),
            "network",
        ),
    ],
)
def test_p2pdma_has_many_conditions(nvme_box, change, why):
    (obstacle,) = roads(change(nvme_box))[1].obstacles
    assert why in obstacle.why
    assert obstacle.remedy


def test_a_module_carries_a_raid_of_nvme_and_nfs_by_rdma(nvme_box, nfs_client):
    module = with_gpu(nvme_box, nvidia_fs="2.26")
    raid = Block(name="md0", kind="raid", detail="raid0", members=("nvme0n1",))
    assert roads(with_blocks(module, raid, *module.storage.blocks))[0].obstacles == ()
    assert roads(with_blocks(module, replace(raid, detail="raid5"), *module.storage.blocks))[0].obstacles
    client = with_gpu(nfs_client, nvidia_fs="2.26")
    assert [obstacle.why for obstacle in roads(client)[0].obstacles] == ["not on nfs4"]
    assert roads(with_mount(client, options=("rw", "proto=rdma")))[0].obstacles == ()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda facts: with_cuda(facts, error="x"), "CUDA"),
        (lambda facts: with_host(facts, container=Container(udev=False)), "/run/udev"),
        (lambda facts: with_gpu(facts, cufile=replace(facts.gpu.cufile, force_compat=True)), "FORCE_COMPAT"),
        (
            lambda facts: with_gpu(facts, cufile=replace(facts.gpu.cufile, environment={"KVIKIO_COMPAT_MODE": "ON"})),
            "KVIKIO_COMPAT_MODE",
        ),
        (lambda facts: replace(facts, software=Software(versions={"nvidia-cufile": "1.20"})), "KvikIO"),
        (lambda facts: replace(facts, software=Software(versions={"kvikio-cu13": "26.10"})), "libcufile"),
        (lambda facts: replace(facts, storage=Storage(path="/x", refusal="gone")), "direct reads"),
        (lambda facts: with_cuda(facts, gds_mode="cuFile compat"), "cuFile takes cuFile compat"),
        (lambda facts: with_cuda(facts, gds_mode="", gds_error="crashed"), "crashed"),
    ],
)
def test_some_things_are_in_every_way(nvme_box, change, why):
    obstacles = gds_obstacles(change(nvme_box))
    assert [why in obstacle.why for obstacle in obstacles] == [True]


def test_what_can_be_had_by_setting_it_up_is_a_warning_and_what_cannot_is_not(nvme_box, container):
    unset = with_cuda(with_gpu(nvme_box, registry="", cufile=CuFile()), gds_mode="POSIX")
    found = lines(unset)["GPUDirect Storage"]
    assert found.status == "warn"
    assert "modprobe nvidia-fs" in found.remedy
    assert found.found.endswith("what reads instead: POSIX")
    assert lines(container)["GPUDirect Storage"].status == "info"


def test_a_forbidden_compatibility_mode_is_told_where_nothing_else_can_read(nvme_box):
    strict = replace(nvme_box.gpu.cufile, allow_compat=False)
    assert "cuFile compatibility mode" not in lines(with_gpu(nvme_box, cufile=strict))
    blocked = with_gpu(nvme_box, cufile=strict, registry="")
    assert lines(blocked)["cuFile compatibility mode"].status == "warn"


@pytest.mark.parametrize(("word", "blocked", "told"), [("ON", False, True), ("OFF", False, False), ("OFF", True, True)])
def test_kvikios_mode_is_told_where_it_hurts(nvme_box, word, blocked, told):
    cufile = replace(nvme_box.gpu.cufile, environment={"KVIKIO_COMPAT_MODE": word}, p2pdma=not blocked)
    found = lines(with_gpu(nvme_box, cufile=cufile))
    assert ("KVIKIO_COMPAT_MODE" in found) == told
    assert f"COMPAT_MODE={word}" in found["KvikIO"].found


def test_kvikios_settings_are_those_that_it_told(nvme_box):
    assert (
        lines(nvme_box)["KvikIO"].found == "compat_mode AUTO, num_threads 1, task_size 4 MiB, auto_direct_io_read off"
    )
    given = replace(nvme_box.gpu.cufile, environment={"KVIKIO_NTHREADS": "8", "CUFILE_LOGGING_LEVEL": "INFO"})
    told = KvikAnswer(settings={"num_threads": 8})
    found = lines(with_gpu(nvme_box, cufile=given, kvikio=told))["KvikIO"].found
    assert found == "num_threads 8; the environment says KVIKIO_NTHREADS=8"
    unasked = with_gpu(nvme_box, cufile=given, kvikio=None)
    bare = replace(unasked, software=Software())
    assert lines(unasked)["KvikIO"].found == "not asked for its settings; the environment says KVIKIO_NTHREADS=8"
    assert lines(bare)["KvikIO"].found == "not installed; the environment says KVIKIO_NTHREADS=8"


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        ("KvikIO's settings cannot be read: unknown config value KVIKIO_NTHREADS=x", "unset KVIKIO_NTHREADS"),
        ("KvikIO's settings cannot be read: no libcufile", "pip install 'shardkit[gpu-cu13]'"),
    ],
)
def test_a_kvikio_that_does_not_tell_is_a_warning_beside_a_gpu(nvme_box, error, remedy):
    broken = with_gpu(nvme_box, kvikio=KvikAnswer(error=error))
    line = lines(broken)["KvikIO"]
    assert (line.status, line.found, line.remedy) == ("warn", error, remedy)
    bare = lines(with_gpu(broken, gpus=(), nodes=False))["KvikIO"]
    assert (bare.status, bare.found, bare.remedy) == ("info", error, "")


def test_a_configuration_that_cannot_be_read_is_a_failure(nvme_box):
    cufile = CuFile(config="/opt/x.json", config_error="not JSON: line 1")
    line = lines(with_gpu(nvme_box, cufile=cufile))["cuFile configuration"]
    assert (line.status, line.found) == ("fail", "/opt/x.json: not JSON: line 1")


def test_packages_for_another_cuda_than_the_drivers_are_a_warning(nvme_box):
    old = with_cuda(nvme_box, version=12040)
    assert {line.name for line in judge_software(old) if line.status == "warn"} == {"DALI", "nvImageCodec", "KvikIO"}
    assert {line.status for line in judge_software(nvme_box)} == {"info"}
    assert (extra_of(old), extra_of(nvme_box)) == ("gpu", "gpu-cu13")


def test_a_torch_without_cuda_beside_a_gpu_is_a_warning(nvme_box, no_gpu):
    versions = {**nvme_box.software.versions, "torch": "2.13.0+cpu"}
    status = {
        facts.gpu.driver: next(line.status for line in judge_software(facts) if line.name == "torch")
        for facts in (replace(facts, software=Software(versions=versions)) for facts in (nvme_box, no_gpu))
    }
    assert status == {"580.159": "warn", "": "info"}


def test_what_a_gpu_needs_is_missed_only_beside_one(nvme_box):
    bare = replace(nvme_box, software=Software(versions={"shardkit": "0.1.0"}))
    missed = {line.name: line.remedy for line in judge_software(bare) if line.status == "warn"}
    assert missed == dict.fromkeys(("DALI", "nvJPEG", "NVRTC", "cuda-bindings"), "pip install 'shardkit[gpu-cu13]'")
