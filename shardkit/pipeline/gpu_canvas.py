"""What becomes of whole images in a GPU's memory: planned in columns, a batch at a time, for one launch of a kernel.

The counterpart of `shardkit.pipeline.finish`, whose rules these are: which part is cut, to what it is resized, and
where it goes. Nothing here touches a pixel.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardkit.pipeline.crops import Crops, random_crops
from shardkit.pipeline.kernels import IMAGE, Output

if TYPE_CHECKING:
    import numpy.typing as npt

    from shardkit.dataset.batch import EncodedBatch
    from shardkit.pipeline.decoder import DecodeSpec
    from shardkit.pipeline.gpu_backend import Allocate, Decoded, DeviceArray

    _Ints = npt.NDArray[np.int64]

__all__ = ["Facts", "GpuCanvas", "begun", "drawn_crops", "facts_of", "image_rows", "output_of", "pixel_shape"]

_Pixels: TypeAlias = Any  # the consumer's own arrays
_Rows: TypeAlias = "npt.NDArray[np.void]"
_SIDEWAYS = 5  # EXIF orientations from here to 8 swap width and height
_COLUMNS = ("width", "height", "orientation", "sof", "precision", "scans", "components", "subsampling")


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """What the index says of n images. Owned by whoever asked for it."""

    ids: _Ints
    """[n] numbers of the samples."""
    width: _Ints
    """[n] pixels a line as stored; 0 when unknown."""
    height: _Ints
    """[n] lines, likewise."""
    orientation: _Ints
    """[n] EXIF orientation, 1 to 8."""
    sof: _Ints
    """[n] n of the frame SOFn."""
    precision: _Ints
    """[n] bits a component."""
    scans: _Ints
    components: _Ints
    subsampling: _Ints
    """[n] a code of `shardkit.format.jpeg.SUBSAMPLINGS`."""

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.ids)

    def __getitem__(self, which: npt.NDArray[Any]) -> Facts:
        """Return those of some of the images, chosen by number or by mask."""
        return Facts(*(getattr(self, name)[which] for name in ("ids", *_COLUMNS)))


def facts_of(batch: EncodedBatch, places: _Ints) -> Facts:
    """Look up what the index says of places of a batch."""
    ids = batch.ids[places]
    columns = {name: batch.samples.gather(name, ids) for name in _COLUMNS}
    columns["orientation"] = np.clip(columns["orientation"], 1, 8)
    return Facts(ids, **columns)


def drawn_crops(spec: DecodeSpec, facts: Facts, *, epoch: int) -> Crops | None:
    """Return the random choices for some images; None where nothing is random."""
    if spec.recipe.cut != "random":
        return None
    width, height = _shown(facts.width, facts.height, facts.orientation)
    return random_crops(facts.ids, width, height, seed=spec.seed, epoch=epoch)


def image_rows(spec: DecodeSpec, images: Decoded, crops: Crops | None) -> _Rows:
    """Return what the kernel is to do with whole images, [n] of `IMAGE`, all but the targets' addresses.

    Args:
        spec: of the result.
        images: n of them.
        crops: [n]; None without random crops.
    """
    rows = np.zeros(len(images), IMAGE)
    rows["source"], rows["pitch"], rows["orientation"] = images.addresses, images.pitch, images.orientation
    rows["width"], rows["height"] = images.width, images.height
    width, height = _shown(images.width, images.height, images.orientation)
    rows["w"], rows["h"] = width, height
    if crops is not None:
        rows["x"], rows["y"], rows["w"], rows["h"] = crops.boxes(width, height)
    if spec.recipe.cut == "whole":
        sides = width, height
    else:
        sides = np.full_like(width, spec.size), np.full_like(height, spec.size)
    rows["target_width"], rows["target_height"] = sides
    rows["out_width"], rows["out_height"] = sides
    if spec.recipe.cut == "centre":
        scale = np.minimum(width, height) / spec.shorter
        for side, name in ((width, "width"), (height, "height")):
            rows[f"out_{name}"] = np.maximum(np.rint(side / scale), spec.size)
        # Half a pixel goes down and right, as in `Canvas`.
        rows["cut_x"], rows["cut_y"] = ((rows[side] - spec.size + 1) // 2 for side in ("out_width", "out_height"))
    rows["row"] = rows["target_width"] * (1 if _planar(spec) else 3)
    if crops is not None and not spec.recipe.graph:
        rows["mirror"] = crops.mirror
    return rows


def output_of(spec: DecodeSpec, rows: _Rows) -> Output:
    """Return what the results of rows have in common; for a graph they are squares, as `Finisher.square` says."""
    red, green, blue = spec.std
    return Output(
        dtype=_dtype(spec), planar=_planar(spec), mean=spec.mean, scale=(1 / red, 1 / green, 1 / blue),
        width=int(rows["target_width"].max(initial=0)), height=int(rows["target_height"].max(initial=0)),
    )  # fmt: skip


def pixel_shape(spec: DecodeSpec, count: int) -> tuple[int, ...]:
    """Return the shape of a dense batch."""
    return (count, spec.size, spec.size, 3) if spec.channels_last else (count, 3, spec.size, spec.size)


@dataclass(slots=True, eq=False)
class GpuCanvas:
    """Where the pixels of one batch go. One thread works with it."""

    spec: DecodeSpec
    pixels: _Pixels
    """What `DecodedBatch.pixels` says, whole when each place was aimed at and that work is done; None for squares."""
    address: int = 0
    """Of dense pixels, or of squares."""
    memory: object = None
    """Keeps them."""
    whole: list[DeviceArray] = field(default_factory=list)
    """Memory of whole images."""

    def aim(self, rows: _Rows, places: _Ints, allocate: Allocate) -> None:
        """Set the addresses at which the results of rows go.

        Args:
            rows: [n].
            places: [n] in the batch.
            allocate: memory for whole images, as many bytes as they have.
        """
        spec = self.spec
        if spec.recipe.cut != "whole":
            rows["target"] = self.address + places * (3 * spec.size * spec.size * np.dtype(_dtype(spec)).itemsize)
            return
        sides = rows[["target_height", "target_width"]].tolist()
        shapes: list[tuple[int, ...]] = [(height, width, 3) for height, width in sides]
        ends = np.cumsum(rows["target_width"].astype(np.int64) * rows["target_height"] * 3)
        memory = allocate((int(ends[-1]),), "uint8")
        self.whole.append(memory)
        rows["target"][0] = memory.address
        rows["target"][1:] = memory.address + ends[:-1]
        for at, image in zip(places.tolist(), memory.split(shapes), strict=True):
            self.pixels[at] = image


def begun(spec: DecodeSpec, count: int, allocate: Allocate, squares: tuple[int, object] | None) -> GpuCanvas:
    """Return the canvas of a batch.

    Args:
        spec: of its pixels.
        count: images.
        allocate: memory for pixels.
        squares: address of uint8 [count, size, size, 3] for a graph, and what keeps it; None without a graph.
    """
    if squares is not None:
        return GpuCanvas(spec, None, *squares)
    if spec.recipe.cut == "whole":
        return GpuCanvas(spec, [None] * count)
    memory = allocate(pixel_shape(spec, count), spec.dtype)
    return GpuCanvas(spec, memory.pixels, memory.address, memory)


def _dtype(spec: DecodeSpec) -> str:
    return "uint8" if spec.recipe.graph or spec.recipe.cut == "whole" else spec.dtype


def _planar(spec: DecodeSpec) -> bool:
    return not (spec.channels_last or spec.recipe.graph or spec.recipe.cut == "whole")


def _shown(width: _Ints, height: _Ints, orientation: _Ints) -> tuple[_Ints, _Ints]:
    sideways = orientation >= _SIDEWAYS
    return np.where(sideways, height, width), np.where(sideways, width, height)
