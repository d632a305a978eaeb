"""`python -m fsdp_trainer.config.document` rewrites conf/ and docs/configuration.md."""

from fsdp_trainer.config.document import write

write()
