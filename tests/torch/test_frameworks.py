"""A ShardLoader inside other people's loops: none of them shards it again, and all of them save and restore its place.

torchdata, Lightning and Accelerate are asked themselves, and compared with a plain `for` over the same loader.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import IterableDataset

from shardkit.testing.images import coloured, write_pictures
from shardkit.torch import ShardLoader

ROOT = Path(__file__).parent.parent.parent
COUNT, BATCH = 26, 4
STEPS, EPOCHS = COUNT // BATCH, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_pictures(tmp_path_factory.mktemp("frameworks") / "ds", coloured(COUNT))


@pytest.fixture
def load(folder):
    made = []

    def make(batch_size=BATCH, **options):
        made.append(ShardLoader(folder, batch_size, size=8, decoder="cpu", fields=("index",), seed=5, **options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


@pytest.fixture(scope="module")
def undisturbed(folder):
    """All batches of all epochs as a plain loop sees them: lists of sample numbers."""
    with ShardLoader(folder, BATCH, size=8, decoder="cpu", fields=("index",), seed=5) as loader:
        assert len(loader) == STEPS
        return [numbers(batch) for _ in range(EPOCHS) for batch in loader]


def numbers(batch):
    return batch[2]["index"].tolist()


def stored(state):
    return json.loads(json.dumps(state))


# torchdata


class Batches(IterableDataset):
    """What a StatefulDataLoader takes: an iterable dataset whose items are batches already."""

    def __init__(self, loader):
        self._loader = loader

    def __iter__(self):
        return iter(self._loader)

    def state_dict(self):
        return self._loader.state_dict()

    def load_state_dict(self, state):
        self._loader.load_state_dict(state)


def as_node(loader):
    nodes = pytest.importorskip("torchdata.nodes")
    return nodes.Loader(nodes.IterableWrapper(loader))


def as_prefetched_node(loader):
    nodes = pytest.importorskip("torchdata.nodes")
    return nodes.Loader(nodes.Prefetcher(nodes.IterableWrapper(loader), prefetch_factor=2))


def as_stateful_data_loader(loader):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    return torchdata.StatefulDataLoader(Batches(loader), batch_size=None)


def test_torchdata_sees_a_stateful_object(load):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    assert isinstance(load(), torchdata.Stateful)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 with torch 2.13
@pytest.mark.parametrize("wrap", [as_node, as_prefetched_node, as_stateful_data_loader])
@pytest.mark.parametrize("step", [0, 1, STEPS - 1, STEPS, STEPS + 2])
def test_torchdata_saves_and_restores_the_place(load, undisturbed, wrap, step):
    loader = wrap(load())
    seen = []
    while len(seen) < step:
        for batch in loader:
            seen.append(numbers(batch))
            if len(seen) == step:
                break
    state = stored(loader.state_dict())
    resumed = wrap(load())
    resumed.load_state_dict(state)
    while len(seen) < len(undisturbed):
        before = len(seen)
        seen += [numbers(batch) for batch in resumed]
        assert len(seen) > before or before in {STEPS, 2 * STEPS}  # what is left of an epoch that is over is nothing
    assert seen == undisturbed


# Lightning


@pytest.fixture
def lightning():
    return pytest.importorskip("pytorch_lightning")


@pytest.fixture
def model(lightning):
    """A function that makes models which note what they are trained on."""

    class Recorder(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen, self.validated = [], []

        def training_step(self, batch):
            self.seen.append(numbers(batch))
            return self.layer(batch[0].mean().reshape(1, 1)).sum()

        def validation_step(self, batch):
            self.validated += numbers(batch)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Recorder


@pytest.fixture
def fit(lightning):
    """A function that trains a model, on loaders that are made where Lightning asks for them."""

    def run(model, make, folder=None, *, ckpt_path=None, val=None, **options):
        class Data(lightning.LightningDataModule):
            loader = state = None

            def train_dataloader(self):
                self.loader = make()
                if self.state is not None:
                    self.loader.load_state_dict(self.state)
                return self.loader

            def state_dict(self):
                return self.loader.state_dict()

            def load_state_dict(self, state):
                self.state = state

        callbacks = [] if folder is None else checkpoints(lightning, folder)
        trainer = lightning.Trainer(**QUIET | {"max_epochs": EPOCHS, "callbacks": callbacks} | options)
        data = Data()
        if val is not None:
            data.val_dataloader = lambda: val
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
        return trainer

    return run


QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}  # fmt: skip


def checkpoints(lightning, folder):
    make = lightning.callbacks.ModelCheckpoint
    name = {"auto_insert_metric_name": False, "save_top_k": -1}
    return [
        make(folder, filename="step-{step}", every_n_train_steps=1, save_on_train_epoch_end=False, **name),
        make(folder, filename="epoch-{epoch}", every_n_epochs=1, save_on_train_epoch_end=True, **name),
    ]


quietly = pytest.mark.filterwarnings(
    "ignore::UserWarning:pytorch_lightning", "ignore::UserWarning:lightning_fabric", "ignore::FutureWarning",
    "ignore::DeprecationWarning", "ignore:.*LeafSpec",
)  # fmt: skip


@quietly
def test_lightning_trains_on_what_a_plain_loop_sees(load, undisturbed, fit, model):
    recorder = model()
    fit(recorder, load, enable_checkpointing=False, val=load(train=False))
    assert recorder.seen == undisturbed
    assert recorder.validated == list(range(COUNT)) * EPOCHS


@quietly
def test_lightning_takes_a_loader_by_itself(load, lightning, undisturbed, model):
    recorder = model()
    loader = load()
    trainer = lightning.Trainer(max_epochs=EPOCHS, enable_checkpointing=False, **QUIET)
    trainer.fit(recorder, loader)
    assert trainer.train_dataloader is loader
    assert recorder.seen == undisturbed


@quietly
def test_a_checkpoint_of_lightning_holds_the_place_of_its_loaders(load, lightning, undisturbed, model, tmp_path):
    """Lightning's own doing, without a data module: only what is saved inside an epoch is restored."""
    trainer = lightning.Trainer(max_epochs=EPOCHS, callbacks=checkpoints(lightning, tmp_path), **QUIET)
    trainer.fit(model(), load())
    for step in (1, 2, STEPS - 1, STEPS + 1, 2 * STEPS + 3):
        recorder = model()
        trainer = lightning.Trainer(max_epochs=EPOCHS, enable_checkpointing=False, **QUIET)
        trainer.fit(recorder, load(), ckpt_path=tmp_path / f"step-{step}.ckpt")
        assert recorder.seen == undisturbed[step:], step


