"""The whole report, of machines that are not here."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shardkit.diagnosing.facts import Facts, Storage
from shardkit.diagnosing.report import DEMANDS, examine
from shardkit.storage.probe import Mount

MACHINES = ["nvme_box", "nfs_client", "container", "no_gpu"]


@pytest.fixture(params=MACHINES)
def machine(request):
    return request.getfixturevalue(request.param)


def held(facts, *demands):
    return {line.name: line for line in examine(facts, demands).demands}


def test_every_warning_and_failure_has_a_remedy_and_no_other_line_has(machine):
    report = examine(machine, DEMANDS)
    for line in (*(line for lines in report.sections.values() for line in lines), *report.demands):
        assert bool(line.remedy) == (line.status in {"warn", "fail"}), line
        assert line.found
        assert "\n" not in line.found + line.remedy


def test_names_are_unique_within_a_section(machine):
    for lines in examine(machine).sections.values():
        assert len({line.name for line in lines}) == len(lines)


def test_a_report_is_a_document(machine):
    report = examine(machine, ["gpu"])
    document = json.loads(json.dumps(report.to_json()))
    assert document["schema"] == 1
    assert list(document["sections"]) == ["host", "storage", "gpu", "software"]
    assert sum(document["counts"].values()) == sum(map(len, report.sections.values()))
    assert document["facts"]["host"]["kernel"] == machine.host.kernel
    assert set(document["required"][0]) == {"name", "met", "found", "remedy"}


def test_of_nothing_known_there_is_a_report():
    report = examine(Facts(), DEMANDS)
    remedies = {line.name: line.remedy for line in report.demands}
    assert remedies["gpu"] == remedies["gds"]
    assert ";" not in remedies["gds"]  # the command puts one before it
    assert report.exit_code == 7
    assert json.dumps(report.to_json())


@pytest.mark.parametrize(
    ("machine", "unmet"),
    [
        ("nvme_box", set()),
        ("nfs_client", {"gds"}),
        ("container", {"gds", "uring"}),
        ("no_gpu", {"gpu", "gds"}),
    ],
    indirect=["machine"],
)
def test_a_machine_meets_what_it_can(machine, unmet):
    found = held(machine, *DEMANDS)
    assert list(found) == list(DEMANDS)
    assert {name for name, line in found.items() if line.status == "fail"} == unmet
    for name in DEMANDS:
        assert examine(machine, [name]).exit_code == (7 if name in unmet else 0)


def test_nothing_required_is_nothing_unmet(container):
    report = examine(container)
    assert (report.exit_code, report.demands) == (0, ())
    assert report.counts["warn"] > 5


def test_io_uring_needs_direct_reads_and_a_file_system_that_it_reads_right(nvme_box):
    probed = nvme_box.storage.probed
    refused = replace(probed, direct_refusal="EINVAL (Invalid argument)", direct_align=None)
    fuse = replace(probed, mount=Mount(file_system="fuse.x", point="/data", source="x"))
    for facts, says in ((refused, "EINVAL"), (fuse, "wrongly")):
        assert says in held(replace(nvme_box, storage=Storage(path="/data", probed=facts)), "uring")["uring"].found


def test_no_direct_reads_is_what_statx_says_too(nvme_box):
    probed = replace(nvme_box.storage.probed, direct_align=0)
    facts = replace(nvme_box, storage=replace(nvme_box.storage, probed=probed))
    assert "statx" in held(facts, "direct")["direct"].found


def test_a_gpu_that_cuda_does_not_see_is_no_gpu(nvme_box):
    hidden = replace(nvme_box, gpu=replace(nvme_box.gpu, cuda=replace(nvme_box.gpu.cuda, devices=())))
    unasked = replace(nvme_box, gpu=replace(nvme_box.gpu, cuda=None))
    assert held(hidden, "gpu")["gpu"].status == held(unasked, "gpu")["gpu"].status == "fail"
