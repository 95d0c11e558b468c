"""From a folder of JPEGs to batches: pack, verify, two epochs on the CPU, and a contact sheet of one batch.

Without --src a tree of photographs is made first; nothing is downloaded. A folder given by --src is only read.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from contact_sheet import contact_sheet, pictures_of

import shardkit
from shardkit.torch import ShardLoader

if TYPE_CHECKING:
    from torch import Tensor

_SOME_WERE_REFUSED = 3
_BATCH = 64
_EPOCHS = 2


def main() -> None:
    options = parse(sys.argv[1:])
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    source = options.src or make_photos(work / "photos")
    dataset = pack(source, work / "dataset", several_shards=options.src is None)
    shardkit_command("verify", str(dataset))
    sheet = work / "contact-sheet.html"
    sheet.write_text(iterate(dataset), encoding="utf-8")
    print(f"\ncontact sheet of the first batch: {sheet.resolve().as_uri()}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder for everything that is made")
    parser.add_argument("--src", type=Path, metavar="FOLDER", help="your own JPEGs, CLASS/NAME.jpg or flat; only read")
    options = parser.parse_args(arguments)
    if options.src is not None:
        if not options.src.is_dir():
            parser.error(f"--src is no folder: {options.src}")
        if options.work.resolve().is_relative_to(options.src.resolve()):
            parser.error("--work lies inside --src, which is only read; name a folder elsewhere")
    return options


def make_photos(root: Path) -> Path:
    script = Path(__file__).with_name("make_photos.py")
    echo("python", "scripts/make_photos.py", str(root))
    subprocess.run([sys.executable, str(script), str(root)], check=True)
    return root


def pack(source: Path, dataset: Path, *, several_shards: bool) -> Path:
    arguments = ["pack", str(source), str(dataset)]
    if several_shards:  # the photographs of the demo would all fit into one shard of the usual size
        arguments += ["--shard-size", "8MB"]
    if dataset.exists():
        arguments.append("--overwrite")
    if shardkit_command(*arguments) == _SOME_WERE_REFUSED:
        if not (dataset / "manifest.json").exists():
            sys.exit(_SOME_WERE_REFUSED)  # every file was refused; the command has said so
        print(f"some files were refused; {dataset / 'rejected.jsonl'} says which and why")
    return dataset


def shardkit_command(*arguments: str) -> int:
    """Run `shardkit ...` as one would type it; end the demo with its exit code where it failed."""
    echo("shardkit", *arguments)
    code = subprocess.run([sys.executable, "-m", "shardkit", *arguments], check=False).returncode
    if code not in (0, _SOME_WERE_REFUSED):
        sys.exit(code)
    return code


def echo(*words: str) -> None:
    print(f"\n$ {shlex.join(words)}", flush=True)


def iterate(dataset: Path) -> str:
    """Run the epochs, print their speed, and return the contact sheet of the first batch."""
    shards = shardkit.open(dataset)
    batch_size = min(_BATCH, len(shards))
    loader = ShardLoader(dataset, batch_size=batch_size, size=224, train=True, device="cpu", seed=0)
    call = f'ShardLoader("{dataset}", batch_size={batch_size}, size=224, train=True, device="cpu", seed=0)'
    print(f"\n>>> loader = {call}")
    first: tuple[Tensor, Tensor] | None = None
    for epoch in range(_EPOCHS):
        loader.set_epoch(epoch)
        count, start = 0, time.perf_counter()
        for images, labels in loader:
            count += len(labels)
            first = first or (images.clone(), labels.clone())
        seconds = time.perf_counter() - start
        print(f"epoch {epoch}: {count} images in {seconds:.2f} s, {count / seconds:,.0f} images/s", flush=True)
    if first is None:
        sys.exit("the loader gave no batch")
    images, labels = first
    pictures = pictures_of(images.float().numpy(), loader.mean, loader.std)
    names = shards.classes or ()
    captions = [names[label] if 0 <= label < len(names) else "" for label in labels.tolist()]
    return contact_sheet(pictures, captions, title=f"First batch of {dataset.name}", note=call)


if __name__ == "__main__":
    main()
