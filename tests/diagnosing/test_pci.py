"""Where devices sit on the PCI bus."""

from __future__ import annotations

import pytest

from shardkit.diagnosing.pci import Route, chain_of, route

SWITCH = ("pci0000:15", "0000:15:01.0", "0000:16:00.0")


@pytest.mark.parametrize(
    ("place", "chain"),
    [
        ("sys/devices/pci0000:00/0000:00:02.0/virtio1/block/vda", ("pci0000:00", "0000:00:02.0")),
        ("sys/devices/pci0001:80/0001:80:01.1/0001:81:00.0/nvme/nvme3", ("pci0001:80", "0001:80:01.1", "0001:81:00.0")),
        ("sys/devices/pci10000:e0/10000:e0:06.0/10000:e1:00.0", ("pci10000:e0", "10000:e0:06.0", "10000:e1:00.0")),
        ("sys/devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1", ()),
        ("", ()),
    ],
)
def test_a_chain_is_every_bridge_on_the_way(place, chain):
    assert chain_of(place) == chain


def test_devices_below_one_switch_meet_at_its_lowest_port():
    disk, card = (*SWITCH, "0000:17:01.0", "0000:19:00.0"), (*SWITCH, "0000:17:00.0", "0000:18:00.0")
    assert route(disk, card) == route(card, disk) == Route("bridge", "0000:16:00.0")


@pytest.mark.parametrize(
    ("disk", "card", "found"),
    [
        (("pci0000:15", "0000:15:01.0", "0000:16:00.0"), ("pci0000:15", "0000:15:01.0", "0000:16:00.1"), "bridge"),
        (("pci0000:15", "0000:15:01.0", "0000:16:00.0"), ("pci0000:15", "0000:15:03.0", "0000:17:00.0"), "root"),
        (("pci0000:00", "0000:00:02.0"), ("pci0000:00", "0000:00:02.0"), "root"),
        (("pci0000:15", "0000:15:01.0"), ("pci0000:97", "0000:15:01.0"), "apart"),
        ((), ("pci0000:97", "0000:15:01.0"), "unknown"),
        (("pci0000:97",), ("pci0000:97", "0000:15:01.0"), "unknown"),
    ],
)
def test_a_device_is_no_bridge_to_itself(disk, card, found):
    assert route(disk, card).kind == found
