"""A site's private states on its own disk: whole or not at all, by round, those that the server's checkpoint needs."""

from __future__ import annotations

from pathlib import Path

from fedtailor.core.trees import Tree
from fedtailor.errors import RunError
from fedtailor.experiments.store import read_json, read_tree, write_json, write_tree


class SiteState:
    """One run's private states. A state counts from the moment its description is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def rounds(self) -> list[int]:
        """Rounds after which a state was kept."""
        return sorted(int(file.stem.removeprefix("state")) for file in self.folder.glob("state*.json"))

    def keep(self, round: int, state: Tree) -> None:
        """Write the state after a round."""
        write_json(self._index(round), write_tree(self._index(round).with_suffix(".safetensors"), state))

    def read(self, round: int) -> Tree:
        """The state after a round."""
        if not self._index(round).exists():
            known = ", ".join(map(str, self.rounds())) or "none"
            raise RunError(f"{self.folder}: no private state of round {round}; there are: {known}")
        return read_tree(self.folder, read_json(self._index(round)))

    def forget_but(self, rounds: set[int]) -> None:
        """Remove all states but these."""
        for round in set(self.rounds()) - rounds:
            self._index(round).unlink()
            self._index(round).with_suffix(".safetensors").unlink(missing_ok=True)

    def _index(self, round: int) -> Path:
        return self.folder / f"state{round:+07d}.json"