@quietly
def test_a_data_module_restores_the_place_from_every_checkpoint(load, undisturbed, fit, model, tmp_path):
    fit(model(), load, tmp_path)
    names = {f"step-{step}": step for step in range(1, STEPS * EPOCHS)}
    names |= {f"epoch-{epoch}": (epoch + 1) * STEPS for epoch in range(EPOCHS)}
    for name, step in names.items():
        resumed = model()
        fit(resumed, load, ckpt_path=tmp_path / f"{name}.ckpt", enable_checkpointing=False)
        assert resumed.seen == undisturbed[step:], name


# Accelerate


@pytest.fixture
def accelerator():
    return pytest.importorskip("accelerate").Accelerator(cpu=True)


def test_accelerate_leaves_the_loader_as_it_is(load, accelerator):
    loader, layer = load(), torch.nn.Linear(1, 1)
    prepared = accelerator.prepare(loader, layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    assert prepared[0] is loader


def test_accelerate_saves_and_restores_the_place(load, accelerator, undisturbed, tmp_path):
    first, second = load(), load()
    accelerator.register_for_checkpointing(first)
    batches = iter(first)
    seen = [numbers(next(batches)) for _ in range(2)]
    accelerator.save_state(tmp_path)
    another = type(accelerator)(cpu=True)
    another.register_for_checkpointing(second)
    another.load_state(tmp_path)
    assert seen + [numbers(batch) for batch in second] == undisturbed[:STEPS]


# Two processes each

SCRIPT = """
import json, sys
import torch
from shardkit.torch import ShardLoader

def loader():
    return ShardLoader(sys.argv[1], 2, size=8, decoder="cpu", fields=("index",), seed=5)

def write(rank, world_size, seen):
    with open(f"{sys.argv[2]}-{rank}.json", "w") as file:
        json.dump([world_size, seen], file)
"""
ACCELERATE = """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
layer = torch.nn.Linear(1, 1)
batches, layer = accelerator.prepare(loader(), layer)
seen = [extras["index"].tolist() for _ in range(2) for _, _, extras in batches]
write(accelerator.process_index, accelerator.num_processes, seen)
accelerator.end_training()
"""
LIGHTNING = """
import pytorch_lightning as pl

class Recorder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(1, 1), []

    def training_step(self, batch):
        self.seen.append(batch[2]["index"].tolist())
        return self.layer(batch[0].mean().reshape(1, 1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return loader()

trainer = pl.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False, enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False,
)
recorder = Recorder()
trainer.fit(recorder)
write(trainer.global_rank, trainer.world_size, recorder.seen)
"""


@pytest.mark.parametrize(("library", "code"), [("accelerate", ACCELERATE), ("pytorch_lightning", LIGHTNING)])
def test_two_processes_share_every_global_batch_once(folder, undisturbed, tmp_path, library, code):
    pytest.importorskip(library)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + code)
    command = [sys.executable, script, folder, tmp_path / "rank"]
    if library == "accelerate":  # Lightning starts its second process itself
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [world_size for world_size, _ in ranks] == [2, 2]
    together = [sorted(one + two) for (one, two) in zip(ranks[0][1], ranks[1][1], strict=True)]
    assert together == [sorted(batch) for batch in undisturbed[: 2 * STEPS]]
