"""Images as a kind of media. How rows name them lies in `records/images.py`."""

from fsdp_trainer.data.images.image_files import ImageFiles
from fsdp_trainer.data.images.image_findings import IMAGE_FINDINGS
from fsdp_trainer.data.images.image_processor import ImageProcessor
from fsdp_trainer.data.media.media import MediaKind

IMAGE = MediaKind(
    name="image",
    column="images",
    counts=("images", "image_tokens"),
    processor=ImageProcessor,
    files=ImageFiles,
    findings=IMAGE_FINDINGS,
)
