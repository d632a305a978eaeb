"""A model's own processor of images: the tokens that stand for one, and its numbers.

Uses transformers' processor of the model's folder with Pillow alone. torchvision is not needed.
"""

import hashlib
from collections.abc import Callable
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np

from fsdp_trainer.base.json_files import read_object
from fsdp_trainer.data.files.media_files import MediaFile, digest_of
from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.images.image_files import decoded, first_line, pillow_module, read_file
from fsdp_trainer.errors import UserError

Result = TypeVar("Result")
FILES = ("preprocessor_config.json", "processor_config.json", "tokenizer_config.json")
VIDEOS = "video_processor"
LIBRARIES = ("transformers", "pillow")
UNREAD = "the model's images cannot be read"
KINDS, PLACES = ("vision", "image"), ("start", "end")
"""Parts of transformers' names in config.json of the tokens around an image."""
USUAL = (224, 224)
"""Width and height of an image that every processor takes."""


class ImageProcessor:
    """The preparation of images for a model's tower. folder: of the model, with its processor."""

    kind = "image"

    def __init__(self, folder: str):
        self.folder = folder
        self._texts: dict[tuple[int, int], str] = {}

    def __reduce__(self) -> tuple:
        return ImageProcessor, (self.folder,)

    @cached_property
    def processor(self) -> Any:
        """transformers' processor. Raises UserError."""
        pillow_module()
        return load_processor(self.folder)

    @cached_property
    def mark(self) -> str:
        return str(self.processor.image_token)

    @cached_property
    def token(self) -> int:
        processor = self.processor
        numbers = getattr(processor, "image_token_ids", None)
        return int(numbers[0] if numbers else processor.image_token_id)

    @cached_property
    def shown(self) -> str:
        """The text of an image outside of a chat: its mark between the tokens that config.json
        names for the beginning and the end of one, as those of Qwen, unless the mark's own text
        has them.
        """
        config = read_object(Path(self.folder) / "config.json", UNREAD)
        whole = self.text_of(USUAL)
        named = [[config.get(f"{kind}_{place}_token_id") for kind in KINDS] for place in PLACES]
        ids = [next((i for i in each if isinstance(i, int)), None) for each in named]
        tokens = ["" if i is None else self.tokenizer.convert_ids_to_tokens(i) for i in ids]
        start, end = ("" if token in whole else token for token in tokens)
        return f"{start}{self.mark}{end}"

    @property
    def tokenizer(self) -> Any:
        return self.processor.tokenizer

    @cached_property
    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=10)
        for name in FILES:
            file = Path(self.folder) / name
            digest.update(file.read_bytes() if file.exists() else b"-")
        digest.update(repr([version(library) for library in LIBRARIES]).encode())
        return digest.hexdigest()

    def text_of(self, size: tuple[int, int], name: str = "") -> str:
        """Return the text in place of the mark of an image. size: its width and height.

        Raises RecordError if the processor refuses images of this size.
        """
        if size not in self._texts:
            blank = pillow_module().new("RGB", size)
            self._texts[size] = self._applied(self._text, blank, name)
        return self._texts[size]

    def load(self, file: MediaFile) -> dict[str, np.ndarray]:
        """Return the arrays of a sample's image. Raises UserError if it has changed."""
        path = file.path
        try:
            content, _ = read_file(path, path)
            if digest_of(content) != file.digest:
                raise RecordError("has changed since it was tokenized: start again")
            return self.numbers_of(decoded(content, path), path)
        except RecordError as error:
            raise UserError("an image cannot be used", path, str(error)) from None

    def numbers_of(self, picture: Any, name: str = "") -> dict[str, np.ndarray]:
        """Return the arrays that the model takes of one image, by transformers' names.

        Raises RecordError if the processor refuses the image.
        """
        return self._applied(self._numbers, picture, name)

    def _text(self, picture: Any) -> str:
        inputs = self.processor.image_processor([picture], return_tensors="np")
        return self.processor.replace_image_token(inputs, image_idx=0)

    def _numbers(self, picture: Any) -> dict[str, np.ndarray]:
        inputs = self.processor.image_processor([picture], return_tensors="np")
        return {name: np.asarray(values) for name, values in inputs.items()}

    def _applied(self, work: Callable[[Any], Result], picture: Any, name: str) -> Result:
        """Return the result of `work` for a picture.

        Raises RecordError if it fails for this one, UserError if it fails for any.
        """
        try:
            return work(picture)
        except Exception as error:  # whatever a processor raises for a size that it does not take
            if picture.size == USUAL:
                reason = f"its processor takes no image: {first_line(error)}"
                raise UserError(UNREAD, self.folder, reason) from None
            self._applied(work, pillow_module().new("RGB", USUAL), name)
            width, height = picture.size
            raise RecordError(
                f"the image {name} of {width:,} × {height:,} pixels is refused by the model's"
                f" processor: {first_line(error)}"
            ) from None

    def smallest(self) -> dict[str, np.ndarray]:
        return self.numbers_of(pillow_module().new("RGB", (28, 28)))

    def example(self) -> tuple[dict[str, np.ndarray], int]:
        stripes = np.zeros((48, 64, 3), np.uint8)
        stripes[:, ::5] = (250, 120, 30)
        picture = pillow_module().fromarray(stripes)
        token = self.tokenizer.convert_ids_to_tokens(self.token)
        return self.numbers_of(picture), self.text_of(picture.size).count(token)


class NoVideos:
    """Takes the place of processors of videos, which ask for torchvision."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> None:
        """Return nothing."""


def load_processor(folder: str) -> Any:
    """Return transformers' processor of a folder. Raises UserError if it has none for images."""
    import transformers
    from transformers import AutoConfig, processing_utils
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES as NAMES
    from transformers.models.auto.processing_auto import processor_class_from_name
    from transformers.processing_utils import ProcessorMixin

    model_type = AutoConfig.from_pretrained(folder).model_type
    made = processor_class_from_name(NAMES[model_type]) if NAMES.get(model_type) else None
    if made is None or not hasattr(made, "replace_image_token"):
        reason = f"transformers {transformers.__version__} has no processor of images for it"
        raise UserError("the model does not read images", f"model_type={model_type}", reason)
    known = processing_utils.MODALITY_TO_AUTOPROCESSOR_MAPPING
    kinds = [*known.keys()]
    parts = {kind: NoVideos if kind == VIDEOS else known[kind] for kind in kinds}
    try:
        with (
            patch.object(processing_utils, "MODALITY_TO_AUTOPROCESSOR_MAPPING", parts),
            patch.object(ProcessorMixin, "check_argument_for_proper_class", _accept),
        ):
            return made.from_pretrained(folder, backend="pil")
    except (OSError, ValueError, ImportError, TypeError, AttributeError) as error:
        reason = f"its processor of images cannot be loaded: {first_line(error)}"
        raise UserError(UNREAD, folder, reason) from None


def _accept(self: Any, name: str, argument: Any) -> None:
    """Take the place of a check of a processor's parts."""
