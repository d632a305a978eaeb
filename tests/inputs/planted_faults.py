"""Faults that change this program as a mistake in it would, for certificates to find."""

from fsdp_trainer.apps.generate import Asked, Speaker
from fsdp_trainer.data.tokens.samples import SampleBuilder
from fsdp_trainer.training.batches import Assembler


def leak():
    """Let all documents of a row see each other."""
    layout = Assembler.layout

    def joined(self, documents, length):
        return layout(self, [[sum(row)] if row else [] for row in documents], length)

    Assembler.layout = joined


def weighed(change):
    """Change the weights of tokenized samples."""
    weigh = SampleBuilder._weigh

    def changed(self, encoding, text):
        sample = weigh(self, encoding, text)
        change(self, sample)
        return sample

    SampleBuilder._weigh = changed


def learn_questions(builder, sample):
    """Learn all tokens."""
    sample.weights[:] = 1


def chat_otherwise():
    """Write a space after what chat asks with."""
    ask = Speaker.ask

    def changed(self, messages, text_of=None):
        return Asked(ask(self, messages, text_of).text + " ")

    Speaker.ask = changed


PLANTS = {
    "leak between documents": leak,
    "wrong mask": lambda: weighed(learn_questions),
    "template that differs in chat": chat_otherwise,
}
CHANGED = [(Assembler, "layout"), (SampleBuilder, "_weigh"), (Speaker, "ask")]
"""What the plants change."""
