"""The command line in this process, as a user meets it: what it prints, and what it refuses."""

from world import command


class Program:
    """A command line: `program("report", "source=runs/a")` returns what it prints.

    One text is divided at its spaces, or only where it has two of them: `"-m  run.name='a b'"`.
    """

    out = err = ""
    """What the last command line wrote."""

    def __call__(self, *words, code=0):
        """Run a command line that ends with `code`; return its output, or its error message."""
        typed = words_of(words[0]) if len(words) == 1 else [str(word) for word in words]
        result = command(typed, None)
        assert result.code == code, result
        self.out, self.err = result.out, result.err
        return self.err if code else self.out

    def refuses(self, cases, *before):
        """Check that each command line is refused in one message, with what is said of it.

        It never says SECRET.

        before: words with which each begins.
        """
        for words, said in cases.items():
            message = self(*before, *words_of(words), code=2)
            for part in [said] if isinstance(said, str) else said:
                assert part in message, words
            assert "SECRET" not in message, words
            assert (message.count("fsdp-trainer: "), self.out) == (1, ""), words


def words_of(line):
    """Return the words of a command line. See Program."""
    return [word for word in line.split("  " if "  " in line else None) if word]
