"""Folders that a command is about to make, and deletes again if it comes to nothing."""

from pathlib import Path


class NewFolders:
    """The folders among these, and those above them, that do not exist yet."""

    def __init__(self, *folders: Path):
        self._missing: list[Path] = []
        for folder in folders:
            self._missing += [path for path in (folder, *folder.parents) if not path.exists()]

    def __contains__(self, folder: Path) -> bool:
        return folder in self._missing

    def delete_empty(self) -> None:
        """Delete those that exist by now and are empty, the innermost first."""
        for folder in sorted(set(self._missing), key=lambda path: -len(path.parts)):
            try:
                folder.rmdir()
            except OSError:  # it was not made, or holds something: those above it do too
                continue
