"""Images as a kind of media. How rows name them lies in `records/images.py`."""

from fsdp_trainer.data.images.image_files import ImageFiles, changed_files
from fsdp_trainer.data.images.image_findings import IMAGE_FINDINGS
from fsdp_trainer.data.images.image_processor import ImageProcessor
from fsdp_trainer.data.images.sample_images import SampleImage
from fsdp_trainer.data.media.media import MediaKind

IMAGE = MediaKind(
    name="image",
    column="images",
    counts=("images", "image_tokens"),
    processor=ImageProcessor,
    files=ImageFiles,
    from_json=SampleImage.from_json,
    changed=changed_files,
    findings=IMAGE_FINDINGS,
)
