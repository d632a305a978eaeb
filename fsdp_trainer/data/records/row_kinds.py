"""The kinds of media that rows may hold."""

from fsdp_trainer.data.records.images import IMAGES
from fsdp_trainer.data.records.media import RowMedia

ROW_KINDS: dict[str, RowMedia] = {one.kind: one for one in (IMAGES,)}
"""By name."""
PART_KINDS = {part: one for one in ROW_KINDS.values() for part in one.parts}
"""By the types of their parts of a turn."""
