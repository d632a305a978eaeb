"""Images of samples, as stores keep them and models take them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fsdp_trainer.data.files.sources import RecordError
from fsdp_trainer.data.images.image_files import (
    ImageFile,
    decoded,
    digest_of,
    read_file,
)
from fsdp_trainer.errors import UserError


@dataclass(frozen=True)
class SampleImage:
    """An image of a sample. tokens: number of the sample's tokens that stand for it."""

    file: ImageFile
    tokens: int

    def as_json(self) -> list:
        return [self.file.path, self.file.digest, *self.file.size, *self.file.stamp, self.tokens]

    @classmethod
    def from_json(cls, values: list) -> "SampleImage":
        path, digest, width, height, size, mtime, tokens = values
        return cls(ImageFile(path, digest, (width, height), (size, mtime)), tokens)

    def load(self, processor: Any) -> dict[str, np.ndarray]:
        """Return its arrays. Raises UserError if its file is not what was tokenized."""
        path = self.file.path
        try:
            content, _ = read_file(path, path)
            if digest_of(content) != self.file.digest:
                raise RecordError("has changed since it was tokenized: start again")
            return processor.numbers_of(decoded(content, path), path)
        except RecordError as error:
            raise UserError("an image cannot be used", path, str(error)) from None
