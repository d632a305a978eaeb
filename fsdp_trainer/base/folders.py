"""Folders that a command creates, and deletes again if it fails and leaves them empty."""

from pathlib import Path


class NewFolders:
    """The given folders and their parents that did not exist when this object was created."""

    def __init__(self, *folders: Path):
        self._missing: list[Path] = []
        for folder in folders:
            self._missing += [path for path in (folder, *folder.parents) if not path.exists()]

    def __contains__(self, folder: Path) -> bool:
        return folder in self._missing

    def delete_empty(self) -> None:
        """Delete the folders that exist by now and are empty, the innermost first."""
        for folder in sorted(set(self._missing), key=lambda path: -len(path.parts)):
            try:
                folder.rmdir()
            except OSError:  # it was never created or is not empty
                continue
