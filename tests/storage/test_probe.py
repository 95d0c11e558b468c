from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from shardkit.errors import StorageError
from shardkit.storage.probe import available_memory, cgroup_headroom, find_mount, mount_of, probe

MOUNTINFO = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
24 27 0:6 / /dev rw,relatime - devtmpfs devtmpfs rw,mode=755
25 24 0:23 / /dev/shm rw shared:4 master:1 - tmpfs tmpfs rw
30 27 0:30 / /data rw,relatime shared:7 - nfs4 server:/export/data rw,vers=4.2
31 27 0:31 / /data rw,relatime shared:8 - xfs /dev/nvme0n1 rw
32 27 0:32 / /with\\040blank\\134and\\011tab rw - btrfs /dev/sd\\040b rw
"""


@pytest.mark.parametrize(
    ("path", "file_system", "point"),
    [
        ("/", "ext4", "/"),
        ("/home/x", "ext4", "/"),
        ("/dev", "devtmpfs", "/dev"),
        ("/dev/shm/x", "tmpfs", "/dev/shm"),
        ("/dev/shmx", "devtmpfs", "/dev"),
        ("/data/set", "xfs", "/data"),  # mounted over the other one
        ("/database", "ext4", "/"),
        ("/with blank\\and\ttab/x", "btrfs", "/with blank\\and\ttab"),
    ],
)
def test_the_mount_of_a_path_is_the_longest_and_topmost(path, file_system, point):
    found = find_mount(MOUNTINFO, path)
    assert (found.file_system, found.point) == (file_system, point)


def test_a_mount_keeps_its_source():
    assert find_mount(MOUNTINFO.replace("xfs", "nfs4"), "/data").source == "/dev/nvme0n1"
    assert find_mount(MOUNTINFO, "/with blank\\and\ttab").source == "/dev/sd b"


@pytest.mark.parametrize("text", ["", "\n", "27 1 254:0 / / rw", "27 1 - ext4", "27 1 254:0 / / rw - ext4"])
def test_damaged_mountinfo_is_no_mount(text):
    assert find_mount(text, "/") is None


def test_the_file_system_is_the_one_that_df_names(tmp_path):
    for path in (tmp_path, Path("/proc"), Path("/dev")):
        told = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout
        assert mount_of(path).file_system in {told.strip(), "ext4", "devtmpfs"}
        named = subprocess.run(["df", "--output=fstype,target", path], capture_output=True, text=True, check=True)
        kind, point = named.stdout.splitlines()[1].split()
        assert (mount_of(path).file_system, mount_of(path).point) == (kind, point)


def test_links_are_followed(tmp_path):
    (tmp_path / "link").symlink_to("/proc")
    assert mount_of(tmp_path / "link" / "self").file_system == "proc"


def test_a_file_on_a_disk_opens_for_direct_reads_and_states_its_alignment(tmp_path):
    if mount_of(tmp_path).file_system not in {"ext4", "xfs"}:
        pytest.skip(f"{tmp_path} is on {mount_of(tmp_path).file_system}")
    path = tmp_path / "a"
    path.write_bytes(b"abc")
    facts = probe(path)
    assert facts.direct_refusal is None
    assert facts.direct_align in (None, 512, 1024, 2048, 4096)
    assert probe(tmp_path).direct_align == facts.direct_align
    assert os.listdir(tmp_path) == ["a"]  # asking a folder leaves nothing there


def test_sectors_of_4096_bytes_are_stated(blocks_of_4096):
    (blocks_of_4096 / "a").write_bytes(b"abc")
    assert probe(blocks_of_4096 / "a").direct_align in (None, 4096)


def test_a_refusal_keeps_the_systems_reason(ramfs):
    (ramfs / "a").write_bytes(b"abc")
    for path in (ramfs / "a", ramfs):
        facts = probe(path)
        assert facts.mount.file_system == "ramfs"
        assert facts.direct_refusal is not None
        assert facts.direct_align is None
    assert probe(ramfs / "a").direct_refusal == "EINVAL (Invalid argument)"


def test_what_is_not_there_is_an_error(tmp_path):
    with pytest.raises(StorageError, match="ENOENT"):
        probe(tmp_path / "gone")


def test_a_pipe_is_refused_without_opening_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="neither a file nor a folder"):
        probe(tmp_path / "pipe")


def test_available_memory_is_below_the_total():
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < available_memory() <= total


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_tightest_limit_above_a_group_counts_v2(tmp_path):
    group(tmp_path / "a", memory__max="1000\n", memory__current="900\n", memory__stat="anon 100\nfile 700\n")
    group(tmp_path / "a/b", memory__max="max\n", memory__current="1\n", memory__stat="file 0\n")
    group(tmp_path / "a/b/c", memory__max="5000\n", memory__current="4900\n", memory__stat="file 4000\n")
    assert cgroup_headroom(tmp_path, "0::/a/b/c\n") == 800
    assert cgroup_headroom(tmp_path, "0::/a/b\n") == 800
    assert cgroup_headroom(tmp_path, "0::/\n") is None


def test_a_limit_that_is_exceeded_leaves_nothing(tmp_path):
    group(tmp_path, memory__max="100\n", memory__current="900\n", memory__stat="file 0\n")
    assert cgroup_headroom(tmp_path, "0::/\n") == 0


def test_limits_of_v1_are_read_where_the_container_sees_them(tmp_path):
    group(
        tmp_path / "memory",
        memory__limit_in_bytes="1000\n",
        memory__usage_in_bytes="300\n",
        memory__stat="cache 1\ntotal_cache 200\n",
    )
    membership = "5:cpuset:/x\n4:memory:/docker/not-here\n0::/not-here\n"
    assert cgroup_headroom(tmp_path, membership) == 900


def test_the_v1_number_for_no_limit_is_no_limit(tmp_path):
    group(tmp_path / "memory", memory__limit_in_bytes="9223372036854771712\n", memory__usage_in_bytes="300\n")
    assert cgroup_headroom(tmp_path, "4:memory:/\n") is None


@pytest.mark.parametrize("membership", ["", "nonsense\n", "0::\n", ":::\n"])
def test_membership_that_says_nothing_is_no_limit(tmp_path, membership):
    assert cgroup_headroom(tmp_path, membership) is None


@pytest.mark.parametrize("character", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_a_mount_point_may_hold_what_python_takes_for_a_line_end(character):
    text = MOUNTINFO + f"99 1 0:99 / /a{character}b rw - fuse.x y rw\n"
    assert find_mount(text, f"/a{character}b/c").file_system == "fuse.x"
